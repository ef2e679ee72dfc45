"""Seconds of a step follow from its sizes: by hand for single terms, and as published for whole runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddle_dp.errors import UsageError
from paddle_dp.plan.devices import DEVICES, device_named
from paddle_dp.plan.kernel_time import SHEET, product_seconds
from paddle_dp.plan.step_time import (
    SHARES,
    data_rate,
    gradient_seconds,
    rank_weights,
    ring_seconds,
    step_time,
)
from paddle_dp.plan.workload import Workload, device_columns
from tools.planner.fitted_rates import errors
from tools.planner.published_rows import published

GPT = {"depth": 48, "width": 8192, "heads": 64, "vocab": 51200, "length": 2048, "micro": 1, "micros": 32}
A100 = device_columns(DEVICES["a100-80"])
EXACT = replace(SHEET, gap=0.0, host=0.0, start=0.0, fixed=0.0)


def workload(**settings: float) -> Workload:
    return Workload.stack([GPT | A100 | settings])


def numbers(*values: float) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], float) for value in values)


def part(load: Workload, name: str) -> float:
    return float(step_time(load, EXACT).terms[name][0])


def test_a_large_product_takes_its_flops_and_a_thin_one_its_bytes() -> None:
    load = workload()
    m, n, k = numbers(4096, 4096, 4096)
    filled = (4096 / 4160) ** 3
    large = product_seconds(m, n, k, load, EXACT)
    assert large == pytest.approx(2 * 4096**3 / (312e12 * 0.8 * filled))
    thin = product_seconds(*numbers(1, 4096, 4096), load, EXACT)
    assert thin == pytest.approx(2 * (2 * 4096 + 4096**2) / (2.039e12 * 0.8))


def test_a_ring_moves_twice_its_bytes_but_the_own_share() -> None:
    size, ranks, rate = numbers(8e9, 4, 100e9)
    assert ring_seconds(size, ranks, rate, EXACT) == pytest.approx(2 * 3 / 4 * 8e9 / 100e9)
    assert ring_seconds(size, np.ones(1), rate, SHEET) == 0


def test_the_parts_add_up_and_each_has_a_name() -> None:
    step = step_time(workload(tensor=4, pipeline=4, data=8, sequence=2, ulysses=1))
    assert step.seconds == pytest.approx(sum(seconds[0] for seconds in step.terms.values()))
    assert {name for names in SHARES.values() for name in names} == {
        *step.terms,
        "norms",
    }  # of a traced model
    assert sum(step.shares(0).values()) == pytest.approx(1)


def test_virtual_stages_divide_the_bubble_and_add_handovers() -> None:
    plain, dealt = (workload(tensor=8, pipeline=4, virtual_stages=v) for v in (1, 4))
    assert part(dealt, "bubble") == pytest.approx(part(plain, "bubble") / 4)
    assert part(dealt, "stages") / part(plain, "stages") == pytest.approx((32 * 4 + 3) / (32 + 3))
    assert part(workload(), "bubble") == 0


def test_the_fullest_stage_sets_the_pace() -> None:
    """14 blocks on one stage are slower than 12 with the head, and 12 with the head than 12 without."""
    even, uneven = workload(pipeline=4), workload(pipeline=4, full_depth=14, last_depth=10)
    assert part(uneven, "products") == pytest.approx(part(even, "products") * 14 / 12)
    assert part(even, "head") > 0 and part(uneven, "head") == 0


def test_full_recompute_runs_forward_again() -> None:
    kept, again = workload(tensor=8), workload(tensor=8, recomputed_blocks=1)
    assert part(again, "products") == pytest.approx(part(kept, "products") * 4 / 3, rel=0.01)
    assert part(again, "tensor") == pytest.approx(part(kept, "tensor") * 6 / 4)


def test_sharding_splits_the_update_and_stage_2_sends_every_micro_batch() -> None:
    plain, first, second = (workload(data=8, stage=s, sharded=8 if s else 1) for s in (0, 1, 2))
    assert part(first, "update") == pytest.approx(part(plain, "update") / 8)
    seconds = [float(gradient_seconds(each, rank_weights(each), EXACT)[0]) for each in (plain, first, second)]
    assert seconds[1] == pytest.approx(seconds[0])
    assert seconds[2] == pytest.approx(seconds[0] / 2 * (32 + 1))


def test_an_axis_that_leaves_the_node_shares_its_network_cards() -> None:
    inside, across = part(workload(tensor=8), "tensor"), part(workload(tensor=16), "tensor")
    assert across / inside == pytest.approx((15 / 16) / (7 / 8) * 300 / 200)


@pytest.mark.parametrize(
    ("source", "mean", "worst"),
    [
        ("SC21 table 1", 5, 10),
        ("SC21 table 2", 8, 10),
        ("2205.05198 table 5", 4, 5),
        ("Megatron-Bridge", 6, 10),
    ],
)
def test_published_runs_are_foretold_without_a_fitted_constant(
    source: str, mean: float, worst: float
) -> None:
    off = 100 * np.abs(errors(published()[source]))
    assert off.mean() < mean and off.max() < worst


def test_sizes_left_out_are_those_of_gpt_and_a_missing_one_is_named() -> None:
    load = workload(data=4, stage=1)
    assert (load.hidden, load.kv_heads, load.sharded) == (4 * 8192, 64, 4)
    with pytest.raises(KeyError, match="vocab"):
        Workload.stack([{name: size for name, size in (GPT | A100).items() if name != "vocab"}])


@pytest.mark.parametrize("name", ["a100", "A100-80GB", "a100_80", "a100-80"])
def test_a_device_is_found_under_its_common_names(name: str) -> None:
    assert device_named(name) is DEVICES["a100-80"]


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--device h1000: .* Did you mean 'h100'\? Devices: a100-40"):
        device_named("h1000")


def test_a_group_that_lies_on_two_nodes_has_the_network_cards_of_the_fewer() -> None:
    """Of 8 groups of 3 on nodes of 8 one has a single card on one node; nodes of 6 have whole groups."""
    whole, torn = (
        part(workload(tensor=3, data=8, node=6), "tensor"),
        part(workload(tensor=3, data=8), "tensor"),
    )
    assert torn / whole == pytest.approx(300 / (200 / 8))
    assert part(workload(tensor=3, data=2), "tensor") == pytest.approx(whole)  # 6 ranks are on one node


@pytest.mark.parametrize(
    ("settings", "network_cards"),
    [
        ({"pipeline": 8, "data": 8}, 1),
        ({"pipeline": 2, "data": 32}, 4),
        ({"pipeline": 2, "data": 32, "sharded": 32}, 8),
        ({"pipeline": 2, "data": 32, "sharded": 2}, 4),
        ({"pipeline": 2, "data": 16, "tensor": 2}, 2),
        ({"data": 64}, 8),
        ({"data": 24, "sharded": 3}, 8),
    ],
)
def test_the_data_axis_lies_outside_of_pipelines(settings: dict[str, float], network_cards: int) -> None:
    """Neighbouring ranks are stages: a node has as many members of a data ring as pipelines. Megatron's order has data
    within pipelines, and its published runs stay as they are."""
    share = 0.75 * 200e9 / 8
    assert data_rate(workload(**settings, data_outside=1), EXACT)[0] == pytest.approx(network_cards * share)
    assert data_rate(workload(pipeline=8, data=8), EXACT)[0] == pytest.approx(0.75 * 300e9)


def test_a_pipeline_within_a_node_hands_over_on_its_links() -> None:
    across, within = (part(workload(pipeline=8, data=8, data_outside=n), "stages") for n in (0, 1))
    assert across / within == pytest.approx(300 / (200 / 8))


def test_products_of_an_update_take_their_time_on_each_owner() -> None:
    more = {"update_products": 0.8 * 312e12}
    alone, owned = (
        part(workload(**settings, **more), "update") - part(workload(**settings), "update")
        for settings in ({}, {"data": 8, "stage": 1, "pipeline": 2})
    )
    assert (alone, owned) == (pytest.approx(48), pytest.approx(48 / 2 / 8))
