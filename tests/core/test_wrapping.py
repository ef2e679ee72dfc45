"""Wrappers lie around each other in the declared order, on one layer alone."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest
from paddle import nn

from paddle_dp.core.wrapping import ORDER, Method, wrap


def noting(word: str, notes: list[str]) -> Callable[[Method], Method]:
    def wrapper(own: Method) -> Method:
        return lambda x: (notes.append(word), own(x))[1]

    return wrapper


def test_the_order_is_the_declared_one_from_the_inside_out() -> None:
    layer, other, notes = nn.Linear(2, 2), nn.Linear(2, 2), list[str]()
    x = paddle.ones([1, 2])
    plain = layer(x)
    for kind in (ORDER[0], *ORDER):  # one kind may come twice
        wrap(layer, "forward", kind, noting(kind, notes))
    assert (layer(x) == plain).all() and notes == [*reversed(ORDER), ORDER[0]]
    assert layer.forward.__name__ == "forward" and other(x) is not None and len(notes) == len(ORDER) + 1


@pytest.mark.parametrize(("first", "then"), [(ORDER[1], ORDER[0]), (ORDER[2], ORDER[1])])
def test_what_belongs_inside_cannot_come_later(first: str, then: str) -> None:
    layer = nn.Linear(2, 2)
    wrap(layer, "forward", first, lambda own: own)
    with pytest.raises(
        ValueError, match=f"Linear.forward is wrapped for {first} already, and {then} belongs inside"
    ):
        wrap(layer, "forward", then, lambda own: own)
    wrap(layer, "extra_repr", then, lambda own: own)  # another method
