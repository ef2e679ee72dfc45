"""The proof is examined: known silent faults must be caught, and by whom it is said; honest models must pass."""

import pytest

from tests.proof.zoo.case import Fault, Honest
from tests.proof.zoo.cases import CASES, LIGHT
from tests.proof.zoo.marking import Mark, examine

SAMPLE = (  # one of each guard and an honest one, of a perceptron on two ranks; and weights that owners lend
    "mean of means", "ranks train alone", "unused on one rank", "evaluation: padded", "resume: first batch",
    "evaluation: leaves its mark", "rehearsal, mlp", "loan before the update, rehearsed",
)  # fmt: skip


def wrong(marks: list[Mark]) -> list[str]:
    return [f"{mark.case.name}: {mark.guard} said: {mark.said}" for mark in marks if not mark.passed]


@pytest.mark.processes
def test_a_sample_is_caught_and_passed(tmp_path):
    marks = examine(SAMPLE, tmp_path)
    assert not wrong(marks)
    assert {mark.guard for mark in marks} == {
        "verify",
        "weights",
        "gradients",
        "evaluation",
        "rehearsal",
        "resume",
        None,
    }


def test_there_are_as_many_cases_as_the_page_says():
    assert sum(isinstance(case, Fault) for case in CASES.values()) >= 40
    assert sum(isinstance(case, Honest) for case in CASES.values()) >= 25


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(case, Fault)])
def test_a_fault_fits_the_package(name):
    """Names that it replaces exist, and are called with what it takes: a crash would pass for nothing."""
    with CASES[name].put_in():
        pass


NAMED = {  # the very parameter, and the axis
    "left out of the bucket": ("head.bias", "data axis"),
    "unmarked norms": ("blocks.5.norm.bias", "tensor axis"),
    "input gradient kept": ("blocks.5.norm.bias", "tensor axis"),
    "tied weights drift": ("blocks.0.token.weight", "pipeline axis"),
    "norms twice": ("blocks.5.norm.bias", "tensor axis"),
    "mean at the owner": ("blocks.5.out.weight", "sharding axis"),
}


@pytest.mark.long
def test_the_sentence_names_the_parameter_and_the_axis(tmp_path):
    for mark in examine(list(NAMED), tmp_path):
        assert all(word in mark.said for word in NAMED[mark.case.name]), f"{mark.case.name}: {mark.said}"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_fault_is_caught_and_every_honest_model_passes(tmp_path):
    assert not wrong(examine(LIGHT, tmp_path))
