"""A recipe from its file and overrides, or every mistake in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.recipe import Precision, read_recipe
from paddle_dp.units import Duration, Every, Length
from tests.house.programs import ROOT, run_python

Write = Callable[..., Path]


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_a_recipe_is_read(write: Write) -> None:
    recipe = read_recipe(write())
    assert recipe.name == "tiny" and recipe.folder == Path("runs/tiny")
    assert recipe.model.config.width == 8 and recipe.schedule.config.learning_rate == 3e-4
    assert recipe.train.length == Length(3, "epochs") and recipe.train.batch == 32
    assert [c.name for c in recipe.callbacks] == ["metrics", "evaluate"]
    assert recipe.callbacks[1].config.every == Every(2, "epochs")


def test_what_a_recipe_does_not_say(write: Write) -> None:
    recipe = read_recipe(write())
    assert recipe.strategy.name == "data_parallel" and recipe.loss is None
    assert (
        recipe.train.precision == Precision() and not recipe.train.drop_last and recipe.train.device == "auto"
    )
    assert (recipe.loader.num_workers, recipe.loader.prefetch, recipe.loader.timeout) == (0, 2, Duration(120))


def test_overrides_are_laid_over(write: Write) -> None:
    recipe = read_recipe(
        write(), ["train.batch=64", "callbacks.evaluate.every=1 epoch", "output_dir=/tmp/x", "name=other"]
    )
    assert recipe.train.batch == 64 and recipe.callbacks[1].config.every == Every(1, "epochs")
    assert recipe.folder == Path("/tmp/x") and recipe.name == "other"


def test_callbacks_can_be_left_out(write: Write) -> None:
    assert read_recipe(write(), ["callbacks=[]"]).callbacks == ()


def test_a_default_part_can_be_overridden(write: Write) -> None:
    assert (
        read_recipe(write(), ["strategy.find_unused_parameters=true"]).strategy.config.find_unused_parameters
        is True
    )


def test_a_required_key_in_another_spelling_is_one_mistake(write: Write) -> None:
    path = write("""\
model: {use: recipe_model.Config, width: 8}
dataset: {use: digits}
optimiser: {use: sgd}
schedule: {use: cosine, learning_rate: 0.1}
train: {length: 1 epoch, batch: 8}
""")
    (line,) = refused(path)
    assert line.startswith("tiny.yaml:3: a recipe has no setting 'optimiser'. Did you mean 'optimizer'?")


def test_every_mistake_at_once_each_on_its_line(write: Write) -> None:
    path = write("""\
model:
  use: recipe_model.Config
  widht: 8
dataset: {use: digit}
optimizer: {use: sgd, clip: 'x'}
schedule: {use: cosine}
train:
  batch: abc
  batch: 3
  precision: float61
  micro_batches: 0
colour: red
callbacks: [{use: metrics, every: 5}]
""")
    said = refused(path, "train.sead=1", "optimizer.decay_all=1")
    begins = [
        "tiny.yaml:3: model recipe_model.Config has no setting 'widht'. Did you mean 'width'? It takes depth, width.",
        "tiny.yaml:4: there is no dataset 'digit'. Did you mean 'digits'? On the shelf datasets: ",
        "tiny.yaml:5: optimizer.clip: 'x' is not a number",
        "tiny.yaml:6: schedule cosine needs 'learning_rate'",
        "tiny.yaml:7: train needs 'length' (such as 3 epochs)",
        "tiny.yaml:8: train.batch: 'abc' is not a whole number",
        "tiny.yaml:9: 'batch' is set twice, first on line 8",
        "tiny.yaml:10: train.precision.dtype: 'float61' is not one of 'float32', 'float64', 'bfloat16' or ",
        "tiny.yaml:11: train.micro_batches: 0 is less than 1",
        "tiny.yaml:12: a recipe has no setting 'colour'. It takes adapter, callbacks, dataset, ema, evaluation, g",
        "tiny.yaml:13: callbacks.metrics.every: '5' has no unit: write a quantity like '50 steps' (units: ",
        "override 'train.sead=1': train has no setting 'sead'. Did you mean 'seed'? It takes batch, batch_ramp, compi",
        "override 'optimizer.decay_all=1': optimizer.decay_all: 1 is not true or false",
    ]
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=True)] == begins


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=0.1"], "override 'optimizer.lr=0.1': optimizer sgd has no setting 'lr'. In a recipe"),
        (["train.batch=abc"], "override 'train.batch=abc': train.batch: 'abc' is not a whole number"),
        (["train.batch='64'"], "train.batch: '64' is not a whole number: leave the quotes out"),
        (["train.seed=99999999999999999999"], "train.seed: 99999999999999999999 is more than 9223372036854775807"),
        (["train.batch=true"], "train.batch: true is not a whole number"),
        (["train.batch=1e3"], "train.batch: 1000.0 is not a whole number: write 1000"),
        (["train.length=0 epochs"], "train.length: '0 epochs' is no training"),
        (
            ["train.batch=4", "train.micro_batches=8"],
            "train.micro_batches: a batch of 4 cannot be cut into 8: some would be empty",
        ),
        (["train=3"], "train: 3 is not a group of settings"),
        (["model=null"], "override 'model=null': model needs 'use'"),
        (["callbacks=[consol]"], "callbacks: a part is a group of settings: write callbacks: [{use: consol}]"),
        (["checkpoint.best=acc1"], "'checkpoint'. checkpoint is a callback: callbacks.checkpoint."),
        (["model=resnet"], "model: a part is a group of settings: write model: {use: resnet}"),
        (["callbacks=metrics"], "callbacks: 'metrics' is not a list"),
        (["callbacks.0.use=metric"], "there is no callback 'metric'. Did you mean 'metrics'?"),
        (["strategy.offload=true", "strategy.use=single"], "strategy single has no setting 'offload'. 'offload' is a"),
        (["strategy.tensor=2"], "'tensor' is a setting of strategy hybrid: strategy.use=hybrid. It takes"),
        (["strategy.tp=2"], "strategy.tensor (of strategy hybrid). 'tensor' is a setting of strategy hybrid"),
        (["callbacks=[{use: evaluate, best: acc1}]"], "a setting of callback checkpoint: callbacks.checkpoint.best."),
        (["optimizer.beta1=0.9"], "'beta1' is a setting of the optimizers adamw, lamb, lion and muon. It takes clip"),
        (["optimizer.learning_rate=1"], "no setting 'learning_rate'. In a recipe that is schedule.learning_rate."),
        (["batch=8"], "a recipe has no setting 'batch'. In a recipe that is train.batch."),
        (["wibble=1"], "a recipe has no setting 'wibble'. It takes adapter, callbacks"),
        (["wibble.wobble=1"], "a recipe has no setting 'wibble'. It takes adapter, callbacks"),
        (["train.wibble.wobble=1"], "train has no setting 'wibble'. It takes batch"),
        (["name=a/b"], "name: 'a/b' cannot be the name of a folder"),
        (["name=3"], "name: 3 is not a text: write '3', in quotes"),
        (["train.precision={dtype: float16, scale: 0}"], "train.precision.scale: 0 is not more than 0"),
        (["train.device=cuda"], "train.device: 'cuda' is none of 'auto', 'cpu', 'gpu', 'xpu', 'npu', nor the name of"),
        (["train.clip=1"], "train has no setting 'clip'. In a recipe that is optimizer.clip."),
        (["train.device=gpus"], "nor the name of a plugin's device. Did you mean 'gpu'?"),
        (["train.device=a-b"], "train.device: 'a-b' is none of 'auto', 'cpu', 'gpu', 'xpu', 'npu', nor the name of"),
    ],
)  # fmt: skip
def test_one_mistake_on_the_command_line(write: Write, overrides: list[str], said: str) -> None:
    (line,) = refused(write(), *overrides)
    assert line.startswith("override '") and said in line


def test_a_part_that_is_missing_stands_on_the_first_line(write: Write) -> None:
    assert refused(write(write().read_text().replace("dataset: {use: digits}", ""))) == [
        "tiny.yaml:1: a recipe needs 'dataset'"
    ]


def test_reading_a_recipe_imports_only_the_parts_it_names(write: Write) -> None:
    path = write()
    read = f"from paddle_dp.recipe import read_recipe; read_recipe({str(path)!r}, ['callbacks=[]'])"
    code = f"import sys; {read}; assert not sys.modules.keys() & {{'paddle', 'paddle_dp.optimizers.adamw'}}"
    run_python("-c", code, env={"PYTHONPATH": f"{ROOT}:{path.parent}"}, timeout=60)


def test_a_callback_that_would_write_everything_twice_is_refused(write: Callable[..., Path]) -> None:
    twice = "callbacks=[{use: console}, {use: early_stop}, {use: console, every: 3 steps}]"
    message = f"override '{twice}': callbacks: console is there twice, and would write everything twice: leave one out"
    assert refused(write(), twice) == [message]
    read_recipe(write(), ["callbacks=[{use: early_stop, watch: loss}, {use: early_stop, watch: acc1}]"])
