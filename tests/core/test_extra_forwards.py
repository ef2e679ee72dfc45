"""How outputs differ: what is not finite must be the same, and hides nothing beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.core.extra_forwards import how_different, random_state

INF, NAN = math.inf, math.nan
HIDDEN = "differ in what is infinite or NaN"


@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        ([1.0, -2.0], [1.0, -2.0 + 1e-6], ""),
        ([1.0, -2.0], [1.5, -2.0], "differ by up to 0.5, and the largest is 2"),
        ([0.0, 0.0], [0.0, 1e-9], "differ by up to 1e-09, and the largest is 0"),
        ([1.0, -INF, INF, NAN], [1.0, -INF, INF, NAN], ""),
        ([1.0, -INF], [1.5, -INF], "differ by up to 0.5, and the largest is 1"),
        ([1.0, -INF], [1.0, INF], HIDDEN),
        ([1.0, -INF], [1.0, -1e30], HIDDEN),
        ([1.0, -INF], [1.0, NAN], HIDDEN),
        ([1.0, 2.0], [1.0, NAN], HIDDEN),
        ([1.0, NAN], [1.0, 2.0], HIDDEN),
        ([-INF, NAN], [-INF, NAN], ""),
        ([], [], ""),
        (3.0, 3.0, ""),
        (-INF, -INF, ""),
        ([True, False], [True, True], "differ"),
        ([3, 4], [3, 4], ""),
    ],
)
def test_how_outputs_differ(expected: Any, actual: Any, said: str) -> None:
    assert how_different(np.array(expected), np.array(actual), 1e-4) == said
    kind = "float32" if np.array(expected).dtype.kind == "f" else None
    tensors = [paddle.to_tensor(np.array(x), dtype=kind) for x in (expected, actual)]
    assert how_different(*tensors, 1e-4) == said


def test_bfloat16() -> None:
    a, b = (paddle.to_tensor([1.0, x, -INF]).astype("bfloat16") for x in (2.0, 3.0))
    assert how_different(a, a, 1e-4) == ""
    assert how_different(a, b, 1e-4) == "differ by up to 1, and the largest is 2"


def test_another_package_has_replaced_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """ppdiffusers does, on import: its object is of another kind."""
    monkeypatch.setattr(paddle, "Generator", lambda *_: object())
    before = random_state()
    assert random_state() == before
    paddle.rand([1])
    assert random_state() != before
