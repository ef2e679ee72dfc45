"""Models that draw or remember must not be called the same, and what is wrong with them is named."""

import pytest

from paddle_dp.proof import compare_sides
from tests.house.recipes import small_recipe
from tests.proof.several import run_sides

RECIPE = small_recipe(
    "length: 1 epoch, batch: 10", optimizer="momentum", schedule="constant, learning_rate: 0.05",
    strategy="data_parallel",
)  # fmt: skip
ORDER, CHANCE = "in another order", "in a second run of the same steps"
DRAWS, BUFFER = "draws from Paddle's generator", "is updated by forward from each rank's own samples"
SAID = {  # some of tests/proof/zoo/liars.py; the zoo has all of them
    "NoiseAfterWarmup": (ORDER, DRAWS),
    "RandomLayerScale": (CHANCE, "draws from Python's generator"),
    "OwnGenerator": (ORDER, "`random` of the model differs between rank 0 and one process"),
    "Queue": (ORDER, BUFFER),
    "MeanInFloat": ("`mean` of the model is 0.0", "on rank 1 after step 1"),
    "ModuleGlobal": (  # the last one: its module remembers
        "`_SEEN` of module tests.proof.zoo.liars differs between rank 0 and rank 1 after step 1",
    ),
}
STEPS = {"models.Logged": 2, "models.LogitScale": 2, "models.DropPath": 4}  # DropPath draws from step 2 on
STEPS |= {f"liars.{m}": 3 if m in ("Queue", "MeanInFloat", "ModuleGlobal") else 5 for m in SAID}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The verdict on each model, of one job on two ranks and one of one process."""
    folder = tmp_path_factory.mktemp("liars")
    (path := folder / "case.yaml").write_text(RECIPE)
    uses = {model: [f"model={{use: tests.proof.zoo.{model}}}"] for model in STEPS}
    many = run_sides(path, folder / "many", 2, {m: (uses[m], {"steps": STEPS[m]}) for m in STEPS})
    repeated = {m: {"steps": STEPS[m], "candidates": [[str(many[m].folder), 2]]} for m in STEPS}
    one = run_sides(path, folder / "one", 1, {m: (uses[m], repeated[m]) for m in STEPS})
    for model in STEPS:
        one[model].candidates = (many[model],)
    return {model: compare_sides(one[model], many[model]) for model in STEPS}


@pytest.mark.processes
@pytest.mark.parametrize("model", SAID)
def test_a_model_that_draws_or_remembers_is_different_and_why_is_said(verdicts, model):
    """Another order of the samples moved it as much as two ranks did, and was taken for rounding: SAME."""
    verdict = verdicts[f"liars.{model}"]
    said = " ".join(verdict.sentences)
    assert verdict.label == "different", said
    assert all(sentence in said for sentence in SAID[model]), said
    assert "turned a ReLU" not in said and "equal shares agree" not in said


@pytest.mark.processes
def test_a_number_that_nothing_reads_is_said_and_does_not_make_a_model_another(verdicts):
    verdict = verdicts["models.Logged"]
    said = " ".join(verdict.sentences)
    assert verdict.same, said
    assert "Can differ, and did not in these steps: `mean` of the model is 0.0" in said
    assert "`calls`" not in said


@pytest.mark.processes
def test_a_parameter_of_no_dims_is_compared(verdicts):
    verdict = verdicts["models.LogitScale"]
    assert verdict.same, verdict.sentences
    assert "scale" in verdict.wide.shows


@pytest.mark.processes
def test_drop_path_is_the_same_on_any_number_of_ranks(verdicts):
    """Each rank drew its own paths by `paddle.rand`, as PaddleClas's models have it: DIFFERENT."""
    verdict = verdicts["models.DropPath"]
    assert verdict.same and not verdict.candidate.differences, " ".join(verdict.sentences)
