"""What is said of two sides, from what they left in their folders."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.proof import Side, compare_sides
from paddle_dp.proof.report import as_json, show, without_guard
from paddle_dp.proof.trace_files import MODEL_LAYER, key_of
from paddle_dp.recipe import read_recipe
from paddle_dp.text import CAN_DIFFER
from tests.proof.sheets import write_sheet

DRAWS = (
    "2 (Noise) draws from Paddle's generator, which differs on another number of ranks: exact are dropout, and one "
    "number for each sample"
)


def side(folder, gradient, differences=(), losses=(1.0,), update=None, last=None, noise=0.0):
    """A side of one rank and one recorded step, in the recipe's own precision only. `last`: the weight at the end;
    `noise`: that of each element of the gradient."""
    quantities = {
        ("initial", 0): 1.0,
        ("gradient", 1): gradient,
        ("update", 1): -gradient if update is None else update,
        ("weight", 1): 1 - gradient if last is None else last,
    }
    shards = {
        key_of(kind, step, "w"): TensorShard.full("w", np.full(3, value))
        for (kind, step), value in quantities.items()
    }
    row = {"gradient_norm": 1.0, "samples": 2, "shares": [2], "read": [[0, [0, 1]]], "collected": True}
    rows = [{**row, "loss": loss} for loss in losses]
    facts = {
        "dtype": "float32", "rows": rows, "drift": [], "noise": {}, "recorded": [1], "order": [], "divergence": None,
        "copy_groups": {}, "broken": {}, "positions": {"1": [0, 1]}, "dp_rank": 0, "coords": {},
    }  # fmt: skip
    most = {key_of("gradient", 1, "w"): np.full(3, noise, "float32")}
    facts["noise"] = {number: float(np.linalg.norm(array)) for number, array in most.items()}
    write_sheet(folder, "own", 0, shards, facts, noise=most)
    axes = {"data": 1, "tensor": 1}
    told = {"failed": None, "rounds_to": None, "differences": list(differences), "axes": axes, "memory": 0}
    told["parameters"] = 3
    (folder / "side.json").write_text(json.dumps(told))
    return Side(folder, 1)


def compared(tmp_path, gradient, first=0.5, **more):
    one = side(tmp_path / "one", first, **more)
    many = side(tmp_path / "many", gradient, [DRAWS, f"buffer seen{CAN_DIFFER}"], **more)
    one.candidates = (many,)
    write_sheet(
        one.folder / "replay0",
        "own",
        0,
        {key_of("update", 1, "w"): TensorShard.full("w", np.full(3, more.get("update", -gradient)))},
        {},
    )
    return compare_sides(one, many)


def test_what_made_no_difference_is_not_said_to_differ(tmp_path):
    """A layer that draws random numbers, on one stage of a pipeline: "Differs by nature", and then SAME, it was."""
    said = compared(tmp_path, 0.5).sentences
    assert f"Can differ, and did not in these steps: {DRAWS}." in said
    assert "Can differ, and did not in these steps: buffer seen." in said  # not twice
    assert said[-1].startswith("SAME:")
    assert not any("Differs" in sentence for sentence in said)


@pytest.mark.parametrize(("noise", "word"), [(0.006, "same"), (0.007, "proves nothing")])
def test_a_noise_that_hides_a_tenth_of_a_gradient_proves_nothing(tmp_path, noise, word):
    """ "A fault above 100 % would show", and then SAME, it was."""
    verdict = compared(tmp_path, 0.5, noise=noise)
    assert verdict.label == word
    shown = json.loads(json.dumps(as_json(read_recipe("configs/digits_mlp.yaml"), verdict, 1.0)))[
        "insensitive"
    ]
    if word == "same":
        assert verdict.status == 0 and shown is None
        return
    assert verdict.status == 3 and shown == {"name": "w", "shows": pytest.approx(0.112)}
    assert verdict.sentences[-1].startswith(
        "PROVES NOTHING: in float32 the gradient of w is so noisy on one process that only a fault above 11 %"
    )


def test_a_noisy_part_is_no_want_where_float64_proves(tmp_path):
    """bfloat16: part 1 has shown the layout, and part 2 says from which size on it would show."""
    verdict = compared(tmp_path, 0.5, noise=0.1)
    wide = compared(tmp_path, 0.5, noise=1e-9).native
    assert verdict.status == 3
    again = compared(tmp_path, 0.5, noise=0.1)
    again.wide = wide
    assert again.same


def test_a_difference_stays_one_however_noisy(tmp_path):
    assert compared(tmp_path, 50.0, noise=0.1).status == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("order", "with the samples of each micro-batch in another order"),
        ("chance", "in a second run of the same"),
    ],
)
def test_what_one_process_depends_on_is_said_first(tmp_path, kind, says):
    verdict = compared(tmp_path, 0.5)
    found = {"kind": kind, "step": 3, "name": "loss", "plain": 2.0, "other": 2.5, "distance": 0.25}
    verdict.reference.facts["dependence"] = found
    assert verdict.sentences[0].startswith("In step 3 one process's loss is 2, and 2.5 ")
    assert says in verdict.sentences[0]
    assert as_json(read_recipe("configs/digits_mlp.yaml"), verdict, 1.0)["dependence"] == found
    verdict.reference.facts["dependence"] = {**found, "name": "buffer queue", "plain": None, "other": None}
    assert "one process's buffer queue is 25 % apart" in verdict.sentences[0]


def test_what_rounding_excuses_without_float64_is_said_to_be_no_proof(tmp_path):
    verdict = compared(tmp_path, 0.5)
    verdict.native.turned["w"] = 1e5
    (said,) = [sentence for sentence in verdict.sentences if "turned a ReLU" in sentence]
    assert said.endswith("Without float64, a fault of the first batch alone would look the same.")
    verdict.wide = verdict.native
    assert not any(sentence.endswith("would look the same.") for sentence in verdict.sentences)


def test_what_may_have_made_a_difference_is_said_before_it(tmp_path):
    said = compared(tmp_path, 0.6).sentences
    assert f"Differs by nature: {DRAWS}." in said
    assert said[-1].startswith("DIFFERENT:")


def test_a_side_that_one_process_knows_nothing_of_is_not_compared(tmp_path):
    one, many = (side(tmp_path / name, 0.5) for name in ("one", "many"))
    with pytest.raises(ValueError, match="not among the sides"):
        compare_sides(one, many)


@pytest.mark.parametrize(
    ("one", "many", "who"),
    [(None, "OSError: no kernel", "1 ranks failed, and one process did not"),
     ("OSError: no kernel", None, "one process failed, and 1 ranks did not")],
)  # fmt: skip
def test_a_side_that_failed_in_float64_alone_is_said_to_have_failed(tmp_path, one, many, who):
    verdict = compared(tmp_path, 0.5)
    verdict.reference.failed, verdict.candidate.failed = one, many
    assert (verdict.status, verdict.same) == (4, False)
    assert verdict.sentences[-1].startswith(f"FAILED: in float64 {who}: OSError: no kernel. In float32 both")
    assert not any("DIFFERENT" in said or "SAME" in said for said in verdict.sentences)


def test_where_a_side_failed_what_differs_is_said_too(tmp_path):
    verdict = compared(tmp_path, 0.6)
    verdict.candidate.failed = "OSError: no kernel"
    assert verdict.status == 1 and verdict.sentences[-1].startswith("DIFFERENT:")
    assert "Not compared in float64: in float64 1 ranks failed, and one" in " ".join(verdict.sentences)


def test_where_both_sides_fail_in_float64_the_rest_is_judged(tmp_path):
    verdict = compared(tmp_path, 0.5)
    verdict.reference.failed = verdict.candidate.failed = "OSError: no kernel"
    assert verdict.same and "Not compared in float64: OSError: no kernel." in " ".join(verdict.sentences)


NAN = float("nan")


def test_where_nothing_was_a_number_nothing_is_proven(tmp_path):
    """Of NaN data both sides hold NaN everywhere: equal, and no proof."""
    found = compared(tmp_path, NAN, first=NAN, losses=(NAN, NAN))
    assert found.status == 3 and not found.same
    assert found.sentences[-1].startswith("PROVES NOTHING: nothing was learned on one process")
    assert "not finite from step 1" in found.sentences[-1]
    assert not any(sentence.startswith("SAME") for sentence in found.sentences)


def test_what_was_learned_before_the_numbers_broke_is_all_that_is_proven(tmp_path):
    found = compared(tmp_path, 0.5, losses=(1.0, 1.0, NAN, NAN), last=NAN)
    assert (found.status, found.label, found.same) == (3, "same at first", False)
    assert found.sentences[-2] == "Not a number on both sides from step 3, in the gradients only."
    assert found.sentences[-1].startswith(
        "SAME up to step 2: from step 3 on the numbers are not finite on both sides, and nothing could be compared."
    )


def test_a_step_that_is_not_finite_between_finite_ones_leaves_the_others_compared(tmp_path):
    found = compared(tmp_path, 0.5, losses=(1.0, NAN, 1.0))
    assert (found.status, found.label) == (0, "same")
    assert "Not a number on both sides from step 2, in the gradients only." in found.sentences


def test_weights_that_ranks_do_not_share_at_the_end_are_named_after_an_earlier_step(tmp_path):
    for late, where in ((1.0, 3), (2.0, 2)):
        found = compared(tmp_path, 0.5, losses=(1.0, 1.0, 1.0))
        found.native.candidate.facts["copy_groups"] = {key_of("weight", 3, "w"): [[0], [1]]}
        step = found.steps.steps[1]
        found.steps.steps[1] = replace(step, loss=replace(step.loss, many=late))
        assert (found.status, found.first_difference.step) == (1, where)


def test_the_layer_that_is_the_whole_model_is_called_its_output(tmp_path):
    found = compared(tmp_path, 0.5, losses=(1.0, NAN))
    found.native.reference.facts["broken"]["2"] = MODEL_LAYER
    assert "Not a number on both sides from step 2, first in the model's output." in found.sentences
    found.native.reference.facts["broken"]["2"] = "body.4"
    assert "Not a number on both sides from step 2, first in layer body.4." in found.sentences


def test_losses_of_which_none_is_finite_prove_nothing_though_gradients_are(tmp_path):
    assert compared(tmp_path, 0.5, losses=(NAN, NAN)).label == "proves nothing"


def test_an_end_that_ranks_do_not_share_is_a_difference(tmp_path):
    found = compared(tmp_path, 0.5, losses=(1.0, NAN))
    step = found.steps.steps[1]
    found.steps.steps[1] = replace(step, loss=replace(step.loss, many=1.0))
    assert found.status == 1 and "Not a number on one process from step 2" in " ".join(found.sentences)


@pytest.mark.parametrize(
    ("guard", "said"),
    [({}, {}), ({"non_finite": "rewind", "in_a_row": 10}, {"non_finite": "rewind"}),
     ({"non_finite": "skip", "spike": "5 sigma"}, {"non_finite": "skip", "spike": "5 sigma"})],
)  # fmt: skip
def test_the_guard_that_neither_side_has_is_named(tmp_path, guard, said, capsys):
    recipe = read_recipe("configs/digits_mlp.yaml", [f"guard={json.dumps(guard)}"])
    assert without_guard(recipe) == said
    verdict = compared(tmp_path, 0.5)
    assert as_json(recipe, verdict, 0.0)["without_guard"] == (said or None)
    for part in (verdict.native.reference, verdict.native.candidate):
        part.facts["seconds"] = 0.0
    show(recipe, verdict, 0.0)
    told = ", ".join(f"{name}: {value}" for name, value in said.items())
    assert (f"without the recipe's guard: {told}\n" in capsys.readouterr().out) == bool(said)


def test_an_update_that_only_breaks_the_weights_is_no_learning(tmp_path):
    assert compared(tmp_path, 0.5, losses=(1.0, NAN), update=NAN, last=NAN).status == 3


def test_steps_in_which_nothing_counts_are_named_and_are_no_broken_ones(tmp_path):
    found = compared(tmp_path, 0.5, losses=(1.0, NAN, 1.0, NAN))
    for step in (1, 3):
        found.steps.steps[step] = replace(found.steps.steps[step], empty=True)
    assert (found.status, found.label) == (0, "same")
    assert any(said.startswith("In steps 2, 4 nothing counts for the loss") for said in found.sentences)
    assert not any("Not a number" in said for said in found.sentences)


def test_where_nothing_counts_in_any_step_that_is_why_nothing_is_proven(tmp_path):
    found = compared(tmp_path, 0.0, first=0.0, losses=(NAN, NAN), last=1.0, update=0.0)
    found.steps.steps = [replace(step, empty=True) for step in found.steps.steps]
    assert found.status == 3
    assert "nothing counts for the loss), so nothing is proven" in found.sentences[-1]
