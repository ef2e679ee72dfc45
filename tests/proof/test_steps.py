"""Eight steps beside how far one process strays from itself."""

import numpy as np
import pytest

from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.proof.steps import StepComparison, growth, shares
from paddle_dp.proof.tolerance import LARGEST_R, is_same
from paddle_dp.proof.trace_files import SCORE, Trace, key_of
from tests.proof.sheets import write_sheet


def run(folder, losses, noisy=(), norms=(1.0,) * 8, weights=(), noise=()):
    """A run of these losses; `weights`: by name, the array before and after it; `noise`: of the elements after it."""

    def rows(values):
        pairs = zip(values, norms, strict=False)
        return [
            {"loss": value, "gradient_norm": norm, "shares": [2, 2], "collected": True}
            for value, norm in pairs
        ]

    facts = {
        "dtype": "float32",
        "rows": rows(losses),
        "drift": [rows(v) for v in noisy],
        "noise": {},
        "recorded": [1],
    }
    shards, last = {}, len(losses)
    for name, (before, after) in dict(weights).items():
        for key, array in ((key_of("initial", 0, name), before), (key_of("weight", last, name), after)):
            shards[key] = TensorShard.full(key, np.asarray(array, "float64"))
    most = {key_of("weight", last, name): np.asarray(array, "float32") for name, array in dict(noise).items()}
    facts["noise"] = {key: float(np.linalg.norm(array.astype("float64"))) for key, array in most.items()}
    write_sheet(folder, "own", 0, shards, facts, noise=most)
    return Trace.read(folder, "own", 1)


@pytest.fixture
def steps(tmp_path):
    return lambda one, many, noisy=(): StepComparison(
        run(tmp_path / "one", one, noisy), run(tmp_path / "many", many)
    )


def test_a_calm_model_allows_a_few_last_places(steps):
    assert steps([2.0, 1.5], [2.0, 1.5 + 1e-6]).same
    assert not steps([2.0, 1.5], [2.0, 1.5 + 1e-4]).same


def test_what_noise_does_to_one_process_is_allowed_and_a_step_ahead_of_it(steps):
    one, noisy = [2.0, 1.5, 1.0], [2.0 + 1e-6, 1.5 + 1e-5, 1.0 + 1e-4]
    assert steps(one, [2.0, 1.5 + 4e-4, 1.0 + 4e-3], [noisy]).same
    assert not steps(one, [2.0, 1.5 + 2e-3, 1.0], [noisy]).same
    assert not steps(one, [2.0, 1.5, 1.0 + 2e-2], [noisy]).same


def test_growth_is_the_largest_of_a_step():
    assert growth([1.0, 1.0, 4.0, 5.0]) == 4.0
    assert growth([3.0]) == growth([0.0, 1.0]) == growth([1.0, np.inf]) == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_same_on_both_sides_is_equal_though_it_is_no_number(steps, value):
    found = steps([2.0, value], [2.0, value])
    assert found.same
    assert found.broken.number == 2
    assert not steps([2.0, 1.0], [2.0, value]).same
    assert not steps([2.0, value], [2.0, 1.0]).same


def test_an_end_is_where_no_later_step_is_finite(tmp_path):
    inf = float("inf")

    def ended(losses, norms, dtype="float32"):
        found = StepComparison(
            run(tmp_path / "one", losses, norms=norms), run(tmp_path / "many", losses, norms=norms)
        )
        found.dtype = dtype
        return found.ended and found.ended.number

    assert ended([1.0, np.nan, np.nan], (1.0, 1.0, 1.0)) == 2
    assert ended([1.0, np.nan, 1.0], (1.0, 1.0, 1.0)) is None
    assert ended([1.0, 1.0, 1.0], (1.0, inf, inf)) == 2
    assert ended([1.0, 1.0, 1.0], (1.0, inf, inf), "float16") is None  # the loss scale goes down
    assert ended([1.0, 1.0, np.nan], (inf, 1.0, 1.0), "float16") == 3


def test_a_difference_of_more_than_k_is_one(steps):
    found = steps([1.0], [1.0 + 2.0**-22 * LARGEST_R])
    assert not is_same(found.steps[0].r)


def test_a_process_that_has_lost_itself_judges_nobody(steps):
    one, noisy = [2.0, 2.0, 20.0, 14.0], [2.0 + 1e-6, 2.0 + 1e-3, 28.0, 14.5]
    found = steps(one, [2.0, 2.0, 300.0, 1.0], [noisy])
    assert found.lost.number == 3 and found.lost.noise_spread == pytest.approx(0.4) and found.same
    assert [step.judged for step in found.steps] == [True, True, False, False]
    assert not steps(one, [2.5, 2.0, 20.0, 14.0], [noisy]).same  # what was off before is off
    calm = steps(one, [2.0, 2.0, 300.0, 14.0], [[2.0 + 1e-6, 2.0 + 1e-3, 20.5, 14.5]])
    assert calm.lost is None and not calm.same


def test_a_loss_near_zero_is_not_chaos(tmp_path):
    """Its noise is as large as it is, and a fault of the gradient must not hide behind that."""
    one = [0.5, 1e-9, 0.5]
    truth = run(tmp_path / "one", one, [[0.5, 3e-9, 0.5]])
    assert StepComparison(truth, run(tmp_path / "same", one)).same
    found = StepComparison(truth, run(tmp_path / "many", one, norms=(1.0, 1.5, 1.0)))
    assert found.lost is None and not found.same


def test_a_loss_that_grows_from_nearly_0_is_no_growth_of_the_noise(steps):
    """The last step, and all weights, were allowed a million times the noise."""
    one = [1e-6, 1.0, 1.0]
    assert steps(one, [1e-6, 1.0, 1.0 + 4e-7]).same
    assert not steps(one, [1e-6, 1.0, 1.01]).same


def test_a_step_before_a_run_with_noise_breaks_is_judged(steps):
    one, noisy = [2.0, 2.0, 2.0], [[2.0, 2.0, np.nan]]
    assert steps(one, [2.0, 2.0 + 1e-6, 2.0], noisy).same
    found = steps(one, [2.0, 2.5, 2.0], noisy)
    assert found.lost.number == 3 and not found.same


def test_a_score_that_only_ranks_have_is_a_difference(tmp_path):
    one, many = run(tmp_path / "one", [2.0, 1.5]), run(tmp_path / "many", [2.0, 1.5])
    for side in (one, many):
        side.facts["rows"][1]["samples"] = 4
    many.facts["rows"][1][f"{SCORE}acc1"] = 0.5
    assert not StepComparison(one, many).same
    one.facts["rows"][1][f"{SCORE}acc1"] = 0.5
    assert StepComparison(one, many).same


TRAINED = [1.0, 2.0], [1.1, 2.1]


@pytest.mark.parametrize("value", [-np.inf, np.nan, -1e30])
def test_a_frozen_mask_hides_no_trained_weight(tmp_path, value):
    """Nothing was compared at the end beside a frozen weight with an infinity."""
    mask = [0.0, value]
    weights = {"w": TRAINED, "mask": (mask, mask)}
    noise = {"w": [1e-7, 1e-7], "mask": [1e-20, abs(value) * 1e-7]}
    one = run(tmp_path / "one", [1.0], weights=weights, noise=noise)
    for after, same in (([1.1, 2.1 + 1e-7], True), ([1.1, 2.101], False)):
        many = run(tmp_path / "many", [1.0], weights=weights | {"w": (TRAINED[0], after)})
        assert StepComparison(one, many).same is same


def test_a_weight_that_only_one_side_has_at_the_end_is_a_difference(tmp_path):
    one = run(tmp_path / "one", [1.0], weights={"w": TRAINED, "v": TRAINED})
    many = run(tmp_path / "many", [1.0], weights={"w": TRAINED})
    assert not StepComparison(one, many).same and not StepComparison(many, one).same
    many = run(tmp_path / "wide", [1.0], weights={"w": TRAINED, "v": ([TRAINED[0]], [TRAINED[1]])})
    assert not StepComparison(one, many).same


def test_a_bound_that_is_no_number_allows_nothing(tmp_path):
    one, many = run(tmp_path / "one", [1.0]), run(tmp_path / "many", [1.0], norms=(1.5,))
    many.facts["rounded"] = {key_of("gradient", 1, "w"): float("nan")}
    assert not StepComparison(one, many).same


def test_a_run_with_noise_that_breaks_is_said(steps):
    """Nothing can be judged by it from there on, and no step may pass for judged."""
    found = steps([2.0, 2.0, 2.0], [2.0, 2.0, 3.0], [[2.0, np.nan, 2.0]])
    assert found.lost.number == 2 and found.same
    assert [step.judged for step in found.steps] == [True, False, False]


def test_shares_in_a_word():
    assert shares([16, 17, 17]) == "16+17+17=50"
    assert shares([6, 6, 7, 6, 7]) == "5×(6 to 7)=32"


def test_a_number_that_the_ranks_lack_differs_where_they_read_the_step_and_only_there(tmp_path):
    one = run(tmp_path / "one", [2.0, 1.5, 1.0])
    many = run(tmp_path / "many", [2.0, None, 1.0])
    assert not StepComparison(one, many).same
    many.facts["rows"][1]["collected"] = False
    assert StepComparison(one, many).same


def test_a_step_in_which_nothing_counts_is_no_broken_one_and_takes_no_allowance_away(tmp_path):
    """An anchor without a positive: NaN on both sides, gradients of 0, and no update."""

    def side(name, norms):
        found = run(tmp_path / name, [0.5, np.nan, np.nan], norms=norms)
        for row in found.facts["rows"][1:]:
            row["empty"] = True
        return found

    found = StepComparison(side("one", (13.0, 0.0, 0.0)), side("many", (13.0 + 1e-6, 0.0, 0.0)))
    assert found.same and found.broken is None and found.ended is None
    assert [step.empty for step in found.steps] == [False, True, True]
