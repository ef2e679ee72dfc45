"""What the exam computes of runs and forecasts: errors, regret, the order of pairs, bars, bytes, and scaling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_dp.plan.activations import LOGIT_PEAK, Keeps, Tokens, in_flight
from paddle_dp.plan.memory import Widths, formula
from paddle_dp.plan.step_time import step_time
from paddle_dp.plan.workload import Numbers
from tools.planner.published_rows import Runs

LEAST = 4  # layouts of one model, number of cards and batch, of which one is chosen


def choices(runs: Runs, least: int = LEAST) -> list[list[int]]:
    """The indices of runs that differ in their layout alone, at least `least` of them together."""
    load = runs.load
    groups: dict[tuple[float, ...], list[int]] = {}
    for i in range(len(runs)):
        groups.setdefault((load.width[i], load.depth[i], load.ranks[i], runs.batch[i]), []).append(i)
    return [same for same in groups.values() if len(same) >= least]


def regret(runs: Runs, forecast: Numbers) -> Numbers:
    """Seconds of the layout that is ranked first over the fastest measured one's, minus 1, of each choice."""
    measured = runs.seconds
    return np.array(
        [measured[min(same, key=lambda i: forecast[i])] / measured[same].min() - 1 for same in choices(runs)]
    )


def pairs(runs: Runs, forecast: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Of all pairs of layouts of a choice: the ratio of their forecasts (above 1), and whether the measured order is
    the same."""
    ordered = [
        (forecast[slow] / forecast[fast], runs.seconds[fast] < runs.seconds[slow])
        for same in choices(runs, 2)
        for fast, slow in itertools.permutations(same, 2)
        if forecast[fast] < forecast[slow]
    ]
    ratios, right = zip(*ordered, strict=True)
    return np.array(ratios), np.array(right)


def stage3_ratios(runs: dict[str, Runs]) -> dict[str, Numbers]:
    """Measured over foretold seconds of each source's runs with sharding stage 3."""
    ratios = {name: each.seconds / step_time(each.load).seconds for name, each in runs.items()}
    stage3 = {name: ratios[name][each.load.stage == 3] for name, each in runs.items()}
    return {name: each for name, each in stage3.items() if len(each)}


def stage3_pairs(stage3: Runs, others: Runs, ratios: Numbers) -> Numbers:
    """Of the same model, batch and number of cards with sharding stage 3 and without: seconds with it over seconds
    without, [pairs, 4]: measured, foretold, and foretold times the 0.1 and 0.9 quantile of `ratios`, which are other
    rows' measured over foretold seconds."""
    with_it, without = step_time(stage3.load).seconds, step_time(others.load).seconds
    span = np.quantile(ratios, [0.1, 0.9])
    same = [
        (i, j)
        for i in range(len(stage3))
        for j in range(len(others))
        if (stage3.load.depth[i], stage3.load.ranks[i], stage3.batch[i])
        == (others.load.depth[j], others.load.ranks[j], others.batch[j])
    ]
    measured = [stage3.seconds[i] / others.seconds[j] for i, j in same]
    foretold = [with_it[i] / without[j] for i, j in same]
    return np.column_stack([measured, foretold, np.outer(foretold, span)])


def tie(ratios: Numbers, right: npt.NDArray[np.bool_]) -> float:
    """The smallest ratio, in steps of 0.05, from which on 8 of 10 pairs of forecasts are in the measured order."""
    for step in range(40):
        low = 1 + step / 20
        bin_ = (ratios >= low) & (ratios < low + 0.05)
        if bin_.any() and right[bin_].mean() >= 0.8:
            return round(low, 2)
    return 3.0


def bar(ratios: Numbers) -> float:
    """The ratio up to which 8 of 10 measured and foretold seconds differ, in either direction."""
    return float(np.exp(np.quantile(np.abs(np.log(ratios)), 0.8)))


def within(ratios: Numbers, limit: float) -> float:
    """The share of the ratios that lie within a bar."""
    return float(np.mean(np.abs(np.log(ratios)) <= np.log(limit)))


def memory_figure1(rows: list[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """(figure, GiB by this package's arithmetic, GiB in the paper) of Korthikanti et al., figure 1."""
    for row in rows:
        if "figure 1" not in row["source"]:
            continue
        stages, depth = row["pipeline"] * row["chunks"], row["layers"]
        schedule = "interleaved" if row["chunks"] > 1 else "1f1b"
        waiting = in_flight(schedule, row["pipeline"], 0, 8 * row["pipeline"], row["chunks"])
        keeps: Keeps
        for keeps, key in (("none", "activations_none_gib"), ("selective", "activations_selective_sp_gib")):
            tokens = Tokens(
                length=row["seq"], samples=row["micro"], width=row["hidden"], heads=row["heads"], vocab=0,
                tensor=row["tensor"], sequence_parallel=keeps == "selective",
            )  # fmt: skip
            size = tokens.block(keeps) * depth / stages * row["chunks"] * waiting
            yield f"{row['model']} {keeps}", size / 2**30, row[key]
        weights = 12 * depth * row["hidden"] ** 2 / row["tensor"] / row["pipeline"]
        state = formula(round(weights), 1, 0, Widths(parameter=2, gradient=4, optimizer=12)).total
        yield f"{row['model']} state", state / 2**30, row["parameters_and_optimizer_gib"]


def torchtitan_memory(runs: Runs) -> Numbers:
    """Bytes of the fullest rank: float32 weights, gradients and AdamW's moments, sharded; activations in 16 bits."""
    load, sizes = runs.load, []
    for i in range(len(runs)):
        one = {name: float(getattr(load, name)[i]) for name in load.__dataclass_fields__}
        first = one["pipeline"] == 1
        block = float(load.block_weights[i]) / one["tensor"]
        tables = one["vocab"] * one["width"] / one["tensor"] * (2 if first else 1)
        held = block * one["depth"] / one["pipeline"] + tables
        shards = one["data"]
        state = formula(round(held), round(shards), 3 if first else 1, Widths()).total
        # Gathered at once, in 16 bits: two blocks and both tables; gradients in 16 bits, and in float32 to be summed.
        state += (2 * 2 + 2 + 4) * block + (2 * 2 + 2 + 4) * tables / 2 if first else 0
        sizes.append(state + _activations(one))
    return np.array(sizes)


def _activations(one: dict[str, float]) -> float:
    """Bytes of one rank's activations. «Every other product» keeps each block's input, every other product's output
    and attention's; the paper's formula has no term for it."""
    tokens = Tokens(
        length=round(one["length"]), samples=round(one["micro"]), width=round(one["width"]), heads=round(one["heads"]),
        vocab=round(one["vocab"]), tensor=round(one["tensor"]), sequence_parallel=bool(one["sequence_parallel"]),
        kv_fraction=one["kv_heads"] / one["heads"], hidden=round(one["hidden"]), matrices=round(one["matrices"]),
    )  # fmt: skip
    pipeline, stages = round(one["pipeline"]), round(one["virtual_stages"])
    schedule = "interleaved" if stages > 1 else "1f1b"
    waiting = in_flight(schedule, pipeline, 0, round(one["micros"]), stages)
    share = one["width"] * (1 + one["kv_heads"] / one["heads"]) + one["hidden"]
    along = one["tensor"] if one["sequence_parallel"] else 1
    sbh = one["length"] * one["micro"]
    other = 2 * sbh * (2 * one["width"] / along + (one["width"] + share) / one["tensor"])
    kept = tokens.block("full") if one["recomputed_blocks"] else other
    size = kept * one["depth"] / pipeline * waiting
    size += tokens.block("selective") if one["recomputed_blocks"] else 0
    logits = LOGIT_PEAK * sbh * one["vocab"] / one["tensor"]
    return size + (logits if pipeline == 1 else 0)
