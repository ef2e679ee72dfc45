"""Models that draw or remember must not be called the same, and what is wrong with them is named."""

from pathlib import Path

import pytest

from paddle_dp.proof import SideRunner
from tests.jobs import verdict_in_forks

RECIPE = """
model: {{use: tests.proof.zoo.{model}}}
dataset: {{use: digits}}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum}}
schedule: {{use: constant, learning_rate: 0.05}}
strategy: {{use: data_parallel}}
train: {{length: 1 epoch, batch: 50}}
"""


def verdict_on(model: str, folder: Path, steps: int = 6):
    path = folder / "case.yaml"
    path.write_text(RECIPE.format(model=model))
    return verdict_in_forks(SideRunner(path, (), steps, 2, folder))


ORDER, CHANCE = "in another order", "in a second run of the same steps"
DRAWS, BUFFER = "draws from Paddle's generator", "is updated by forward from each rank's own samples"
SAID = {  # a half of tests/proof/zoo/liars.py; the zoo has all of them
    "NoiseAfterWarmup": (ORDER, DRAWS),
    "RandomLayerScale": (CHANCE, "draws from Python's generator"),
    "OwnGenerator": (ORDER, "`random` of the model differs between rank 0 and one process"),
    "Queue": (ORDER, BUFFER),
    "Prototype": (BUFFER,),
    "MeanInFloat": ("`mean` of the model is 0.0", "on rank 1 after step 1"),
    "RecentMeans": ("`recent` of the model differs between rank 0 and rank 1 after step 1",),
    "ClassMeans": ("`means.0` of the model differs between rank 0 and rank 1 after step 1",),
    "ModuleGlobal": (
        "`_SEEN` of module tests.proof.zoo.liars differs between rank 0 and rank 1 after step 1",
    ),
    "LateCache": (ORDER, "`first` of the model differs between rank 0 and rank 1"),
}
LIKE_OTHERS = {
    "Prototype",
    "ClassMeans",
    "LateCache",
}  # Queue has a buffer, too, RecentMeans a container, OwnGenerator ORDER


@pytest.mark.processes
@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=pytest.mark.long) if model in LIKE_OTHERS else model for model in SAID],
)
def test_a_model_that_draws_or_remembers_is_different_and_why_is_said(tmp_path, model):
    """Another order of the samples moved it as much as two ranks did, and was taken for rounding: SAME."""
    verdict = verdict_on(f"liars.{model}", tmp_path)
    said = " ".join(verdict.sentences)
    assert verdict.label == "different", said
    assert all(sentence in said for sentence in SAID[model]), said
    assert "turned a ReLU" not in said and "equal shares agree" not in said


@pytest.mark.processes
def test_a_number_that_nothing_reads_is_said_and_does_not_make_a_model_another(tmp_path):
    verdict = verdict_on("models.Logged", tmp_path, steps=2)
    said = " ".join(verdict.sentences)
    assert verdict.same, said
    assert "Can differ, and did not in these steps: `mean` of the model is 0.0" in said
    assert "`calls`" not in said


@pytest.mark.processes
def test_a_parameter_of_no_dims_is_compared(tmp_path):
    verdict = verdict_on("models.LogitScale", tmp_path, steps=2)
    assert verdict.same, verdict.sentences
    assert "scale" in verdict.wide.shows


@pytest.mark.processes
def test_drop_path_is_the_same_on_any_number_of_ranks(tmp_path):
    """Each rank drew its own paths by `paddle.rand`, as PaddleClas's models have it: DIFFERENT."""
    verdict = verdict_on("models.DropPath", tmp_path)
    assert verdict.same and not verdict.candidate.differences, " ".join(verdict.sentences)
