"""Ranks that round their gradients on their way: each step is judged by itself, and faults show beside the rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_dp.exchange.roundings import Roundings, is_narrower, reduce_dtype_of
from paddle_dp.proof import SideRunner, compare_sides
from paddle_dp.proof.rehearsed import RehearsalComparison
from paddle_dp.tensors import bytes_from, numbers_of
from tests.house.recipes import small_recipe
from tests.jobs import comparisons_in_forks, verdict_in_forks

RECIPE = small_recipe(
    "length: 20 steps, batch: 8, micro_batches: 2, seed: 3", optimizer="adamw, clip: 0.5", callbacks="[]",
    model="gpt, vocab: 32, width: 32, depth: 4, heads: 4, length: 16",
    dataset="random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 10",
    schedule="constant, learning_rate: 3.0e-3", strategy="hybrid, reduce_dtype: bfloat16",
)  # fmt: skip
TWO = {
    "data 2": "strategy.data=2",
    "sharding 2": "strategy.sharding=2",
    "stage 2": "strategy={use: hybrid, sharding: 2, sharding_stage: 2, reduce_dtype: bfloat16}",
    "stage 3": "strategy={use: hybrid, sharding: 2, sharding_stage: 3, reduce_dtype: bfloat16}",
    "stage 3, in rounds": "strategy={use: hybrid, sharding: 2, sharding_stage: 3, reduce_dtype: bfloat16, prefetch: 0}",
    "stage 3, recompute": "strategy={use: hybrid, sharding: 2, sharding_stage: 3, reduce_dtype: bfloat16, "
    "recompute: full}",
    "sequence 2": "strategy.sequence=2",
}  # fmt: skip
FOUR = {
    f"{axis} 2 × stage {stage}": f"strategy={{use: hybrid, {axis}: 2, sharding: 2, sharding_stage: {stage}, "
    "reduce_dtype: bfloat16}"
    for axis, stage in (("data", 2), ("data", 3), ("sequence", 3), ("pipeline", 3), ("tensor", 3))
}
THREE = {"stage 3 of three": "strategy={use: hybrid, sharding: 3, sharding_stage: 3, reduce_dtype: bfloat16}"}
FAULTS = {"one_gradient_late": "late_gradient", "four_digits": "fewer_digits"}


def recipe(folder: Path) -> Path:
    path = folder / "gpt.yaml"
    path.write_text(RECIPE)
    return path


def assert_each_step_is_one_process(layouts: dict[str, str], folder: Path, ranks: int) -> None:
    """And two runs have the same bits."""
    runner = SideRunner(recipe(folder), (), 4, ranks, folder)
    with comparisons_in_forks():
        sides = {
            name: runner.run_candidate(ranks, [words], f"side-{i}")
            for i, (name, words) in enumerate(layouts.items())
        }
        one = runner.run_reference(list(sides.values()))
        for i, (name, words) in enumerate(layouts.items()):
            again = runner.run_candidate(ranks, [words], f"again-{i}").trace("own")
            first = sides[name].trace("own")
            assert first is not None and again is not None
            assert [n for n in first.keys if not np.array_equal(first.array(n), again.array(n))] == [], name
    for name, side in sides.items():
        verdict = compare_sides(one, side)
        assert verdict.same, (name, verdict.sentences)
        assert verdict.sentences[-1].startswith("SAME in each step"), name
        assert verdict.wide is not None and verdict.wide.rounded == 0
        assert 2**-10 < verdict.native.rounded < 2**-4, (name, verdict.native.rounded)
        rounded = [f for f in verdict.native.distances if f.quantity.kind == "gradient" and f.r > 0.1]
        assert {f.quantity.step for f in rounded} == {1, 2, 3, 4}, (
            name
        )  # it is rounded, and each step is judged


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("layouts", "ranks"), [(TWO, 2), (THREE, 3), (FOUR, 4)])
def test_each_step_is_one_process_but_for_what_is_rounded(
    layouts: dict[str, str], ranks: int, tmp_path: Path
) -> None:
    assert_each_step_is_one_process(layouts, tmp_path, ranks)


@pytest.mark.long
@pytest.mark.processes
def test_a_fault_shows_beside_what_is_rounded(tmp_path: Path) -> None:
    """In float32 alone, where it must be larger than the rounding; in float64 a thousandth shows, as ever."""
    runner = SideRunner(recipe(tmp_path), ("strategy.data=2",), 4, 2, tmp_path, wide=False)
    with comparisons_in_forks():
        sides = {
            name: runner.run_candidate(2, name=name, patch=f"tests.proof.faults:{f}")
            for name, f in FAULTS.items()
        }
        one = runner.run_reference(list(sides.values()))
    for name, side in sides.items():
        verdict = compare_sides(one, side)
        assert verdict.status == 1, name
        assert verdict.first_difference is not None and verdict.first_difference.kind == "gradient", name
    late = compare_sides(one, sides["one_gradient_late"]).first_difference
    assert late is not None and late.step == 3, late  # two backwards for each of two probes and of two steps
    stage3 = TWO["stage 3"]
    wide = SideRunner(recipe(tmp_path), (stage3,), 2, 2, tmp_path / "wide")
    verdict = verdict_in_forks(wide, "tests.proof.faults:any_gradient")
    assert verdict.status == 1 and verdict.wide is not None and not verdict.wide.same


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("layout", ["data 2", "stage 2", "stage 3"])
def test_a_training_is_rehearsed_with_the_ranks_gradients(layout: str, tmp_path: Path) -> None:
    """And a gradient that is wrong from the evaluation on is found behind it."""
    runner = SideRunner(recipe(tmp_path), (TWO[layout],), 2, 2, tmp_path, wide=False, rehearse=True)
    patch = "tests.proof.faults:evaluation_spoils_a_gradient"
    with comparisons_in_forks():
        sides = [runner.run_candidate(2), runner.run_candidate(2, name="spoiled", patch=patch)]
        one = runner.run_reference(sides)
    good, spoiled = (RehearsalComparison.read(one.rehearsed(side), side.folder, 2) for side in sides)
    assert good.first_difference() is None
    rows = good.reference["plain"]["rows"]
    assert all(0 < row["apart"] < row["rounded"] < 0.1 * row["gradient_norm"] for row in rows)
    found = spoiled.first_difference()
    assert found is not None and (found.kind, found.step) == ("loss", 2) and "gradient norm" in found.sentence
    assert any(each.kind == "gradient" and each.step == 2 for each in spoiled._differences())


def test_what_is_noted_is_the_largest_loss() -> None:
    paddle.set_device("cpu")
    numbers = np.random.default_rng(0).normal(size=4096).astype("float32")
    parameter = paddle.to_tensor(numbers)
    noted = Roundings()
    noted.note(parameter, numbers, "bfloat16")
    assert noted.take() == {}  # nobody has asked
    noted.watch()
    noted.note(parameter, numbers, "bfloat16")
    bound = noted.take()[id(parameter)]
    lost = np.linalg.norm(numbers - numbers_of(bytes_from(numbers, "bfloat16"), "bfloat16"))
    assert bound / 8 < lost < bound
    worst = np.full(64, 1 + 2**-8, "float32")  # between two numbers of bfloat16
    noted.note(parameter, worst, "bfloat16")
    lost = np.linalg.norm(worst - numbers_of(bytes_from(worst, "bfloat16"), "bfloat16"))
    assert lost == pytest.approx(noted.take()[id(parameter)], rel=2**-7)
    noted.note(parameter, parameter, "bfloat16", 2)
    assert noted.take()[id(parameter)] == pytest.approx(
        (2 * 2**-8 + 2**-16) * np.linalg.norm(numbers), rel=1e-6
    )
    noted.note(parameter, numbers, "float32")
    assert noted.take() == {}


def test_float64_travels_as_it_is() -> None:
    wide, own = paddle.zeros([2], "float64"), paddle.zeros([2], "float32")
    assert reduce_dtype_of("bfloat16", [wide]) is None and reduce_dtype_of("float32", [wide]) is None
    assert reduce_dtype_of("bfloat16", [own]) == "bfloat16"
    assert reduce_dtype_of("float32", [own]) is None and reduce_dtype_of(None, [own]) is None
    assert is_narrower("bfloat16", "float32") and not is_narrower("float32", "bfloat16")
