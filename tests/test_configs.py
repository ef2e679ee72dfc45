"""Every recipe in configs/ is right, says how it is run, and trains where its data are at hand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paddle_dp.assembly.first_forward import tried
from paddle_dp.launch.recipe_rank import work
from paddle_dp.recipe import read_recipe
from tests.house.runs import events
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
# These need a file of the user's.
WITHOUT_DATA = {"gpt_345m", "gpt_1_3b", "gpt_6_7b", "llama_7b", "resnet50_flowers102", "resnet50_imagenet"}
# Over the sources of Python's library, which take a while to read: tests/axes and tests/datasets train their layouts.
OVER_TEXTS = {
    "bert_data2", "gpt_data2", "gpt_pipeline2", "gpt_pipeline2_interleaved", "gpt_sharding2", "gpt_single",
    "gpt_tensor2", "gpt_tensor2_data2", "llama_data2", "llama_packed", "llama_sequence2", "llama_single",
    "llama_tensor2_sequence",
}  # fmt: skip
# Any other is trained here, a new one, too.
AT_HAND = [path for path in RECIPES if path.stem not in WITHOUT_DATA | OVER_TEXTS]
# Their strategies, or losses, have tests of their own in every run; resnet50_random102 is resnet18_random to two steps.
ALSO_TESTED = {
    "digits_mlp",  # tests/test_docs.py: as the README shows it
    "digits_after",  # tests/exchange/test_exchange_ways.py
    "digits_per_parameter",
    "digits_bfloat16_exchange",
    "digits_power_sgd",
    "digits_local_sgd",  # tests/strategies
    "digits_diloco",
    "digits_async_average",
    "digits_parameter_server",
    "resnet50_random102",
    "digits_contrastive",
    "digits_resnet18",
    "digits_scatter",
    "digits_replicas",
    "siamese_digits",
    "inception_branches",
}
# These pass the trial of `check` in every run; two ranks train by what they name there, too.
TRAINED_ELSEWHERE = {
    "digits_convnet",  # tests/test_docs.py: the README compares it on three ranks
    "digits_dropout",  # digits_convnet with dropout, whose masks have tests/core/dropout
    "gpt_tiny",  # tests/axes; with these callbacks, as llama_tiny_lora
    "llama_tiny",  # llama_tiny_lora without adapters
    "resnet18_random",  # BatchNorm on ranks as digits_convnet, its layers as resnet50_pipeline
    "vit_digits",  # vit_tensor2 without its axis
}
SMALLER = {  # what makes two steps of a recipe take seconds, where a batch of 50 alone does not
    "resnet18_random": [
        "train.batch=5", "dataset.shape=[3,8,8]", "dataset.classes=4", "dataset.samples=20", "dataset.test_samples=3",
        "model.classes=4",
    ],
    "resnet50_random102": [
        "train.batch=4", "model.depth=18", "dataset.shape=[3,32,32]", "dataset.samples=20", "dataset.test_samples=4",
        "loader.num_workers=0", "schedule.learning_rate=0.01",
    ],
    "resnet50_pipeline": ["train.batch=4", "train.micro_batches=2", "model.depth=18", "dataset.shape=[3,8,8]"],
    "inception_branches": ["train.batch=4"],
    "digits_resnet18": ["train.batch=8", "dataset.size=8"],
    "digits_distillation": ["train.batch=50", "callbacks=[{use: metrics}]"],  # the pictures are vit_tensor2's
    "large_classifier": ["train.batch=50", "model.classes=1000", "dataset.classes=1000"],
}  # fmt: skip


def ranks_of(path: Path) -> int:
    """On how many ranks the header of a recipe runs it."""
    shown = re.search(r"--ranks (\d+)", path.read_text())
    return int(shown[1]) if shown else 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    assert recipe.folder == Path("runs") / path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_shows_a_command_that_the_recipe_takes(path: Path) -> None:
    text = path.read_text()
    header = re.match(r"(?:#.*\n)+", text)
    assert header and f"paddle-dp train configs/{path.name}" in header[0]
    for line in re.findall(r"paddle-dp \w+ configs/\S+(.*)", text):
        overrides = [word for word in shlex.split(line, comments=True) if re.fullmatch(r"[a-z_.]+=\S+", word)]
        read_recipe(path, [word.replace("…", "data") for word in overrides])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.long) if path.stem in ALSO_TESTED else path
        for path in RECIPES
        if path.stem not in WITHOUT_DATA
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_passes_the_trial_of_check(path: Path) -> None:
    """It refused what needs a job: a timeline of 2 ranks, on one."""
    left_out = [line for line in tried(read_recipe(path, SMALLER.get(path.stem, []))) if "callback" in line]
    assert bool(left_out) == (path.stem == "gpt_pipeline2_interleaved")


def train(path: str, overrides: list[str]) -> None:
    """What a rank of `paddle-dp train` does."""
    work("train", Path(path), overrides, {})


def check_trains(path: Path, folder: Path) -> None:
    """Two steps on as many ranks as the header says, and both are written down."""
    small = SMALLER.get(path.stem, ["train.batch=50"])
    words = [f"output_dir={folder}", "train.length=2 steps", *small]
    run_ranks(train, ranks_of(path), f"configs/{path.name}", words, timeout=150)
    assert max(entry.get("step", 0) for entry in events(folder)) == 2


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.long) if path.stem in ALSO_TESTED | TRAINED_ELSEWHERE else path
        for path in AT_HAND
        if ranks_of(path) <= 4
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains_two_steps_on_the_ranks_of_its_header(path: Path, tmp_path: Path) -> None:
    check_trains(path, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in AT_HAND if ranks_of(path) > 4], ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps_on_many_ranks(path: Path, tmp_path: Path) -> None:
    check_trains(path, tmp_path / "run")


def test_the_exceptions_are_recipes() -> None:
    exceptions = WITHOUT_DATA | OVER_TEXTS | ALSO_TESTED | TRAINED_ELSEWHERE | set(SMALLER)
    assert exceptions <= {path.stem for path in RECIPES}
