"""Batches are copied to the device while it computes: they arrive whole, in time, and beside what it computes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.house.datasets import Numbers
from tests.ranks import run_ranks

SAMPLES, BATCH, WIDTH = 40, 4, 5000


def computes(stream: Any) -> bool:
    """Whether it is the current stream. (Paddle's `==` compares the objects in Python, which are made anew.)"""
    import paddle

    return repr(stream) == repr(paddle.device.current_stream())


def copied(forget: str) -> list[list[float]]:
    """In a rank: [first, last number, target] of each batch's first sample; the device copies late and slowly.

    `forget` leaves one thing out that a copy needs.
    """
    late = 0.1 if forget != "nothing" else 0.01  # seconds for each batch
    os.environ |= {"SIM_PINNED": "1", "SIM_COPY_BANDWIDTH": str(4 * BATCH * WIDTH / late)}
    import paddle

    from paddle_dp.data import Loader
    from paddle_dp.mesh import copies, join

    join()
    if forget == "the source":
        kept: list[Any] = []  # the events: where one is destroyed, Paddle waits for it
        copies._recorded = type("Forgetful", (list,), {"append": lambda _, pair: kept.append(pair[0])})()
    if forget == "the arrival":
        right = paddle.device.Stream.wait_event
        paddle.device.Stream.wait_event = lambda stream, event: (
            None if computes(stream) else right(stream, event)
        )
    found = []
    for batch in Loader.plain(Numbers(SAMPLES, WIDTH), BATCH, shuffle=False).read(0):
        (micro_batch,) = batch.micro_batches
        x = micro_batch.inputs[0] + 0.0
        found.append([x[0].item(), x[-1].item(), float(micro_batch.targets[0].item())])
    return found


def test_each_batch_is_there_when_it_is_computed_with() -> None:
    (found,) = run_ranks(copied, 1, "nothing")
    assert found == [[k, k, 10 * k] for k in range(0, SAMPLES, BATCH)]


@pytest.mark.long
@pytest.mark.parametrize("forget", ["the source", "the arrival"])
def test_what_a_copy_needs_shows_when_it_is_forgotten(forget: str) -> None:
    (found,) = run_ranks(copied, 1, forget)
    assert found != [[float(k)] * 3 for k in range(0, SAMPLES, BATCH)]


def reused(waits: bool) -> list[float]:
    """In a rank: what the computing stream copied of a tensor whose memory is free, and then used by the next item."""
    os.environ |= {"SIM_PINNED": "1", "SIM_COPY_BANDWIDTH": "4e6"}
    import paddle

    from paddle_dp.mesh import copies, join
    from paddle_dp.mesh.device import current_device

    join()
    place, size = current_device(), 1000
    if not waits:
        right = paddle.device.Stream.wait_event
        paddle.device.Stream.wait_event = lambda stream, event: (
            right(stream, event) if computes(stream) else None
        )

    def items() -> Iterator[Any]:
        for k in range(6):
            yield copies.to_device(np.full(size, k, np.float32), place)

    kept = []
    for x in copies.prefetch(items(), place):
        copies.to_device(np.zeros(50_000, np.float32), place)  # the computing stream is late by 50 ms
        kept.append(paddle.empty_like(x).copy_(x, False))
        del x
    return [y[0].item() for y in kept]


def test_memory_is_written_when_what_was_queued_for_it_is_done() -> None:
    assert run_ranks(reused, 1, True) == [[float(k) for k in range(6)]]


@pytest.mark.long
def test_memory_that_is_written_too_early_shows() -> None:
    assert run_ranks(reused, 1, False) != [[float(k) for k in range(6)]]


def broken() -> list[Any]:
    """In a rank: what is yielded before an error of the third item."""
    from paddle_dp.mesh import copies, join
    from paddle_dp.mesh.device import current_device

    join()

    def items() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("the third")

    seen: list[Any] = []
    try:
        for item in copies.prefetch(items(), current_device()):
            seen.append(item)
    except ValueError as error:
        seen.append(str(error))
    return seen


def test_an_error_in_reading_ahead_is_raised_in_its_turn() -> None:
    assert run_ranks(broken, 1) == [[1, 2, "the third"]]


def overlapped() -> float:
    """In a rank: seconds for ten batches of which each takes 60 ms to copy and 60 ms to compute with."""
    os.environ["SIM_COPY_BANDWIDTH"] = str(4 * BATCH * WIDTH / 0.06)
    from paddle_dp.data import Loader
    from paddle_dp.mesh import join

    join()
    began = time.monotonic()
    for batch in Loader.plain(Numbers(SAMPLES, WIDTH), BATCH).read(0):
        batch.micro_batches[0].inputs.sum().item()
        time.sleep(0.06)
    return time.monotonic() - began


@pytest.mark.long
def test_a_batch_is_copied_while_the_device_computes_with_the_one_before() -> None:
    (seconds,) = run_ranks(overlapped, 1)
    assert 0.6 < seconds < 1.0  # one after the other: 1.2
