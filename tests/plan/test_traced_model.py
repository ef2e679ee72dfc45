"""A model's operators take the time that its settings foretell, where these do, and keep the bytes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.model.traced import traced_model
from paddle_dp.part import find
from paddle_dp.plan.candidates import Candidate, Numerics, workload_of
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.kernel_time import HOST_OPERATORS, LOSS_BYTES, SHEET
from paddle_dp.plan.memory import Widths
from paddle_dp.plan.step_time import StepTime, step_time
from paddle_dp.plan.traced_model import (
    Operator,
    TracedModel,
    norm_bytes,
    traced_step_time,
)
from paddle_dp.plan.transformer import Transformer
from paddle_dp.units import Recompute

A100 = DEVICES["a100-80"]
LOW = Numerics(low=True, widths=Widths.for_states(2, low=True), flash=False)
NONE, FULL = Recompute(), Recompute.parse("full")
GPT: dict[str, Any] = {"vocab": 50304, "width": 1024, "depth": 4, "length": 1024, "heads": 16}


def choice(
    samples: int = 8, micro_batches: int = 1, recompute: Recompute = NONE, **degrees: int
) -> Candidate:
    stage = int(degrees.get("sharding", 1) > 1)
    return Candidate(
        degrees=Degrees(**degrees),
        micro=samples,
        micro_batches=micro_batches,
        stage=stage,
        recompute=recompute,
    )


def chain(*operators: Operator, weights: Sequence[int] = ()) -> TracedModel:
    blocks = 1 + max(operator.block for operator in operators)
    return TracedModel(
        operators=operators, handed=(64.0,) * (blocks - 1), weights=tuple(weights) or (1,) * blocks,
        outputs=operators[-1].written,
        inputs="float32[64]",
    )  # fmt: skip


def forecast(model: TracedModel, *choices: Candidate, **numerics: Any) -> StepTime:
    return traced_step_time(model, choices, A100, replace(LOW, **numerics), SHEET)


def product(block: int = 0, **changes: Any) -> Operator:
    fields: dict[str, Any] = {"read": 512.0, "written": 1024.0, "weights": 512.0 * 1024, "saved": 512.0}
    fields["product"] = (1.0, 1024.0, 512.0)
    return Operator(name="matmul", block=block, **{**fields, **changes})


def test_a_product_takes_its_operations_or_its_bytes_and_backward_one_for_each_gradient() -> None:
    samples = 4096
    sides = [side / (side + SHEET.side) for side in (samples, 1024, 512)]
    arithmetic = 2 * samples * 1024 * 512 / (A100.peak16 * SHEET.gemm * np.prod(sides))
    for gradients, times in ((2, 3), (1, 2), (0, 1)):
        step = forecast(chain(product(gradients=gradients)), choice(samples))
        assert step.terms["products"][0] == pytest.approx(times * (arithmetic + SHEET.gap))
    narrow = chain(product(product=(1.0, 1.0, 1.0)))
    bytes_moved = 2 * (samples * 1536 + 512 * 1024) / (A100.memory_rate * SHEET.memory)
    assert forecast(narrow, choice(samples)).terms["products"][0] == pytest.approx(
        3 * (bytes_moved + SHEET.gap)
    )


def test_products_of_activations_are_more_and_not_larger_with_more_samples() -> None:
    scores = product(weights=0.0, product=(64.0, 64.0, 64.0), read=8192.0, written=4096.0, count=16.0)
    one, two = (forecast(chain(scores), choice(samples)).terms["products"][0] for samples in (512, 1024))
    assert two - 3 * SHEET.gap == pytest.approx(2 * (one - 3 * SHEET.gap))


def test_kernels_that_move_bytes_take_half_as_much_again_in_backward() -> None:
    relu = Operator(name="relu", block=0, read=1e6, written=1e6)
    step = forecast(chain(relu), choice(16))
    rate = A100.memory_rate * SHEET.memory
    moved, loss = 2 * 16 * 2e6 / rate, 16 * 1e6 * LOSS_BYTES / rate
    assert step.terms["elementwise"][0] == pytest.approx(2.5 * moved + 2 * SHEET.gap + loss)
    waits = forecast(chain(*[replace(relu, read=1.0, written=1.0)] * 100), choice(1)).terms["host"][0]
    launches = 300 * SHEET.host / HOST_OPERATORS
    assert waits == pytest.approx(launches - 200 * SHEET.gap, rel=0.01)


@pytest.fixture(scope="module")
def traced_gpt() -> TracedModel:
    return traced_model(find("models", "gpt")(**GPT).build, [((GPT["length"],), "int64")])


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize(
    "degrees", [{"data": 2}, {"data": 2, "pipeline": 2}, {"data": 1, "sharding": 4}, {"data": 1}]
)
@pytest.mark.parametrize("recompute", [NONE, FULL])
def test_a_gpt_takes_the_same_time_by_its_operators_and_by_its_settings(
    low: bool, degrees: dict[str, int], recompute: Recompute, traced_gpt: TracedModel
) -> None:
    """Two countings that share nothing but the roofline and the links: by 5 % at most."""
    settings = {name: GPT[name] for name in ("depth", "width", "heads", "vocab", "length")}
    sizes = Transformer(kv_heads=16, head_width=64, hidden=4096, matrices=2, tables=2, **settings)
    numerics = Numerics(low=low, widths=Widths.for_states(2, low=low), flash=False)
    layout = choice(4, 4, recompute, **degrees)
    by_settings = step_time(workload_of(sizes, [layout], A100, numerics)).seconds[0]
    by_operators = traced_step_time(traced_gpt, [layout], A100, numerics, SHEET).seconds[0]
    assert by_operators == pytest.approx(by_settings, rel=0.05)
    flops = workload_of(sizes, [layout], A100, numerics).flops[0] / (16 * Degrees(**degrees).dp_size)
    assert traced_gpt.flops == pytest.approx(flops, rel=0.01)


def test_heads_of_another_width_have_the_products_of_their_operators() -> None:
    settings: dict[str, Any] = {"vocab": 512, "width": 256, "depth": 2, "hidden": 512, "length": 128}
    settings |= {"heads": 4, "kv_heads": 2, "head_width": 96}
    traced = traced_model(find("models", "llama")(**settings).build, [((128,), "int64")])
    sizes = Transformer(matrices=3, tables=2, **settings)
    assert traced.flops == pytest.approx(workload_of(sizes, [choice(1)], A100, LOW).flops[0], rel=0.01)


def test_norms_over_all_ranks_move_more_and_exchange() -> None:
    norm = Operator(name="batch_norm", block=0, read=1e6, written=1e6, channels=64, saved=1e6)
    model = chain(norm, Operator(name="mean", block=0, read=1.0, written=1.0))
    alone = forecast(model, choice(16), choice(16, data=8))
    together = forecast(model, choice(16), choice(16, data=8), sync_norms=True)
    assert "norms" not in alone.terms and alone.seconds[0] == together.seconds[0]
    assert together.terms["norms"][0] == 0 < together.terms["norms"][1]
    assert together.terms["elementwise"][1] > 4 * alone.terms["elementwise"][1]
    assert (
        norm_bytes(2, False) == (6, 10)
        and norm_bytes(4, True) == (32, 40)
        and norm_bytes(2, True) == (44, 52)
    )


def test_the_slowest_stage_sets_the_pace() -> None:
    model = chain(*[product(block) for block in (0, 0, 0, 1)], weights=(300, 100))
    step = forecast(model, choice(2**16), choice(2**16, 4, pipeline=2))
    whole, halves = step.terms["products"]
    assert halves == pytest.approx(4 * 3 / 4 * whole)
    assert step.terms["bubble"][1] == pytest.approx(
        (whole + step.terms["elementwise"][0]) / 2
    )  # with the loss


def test_bytes_are_kept_for_every_micro_batch_that_waits() -> None:
    model = chain(*[product(block) for block in range(4)], weights=(1,) * 4)
    kept, widest = 4 * 512, max(1536, 12 * 1024 / 2)
    stages = [[0, 1, 2, 3]]
    assert model.activation_bytes(stages, 8, NONE, 1.0, 2, False) == 2 * 8 * (kept + widest)
    waiting = model.activation_bytes(stages, 8, NONE, 3.0, 2, False)
    assert waiting == 2 * 8 * (3 * kept + widest)
    recomputed = model.activation_bytes(stages, 8, FULL, 3.0, 2, False)
    assert recomputed == 2 * 8 * (
        3 * (2 * 512 + 2 * 64) + 512 + widest
    )  # the first and the last block's, inputs, and one block again
    first = model.activation_bytes([[0, 1]], 8, NONE, 2.0, 2, False)
    assert first == 2 * 8 * (2 * 2 * 512 + 1536)


def test_a_norm_over_all_ranks_keeps_float32() -> None:
    norm = Operator(name="batch_norm", block=0, read=1000.0, written=1000.0, channels=8, saved=1000.0)
    model = chain(norm, replace(norm, name="relu", channels=0, saved=0.0, written=1.0))
    alone, together = (model.activation_bytes([[0]], 1, NONE, 1.0, 2, sync) for sync in (False, True))
    assert together - alone == 2 * 1000


def test_masks_have_bytes_of_their_own() -> None:
    """They are as long in 16 bits as in 32."""
    drop = Operator(name="dropout", block=0, read=1.0, written=1.0, saved=1000.0, masks=500.0)
    short, long = (chain(drop).activation_bytes([[0]], 1, NONE, 1.0, number, False) for number in (2, 4))
    assert long - short == pytest.approx(2000, abs=10) and short == pytest.approx(2500, abs=20)
