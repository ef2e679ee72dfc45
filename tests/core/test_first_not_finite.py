"""The first layer whose output is not finite is the one in which it arose, also where ranks run other layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core.first_not_finite import NotFiniteOutputs, first


def seen(
    layers: Sequence[tuple[str, nn.Layer]], bad: Sequence[str], apart: Sequence[str] = ()
) -> NotFiniteOutputs:
    """What a rank sees of a forward in which these layers run one after the other."""
    outputs, inside = NotFiniteOutputs(), {id(layer) for name, layer in layers if name in apart}
    with outputs.watched(layers, {}, 1, inside):
        for name, layer in layers:
            layer(paddle.full([2], float("nan") if name in bad else 1.0))
    return outputs


def test_a_branch_s_layer_is_named_and_not_the_join_that_another_rank_comes_to_sooner() -> None:
    def layers(*names: str) -> list[tuple[str, nn.Layer]]:
        return [(name, nn.Identity()) for name in names]

    branch = ["wide1", "wide2", "wide3"]
    here = seen(layers("begin", *branch, "join", "end"), ["wide3", "join", "end"], branch)
    there = seen(layers("begin", "narrow", "join", "end"), ["join", "end"], ["narrow"])
    rows: list[Any] = []
    for outputs in (here, there):
        first(outputs.not_finite, SimpleNamespace(ranks=1, gather=lambda row: (rows.append(row), [row])[1]))  # type: ignore[arg-type]
    said = first(here.not_finite, SimpleNamespace(ranks=2, gather=lambda _: rows))  # type: ignore[arg-type]
    assert "from wide3" in said and "on rank 0" in said
