"""A copy of a function gives the same results and leaves no trace; what cannot be copied is refused."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from functools import partial
from random import uniform
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.identity.function_copy import UncopiedError, copied_function

calls = 0
called: list[int] = []


def counts_in_global(step: int) -> float:
    global calls
    calls += 1
    return step / calls


def counts_in_list(step: int) -> float:
    called.append(step)
    return step / len(called)


def counts_in_default(step: int, seen: list[int] = []) -> float:  # noqa: B006 - that is the point
    seen.append(step)
    return step / len(seen)


def counts_in_attribute(step: int) -> float:
    counts_in_attribute.calls = getattr(counts_in_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return float(step / counts_in_attribute.calls)  # type: ignore[attr-defined]


def counts_through_another(step: int) -> float:
    return counts_in_global(step)


def closure(kind: str) -> Callable[[int], float]:
    number, numbers, array = 0, {"calls": 0}, np.zeros(1)
    space, arguments = SimpleNamespace(calls=0), argparse.Namespace(calls=0)

    def rebinds(step: int) -> float:
        nonlocal number
        number += 1
        return step / number

    def writes(step: int) -> float:
        numbers["calls"] += 1
        array[0] += 1
        space.calls += 1
        arguments.calls += 1
        return float(step / (numbers["calls"] + array[0] + space.calls + arguments.calls))

    def recurs(step: int) -> float:
        return 1.0 if step < 1 else math.sqrt(2) * recurs(step - 1)

    return {"rebinds": rebinds, "writes": writes, "recurs": recurs}[kind]


@pytest.mark.parametrize(
    "function",
    [counts_in_global, counts_in_list, counts_in_default, counts_in_attribute, counts_through_another,
     closure("rebinds"), closure("writes"), closure("recurs"), lambda step: max(0.1, 1 - step / 10)],
)  # fmt: skip
def test_a_copy_computes_the_same_and_leaves_no_trace(function: Callable[[int], float]) -> None:
    results = [copied_function(function)(3) for _ in range(2)]  # of two copies, each called once
    again = copied_function(function)
    several = [again(3) for _ in range(4)]
    assert results == [function(3)] * 2 and several[1:] == [function(3) for _ in range(3)]


cache: dict[int, float] = {}


def fills(step: int) -> None:
    cache[step] = 0.9**step


def reads(step: int) -> float:
    if step not in cache:
        fills(step)
    return cache[step]


def test_functions_that_share_a_table_share_its_copy() -> None:
    assert copied_function(reads)(3) == pytest.approx(0.729) and not cache

    total = 0

    def adds() -> None:
        nonlocal total
        total += 1

    def counts(step: int) -> float:
        adds()
        return float(total)

    copy = copied_function(counts)
    assert [copy(0), copy(0)] == [1, 2] and total == 0


def test_what_refers_to_itself_is_copied() -> None:
    rows: list[Any] = [0.5]
    rows.append(rows)
    assert copied_function(lambda step: rows[1][1][0])(0) == 0.5


class Remembers:
    calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return step / self.calls


weights, table = paddle.ones([2]), np.zeros(1 << 18)


@pytest.mark.parametrize(
    "function",
    [Remembers(), Remembers().__call__, partial(counts_in_list), lambda step: weights.sum(),
     lambda step: random.random(), lambda step: uniform(0, 1), lambda step: np.random.rand(), random.Random(3).gauss,
     lambda step: Remembers.calls, lambda step: table[step]],
)  # fmt: skip
def test_what_may_keep_numbers_elsewhere_is_refused(function: Any) -> None:
    with pytest.raises(UncopiedError):
        copied_function(function)
