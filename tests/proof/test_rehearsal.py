"""Two rehearsals beside each other: the first thing that differs, and nothing where all is noise."""

import copy
import json

import pytest

from paddle_dp.data.stream import Stream
from paddle_dp.proof.rehearsed import STEPS, RehearsalComparison, rehearsal_sentence
from paddle_dp.proof.samples import spread


def side(**changes):
    rows = [
        {"step": n, "read": [n, n + 1], "lr": 0.1, "loss": 2.0 / n, "gradient_norm": 1.0}
        for n in range(1, STEPS + 1)
    ]
    return {"rows": rows, "evaluation": {"loss": 1.0, "samples": 7}, **changes}


def rehearsals():
    many = {**side(), "resumed": {**copy.deepcopy(side()), "rows": side()["rows"][2:], "changed": []}}
    return RehearsalComparison({"plain": side(), "noise": [side(), side()], "dtype": "float32"}, many, 2)


def test_equal_rehearsals_have_no_difference():
    assert rehearsals().first_difference() is None
    assert "SAME" in rehearsal_sentence(None, 2)


def test_what_one_process_strays_by_itself_is_allowed_eight_times():
    found = rehearsals()
    found.reference["noise"][0]["rows"][3]["loss"] += 1e-4
    found.candidate["rows"][3]["loss"] += 7e-4
    found.candidate["resumed"]["rows"][1]["loss"] += 7e-4
    assert found.first_difference() is None
    found.candidate["rows"][3]["loss"] += 2e-4
    assert found.first_difference().kind == "loss"


def spoil(many, what):
    if what == "samples":
        many["rows"][3]["read"] = [8, 9]
    elif what == "loss":
        many["rows"][1]["loss"] *= 1.1
    elif what == "evaluation":
        many["evaluation"]["samples"] = 8
    elif what == "resume":
        many["resumed"]["rows"][0]["lr"] = 0.2
    elif what == "bits":
        many["resumed"]["changed"] = ["optimizer/a/moment1", "model/a"]


@pytest.mark.parametrize(
    ("what", "kind", "step", "words"),
    [
        ("samples", "samples", 4, "in epoch 2"),
        ("loss", "loss", 2, "the first after the evaluation"),
        ("evaluation", "evaluation", STEPS, "samples 7 on one process, 8 on 2 ranks"),
        ("resume", "resume", 3, "another learning rate"),
        ("bits", "resume", STEPS, "other bits in 'optimizer/a/moment1' and 1 more"),
    ],
)
def test_each_difference_is_found_and_said(what, kind, step, words):
    found = rehearsals()
    spoil(found.candidate, what)
    first = found.first_difference()
    assert (first.kind, first.step) == (kind, step)
    assert words in first.sentence
    assert first.sentence in rehearsal_sentence(first, 2)


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "lr", "loss_scale", "score acc1"])
@pytest.mark.parametrize("lacks", ["ranks", "one process"])
def test_a_number_that_only_one_side_has_where_it_is_read_is_a_difference(name, lacks):
    """Ranks without any number in any step were rehearsed, SAME."""
    found = rehearsals()
    one, many, again = (
        side["rows"] for side in (found.reference["plain"], found.candidate, found.candidate["resumed"])
    )
    for rows in (one, many, again, *(run["rows"] for run in found.reference["noise"])):
        for row in rows:
            row.update({"samples": 4, name: 0.5})
    assert found.first_difference() is None
    for row in (*many, *again) if lacks == "ranks" else one:
        del row[name]
    first = found.first_difference()
    assert (first.kind, first.step) == ("loss", 1 if name in ("lr", "loss_scale") else 2)
    assert ("on no rank" if lacks == "ranks" else "and not on one process") in first.sentence


def test_ranks_need_not_read_every_step_but_a_resumed_run_reads_as_the_other_one():
    found = rehearsals()
    many, again = found.candidate["rows"], found.candidate["resumed"]["rows"]
    for row in (*many[2::2], again[4]):
        del row["loss"], row["gradient_norm"]
    assert found.first_difference() is None
    del again[3]["loss"]
    first = found.first_difference()
    assert (first.kind, first.step) == ("resume", 6) and "another loss" in first.sentence


def followed():
    """Beside ranks that round: their gradients are 0.5 % apart, of which rounding takes 0.6 % at most."""
    found = rehearsals()
    for run, apart in ((found.reference["plain"], 5e-3), *((run, 1e-6) for run in found.reference["noise"])):
        for row in run["rows"]:
            row["apart"] = apart
    for row in found.reference["plain"]["rows"]:
        row["rounded"] = 6e-3
    return found


def test_ranks_that_round_may_be_apart_by_that_and_by_8_times_the_noise():
    found = followed()
    assert found.first_difference() is None
    found.reference["plain"]["rows"][3]["apart"] = 6e-3 + 7e-6
    found.candidate["rows"][3]["gradient_norm"] = found.candidate["resumed"]["rows"][1]["gradient_norm"] = (
        1.0059
    )
    assert found.first_difference() is None
    found.reference["plain"]["rows"][3]["apart"] = 6e-3 + 9e-6
    first = found.first_difference()
    assert (first.kind, first.step) == ("gradient", 4) and "rounding takes 0.006 at most" in first.sentence
    found = followed()
    found.candidate["rows"][3]["gradient_norm"] = 1.0061
    assert (found.first_difference().kind, found.first_difference().step) == ("loss", 4)
    found = followed()
    found.reference["plain"]["rows"][1]["apart"] = float("nan")
    assert found.first_difference().kind == "gradient"
    found = followed()
    found.candidate["rows"][3]["loss"] *= 1.0001  # what is not rounded is judged as ever
    assert found.first_difference().kind == "loss"
    assert "but for the digits that bfloat16 takes" in rehearsal_sentence(None, 2, "bfloat16")


def test_a_number_that_is_finite_on_neither_side_is_no_difference():
    found = rehearsals()
    found.reference["plain"]["rows"][0]["gradient_norm"], found.candidate["rows"][0]["gradient_norm"] = (
        float("inf"),
        float("nan"),
    )
    assert found.first_difference() is None


def test_a_tied_class_of_few_held_out_samples_is_no_difference():
    """Rounding alone decides it, and acc1 of 7 samples differs by 14 %: honest ranks were DIFFERENT."""
    found = rehearsals()
    evaluations = [run["evaluation"] for run in (found.reference["plain"], *found.reference["noise"])]
    for evaluation in (*evaluations, found.candidate["evaluation"]):
        evaluation |= {"acc1": 4 / 7, "ema_acc1": 3 / 7, "ema_loss": 1.0, "auc": float("nan")}
    found.candidate["evaluation"] |= {"acc1": 5 / 7, "ema_acc1": 4 / 7}
    assert found.first_difference() is None
    found.candidate["evaluation"]["acc1"] = 7 / 7
    assert "held out: acc1 0.571428571 on one process, 1 on 2 ranks" in found.first_difference().sentence
    found.candidate["evaluation"] |= {"acc1": 5 / 7, "auc": 0.5}  # it failed on one process alone
    assert "held out: auc nan on one process, 0.5 on 2 ranks" in found.first_difference().sentence
    found.candidate["evaluation"] |= {"auc": float("nan"), "ema_loss": 1.001}
    assert "held out: ema_loss" in found.first_difference().sentence
    found.reference["dtype"] = "float64"
    found.candidate["evaluation"]["ema_loss"] = 1.0
    assert "held out: acc1" in found.first_difference().sentence


@pytest.mark.parametrize("lacks", ["ranks", "one process"])
def test_a_held_out_number_that_only_one_side_has_is_a_difference(lacks):
    """The ranks' alone was SAME, one process's a KeyError."""
    found = rehearsals()
    one = [run["evaluation"] for run in (found.reference["plain"], *found.reference["noise"])]
    for evaluation in [found.candidate["evaluation"]] if lacks == "one process" else one:
        evaluation["acc1"] = 0.5
    first = found.first_difference()
    assert (first.kind, first.step) == ("evaluation", STEPS) and "held out: the acc1" in first.sentence
    assert ("on no rank" if lacks == "ranks" else "and not on one process") in first.sentence


def test_held_out_samples_are_spread_over_the_data():
    """The first of a folder that is sorted by class are of one class, for which there is no auc."""
    assert spread(range(100), 7).tolist() == [0, 14, 28, 42, 57, 71, 85]
    assert spread(range(3), 7).tolist() == [0, 1, 2]
    assert spread(Stream(iter(()), 100), 3).tolist() == [0, 1, 2]


def test_sides_are_read_from_their_folders(tmp_path):
    both = rehearsals()
    for name, content in (("one", both.reference), ("many", both.candidate)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rehearsal.json").write_text(json.dumps(content))
    assert RehearsalComparison.read(tmp_path / "one", tmp_path / "many", 2) == both
