"""A training described in Python is the one that a recipe would describe, in every layout, and stays the same run."""

from __future__ import annotations

import ast
import copy
import fcntl
import inspect
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

import paddle_dp
from models import gpt
from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly.assemble import TrainerBuilder
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.errors import DivergenceError, RecipeError, UsageError
from paddle_dp.exchange.gradient_exchange import UNFINISHED
from paddle_dp.recipe.folder import LOCK
from tests.house.datasets import Points, Samples
from tests.house.learners import Chain
from tests.house.runs import events
from tests.house.training import untried
from tests.ranks import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"use": "hybrid", "pipeline": 2},
    "tensor": {"use": "hybrid", "tensor": 2},
}
CALLBACKS = [{"use": "metrics", "every": "1 step"}, {"use": "checkpoint", "every": "1 epoch"}]


class Block(nn.Layer):
    cuts: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, outputs: int):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, outputs)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Two(Chain):
    def __init__(self) -> None:
        super().__init__(Block(6), Block(4))


class Plain(nn.Layer):
    """What Two computes, from the same initial weights, as somebody writes it who has never heard of layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.up0, self.down0 = nn.Linear(6, 16), nn.Linear(16, 6)
        self.up1, self.down1 = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.down0(nn.functional.gelu(self.up0(x)))
        return self.down1(nn.functional.gelu(self.up1(x)))


def annotated() -> dict[str, Any]:
    paddle.seed(1)
    model, gelu = Plain(), nn.functional.gelu
    return {
        "model": model,
        "optimizer": paddle.optimizer.AdamW(1e-2, parameters=model.parameters()),
        "cuts": {"up*": "colwise", "down*": "rowwise"},
        "blocks": [["up0", gelu, model.down0], ["up1", {"use": "paddle.nn.functional.gelu"}, "down1"]],
    }


def described(folder: Path, **more: Any) -> dict[str, Any]:
    paddle.seed(1)
    model = Two()
    return {
        "model": model,
        "loss": "cross_entropy",  # one that needs no trial
        "optimizer": paddle.optimizer.AdamW(1e-2, parameters=model.parameters()),
        "train": Points(),
        "test": Points(30),
        "batch": 16,
        "micro_batches": 2,
        "folder": folder,
        "callbacks": CALLBACKS,
        **more,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strategy": {"use": "hybrid", "pipeline": 4}}, "the degrees make 4 ranks, and there are 2"),
    (
        {
            "strategy": {"use": "hybrid", "pipeline": 2, "pipeline_schedule": "interleaved"},
            "micro_batches": 3,
        },
        "micro_batches",
    ),
    ({"strategy": {"use": "hybrid", "pipeline": 2}, "model": nn.Linear(6, 4)}, "ordered `blocks`"),
    ({"strategy": "single"}, "strategy single runs on one rank"),
    ({"train": Points(0)}, "dataset: the train split is empty: its len() is 0."),
    ({"test": Points(0)}, "the test split is empty: its len() is 0. To hold nothing out, let it be None."),
    ({"length": "0.01 epochs"}, "Trainer.of.length: '0.01 epochs' is no training: an epoch has 7 updates"),
    ({"micro_batches": 17}, "a batch of 16 cannot be cut into 17"),
]


def refusals(folder: str) -> list[str]:
    """What is said of each, before anything is learned."""
    said = []
    for place, (change, _) in enumerate(REFUSED):
        given = described(Path(folder, f"refused-{place}"), **change)
        if "model" in change:
            given["optimizer"] = paddle.optimizer.SGD(0.1, parameters=given["model"].parameters())
        with pytest.raises(UsageError) as caught:
            Trainer.of(**given)
        said.append(str(caught.value))
    return said


def learn(folders: dict[str, str], refused: str) -> list[str]:
    """Every layout in a folder of its own, one after another in the same ranks, the first one tried; then what cannot
    be."""
    for layout, folder in folders.items():
        strategy, plain = LAYOUTS[layout.removeprefix("plain ")], layout.startswith("plain ")
        own = nn.CrossEntropyLoss(reduction="none")
        more = annotated() if plain else {}
        trainer = Trainer.of(**described(Path(folder), loss=own, strategy=strategy, **more))
        trainer.fit("2 epochs")
        trainer.evaluate()
        untried()
    return refusals(refused)


def train_twice(folder: str, strategy: dict[str, Any], optimizers: str) -> list[float] | str:
    """The losses of two Trainers of one model, or the second one's refusal. `optimizers`: the same one, a new one, or
    the same one by a function."""
    paddle.seed(1)
    model, kept, rows = Two(), [], []
    for number in range(2):
        if not kept or optimizers == "new":
            clip = nn.ClipGradByGlobalNorm(0.02)
            kept = [paddle.optimizer.SGD(0.5, parameters=model.parameters(), grad_clip=clip)]
        run = Path(folder) / str(number)
        words = described(run, model=model, optimizer=kept[0], strategy=strategy)
        if optimizers == "function":
            words["optimizer"] = partial(lambda optimizer, rate, named: optimizer, kept[0])
            words["schedule"] = {"use": "constant", "learning_rate": 0.5}
        try:
            trainer = Trainer.of(**words)
        except UsageError as error:
            return str(error)
        trainer.fit("1 epoch")
        rows += losses(run)
    return rows


def two_trainers(folder: str, cases: dict[str, tuple[dict[str, Any], str]]) -> dict[str, list[float] | str]:
    return {name: train_twice(f"{folder}/{name}", *case) for name, case in cases.items()}


def test_a_second_training_of_a_model_clips_as_the_first_or_is_refused_by_its_cause(tmp_path: Path) -> None:
    """A clip that a strategy took from the optimizer was gone in the second; weights of stage 3 stood still there, and
    under pipeline those of the other stages were old."""
    sharded, server = {"use": "hybrid", "sharding": 2, "sharding_stage": 1}, {"use": "parameter_server"}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "same optimizer": ({"use": "hybrid"}, "same"),
        "same optimizer by a function": ({"use": "hybrid"}, "function"),
        "new optimizer, ZeRO": (sharded, "new"),
        "new optimizer, server": (server, "new"),
        "same optimizer, ZeRO": (sharded, "same"),
        "same optimizer by a function, ZeRO": (sharded, "function"),
        "same optimizer, server": (server, "same"),
        "new optimizer, stage 3": (sharded | {"sharding_stage": 3}, "new"),
        "new optimizer, pipeline": (LAYOUTS["pipeline"], "new"),
        "new optimizer, asynchronous server": (server | {"mode": "async"}, "new"),
    }
    one = train_twice(str(tmp_path / "one"), {"use": "data_parallel"}, "same")
    assert len(one) == 14
    for many in run_ranks(two_trainers, 2, str(tmp_path / "many"), cases):
        for name in [*cases][:4]:
            np.testing.assert_allclose(many[name], one, rtol=1e-5, err_msg=name)
        for name in [*cases][4:7]:
            assert "optimizer: an earlier Trainer.of has dealt its parameters" in many[name], name
        for name in [*cases][7:]:
            assert "model: an earlier Trainer.of has split it among the ranks" in many[name], name


def refusals_of_split_models(folder: str) -> dict[str, str]:
    """What a Trainer.of says of models after another one has split them, or some of their layers, or has failed."""
    tensor, said = LAYOUTS["tensor"], {}
    tokens = Samples(32, lambda i: (np.arange(i, i + 8) % 16, np.arange(i + 1, i + 9) % 16))

    def attempt(name: str, model: nn.Layer, **more: Any) -> None:
        optimizer = more.pop("optimizer", paddle.optimizer.SGD)(0.1, parameters=model.parameters())
        words = described(Path(folder, name), model=model, optimizer=optimizer, **more)
        try:
            Trainer.of(**words)
        except UsageError as error:
            said[name] = str(error)
        untried()

    paddle.seed(1)  # before all layers: a Trainer.of gives each rank random numbers of its own
    body, head, backbone, piped = [Block(6), Block(6)], Block(4), Two(), Two()
    language = gpt.Config(vocab=16, width=8, depth=1, heads=2, length=8).build()
    attempt("first", Chain(*body, head), strategy=tensor)
    attempt("shared layers", Chain(*body, Block(4)))
    attempt("a cut layer", Chain(Block(6), Chain(body[0].up, nn.Linear(16, 4))))
    attempt("first pipeline", piped, strategy=LAYOUTS["pipeline"])
    attempt("a copy", copy.deepcopy(piped))
    for parameter in piped.parameters():
        parameter.optimize_attr = {"learning_rate": 0.5}
    attempt("rate factors", piped)
    attempt("failed", backbone, optimizer=paddle.optimizer.Lamb, strategy=tensor)
    attempt("after a failure", backbone)
    attempt("new layers", Chain(nn.GELU(), Block(6), Block(4)))
    for name in ("first sequence", "second sequence"):
        attempt(name, language, train=tokens, test=None, strategy={"use": "hybrid", "sequence": 2})
    return said


def test_a_model_whose_layers_another_training_has_split_is_refused(tmp_path: Path) -> None:
    """Another model around the same layers, such as of a backbone's pretraining, learned from slices, silently; so did
    a model that a refused training had cut before it was refused."""
    for said in run_ranks(refusals_of_split_models, 2, str(tmp_path)):
        assert "optimizer Lamb takes norms over whole parameters" in said.pop("failed")
        names = [
            "shared layers",
            "a cut layer",
            "a copy",
            "rate factors",
            "after a failure",
            "second sequence",
        ]
        assert [*said] == names, said
        for name, text in said.items():
            assert "model: an earlier Trainer.of has split it among the ranks" in text, name
        assert "with its parameter 'blocks.0.up.weight'" in said["shared layers"]


def refusals_of_unequal_starts(folder: str) -> list[str]:
    """What is said of an optimizer that local_sgd has trained, and of a second model that is built without a seed."""
    said, words = [], described(Path(folder, "first"), length="3 steps", callbacks=[])
    Trainer.of(**words | {"strategy": {"use": "local_sgd", "every": "2 steps"}}).fit()
    with pytest.raises(DivergenceError) as caught:
        Trainer.of(**words | {"folder": Path(folder, "kept")}).fit()
    said.append(str(caught.value))
    untried()
    model = Two()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with pytest.raises(DivergenceError) as caught:
        Trainer.of(
            **described(
                Path(folder, "new"), model=model, optimizer=optimizer, strategy={"use": "hybrid", "data": 2}
            )
        )
    return [*said, str(caught.value)]


def test_different_weights_or_states_of_a_second_training_have_a_cause_and_a_remedy(tmp_path: Path) -> None:
    for kept, new in run_ranks(refusals_of_unequal_starts, 2, str(tmp_path)):
        assert "rank 1 holds other values than rank 0 in 'optimizer/" in kept
        assert "trained under local_sgd before" in kept and "optimizer_states: averaged" in kept
        assert "after the weights were placed: rank 1" in new
        assert "call paddle.seed(0) before each model is built" in new


class Normalized(Chain):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.GELU()), nn.Linear(8, 4))


def fitted(folder: Path, model: nn.Layer, strategy: dict[str, Any]) -> list[float]:
    """The losses of an epoch, after which it is evaluated."""
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    words = described(folder, model=model, optimizer=optimizer, strategy=strategy, micro_batches=1)
    trainer = Trainer.of(**words)
    trainer.fit("1 epoch")
    rows = losses(folder)
    trainer.evaluate()
    return rows


def refusal_of_unequal_statistics(folder: str) -> str:
    """What is said of a BatchNorm that has seen other samples on each rank before the training."""
    paddle.seed(1)
    model = Normalized()
    model(paddle.full([4, 6], dist.get_rank()))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    words = described(Path(folder), model=model, optimizer=optimizer, callbacks=[])
    with pytest.raises(DivergenceError) as caught:
        Trainer.of(**words, strategy={"use": "hybrid", "data": 2}).fit("1 step")
    return str(caught.value)


def test_unequal_running_statistics_are_refused_where_no_exchange_makes_them_equal(tmp_path: Path) -> None:
    """Each rank evaluated its share of the held-out samples by its own statistics, silently."""
    for said in run_ranks(refusal_of_unequal_statistics, 2, str(tmp_path)):
        assert "before the first update: rank 1 holds other values than rank 0 in 'blocks.0.1._mean'" in said


def seconds_of_normalized(
    folder: str, cases: dict[str, list[dict[str, Any]]]
) -> dict[str, list[list[float]]]:
    """By case, the losses of a model's second training, and those of a new model with the weights of the first one."""
    rows = {}
    for name, (first, second) in cases.items():
        path = Path(folder, name)
        paddle.seed(1)  # a Trainer.of gives each rank random numbers of its own
        model, new = Normalized(), Normalized()
        fitted(path / "first", model, first)
        new.set_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()})
        rows[name] = [fitted(path / "second", model, second), fitted(path / "new", new, second)]
        untried()
    return rows


def test_batch_norms_of_a_second_training_are_those_of_a_new_model(tmp_path: Path) -> None:
    """They exchanged over the first one's ranks where the second strategy synchronizes none: a pipeline of two hung,
    and sync_batch_norm: false and local_sgd computed other numbers, silently. After servers the ranks' data formats
    differed."""
    first = {"use": "data_parallel"}
    cases = {
        "unsynchronized": [first, first | {"sync_batch_norm": False}],
        "local_sgd": [first, {"use": "local_sgd"}],
        "pipeline": [first, LAYOUTS["pipeline"]],
        "servers": [{"use": "parameter_server"}] * 2,
    }
    for rows in run_ranks(seconds_of_normalized, 2, str(tmp_path), cases):
        assert [*rows] == [*cases]
        for name, (second, new) in rows.items():
            assert len(second) == 7 and second == new, name


def first_of_two(folder: str, strategies: list[dict[str, Any]]) -> list[list[list[float]]]:
    """For each strategy of another trainer of the same model, made before the first one's fit, the losses of that fit:
    without the other trainer, and with it."""
    rows = []
    for number, strategy in enumerate(strategies):
        of_both = []
        for is_made in (False, True):
            path = Path(folder, f"{number}{is_made}")
            paddle.seed(1)
            model = Normalized()
            optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
            words = described(path / "first", model=model, optimizer=optimizer, micro_batches=1)
            first = Trainer.of(**words | {"strategy": {"use": "data_parallel"}})
            if is_made:
                Trainer.of(**words | {"strategy": strategy, "folder": path / "second"})
            first.fit("1 epoch")
            of_both.append(losses(path / "first"))
            untried()
        rows.append(of_both)
    return rows


def test_a_trainer_has_its_batch_norms_though_another_of_its_model_was_made_since(tmp_path: Path) -> None:
    """It learned with local ones, silently."""
    others = [
        {"use": "data_parallel", "sync_batch_norm": False},
        {"use": "local_sgd"},
        {"use": "hybrid", "data": 2},
    ]
    for rows in run_ranks(first_of_two, 2, str(tmp_path), others):
        for alone, beside in rows:
            assert len(alone) == 7 and alone == beside


def loop_after_fits(folder: str, strategies: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """By strategy, a weight after two fits of a trainer, and after another update by a loop with its optimizer; with a
    clip, or one for each parameter group."""
    weights: dict[str, list[Any]] = {}
    for name, strategy in strategies.items():
        for grouped in (False, True):
            paddle.seed(1)
            model, clip = Two(), nn.ClipGradByGlobalNorm(0.02)
            parameters: Any = model.parameters()
            if grouped:
                parameters = [{"params": parameters[:3]}, {"params": parameters[3:]}]
            optimizer = paddle.optimizer.SGD(0.5, parameters=parameters, grad_clip=clip)
            words = described(Path(folder, f"{name}{grouped}"), model=model, optimizer=optimizer)
            trainer = Trainer.of(**words | {"strategy": strategy, "callbacks": []})
            trainer.fit("2 steps")
            trainer.fit("4 steps")
            fitted = model.blocks[0].up.weight.numpy()
            (model(paddle.ones([2, 6])) ** 2).sum().backward()
            optimizer.step()
            weights.setdefault(name, []).extend([fitted, model.blocks[0].up.weight.numpy()])
            untried()
    return weights


def test_a_loop_with_the_optimizer_of_a_training_clips_as_before(tmp_path: Path) -> None:
    """hybrid took the clip from the optimizer for good: a loop after `fit` made updates without it."""
    strategies = {"plain": {"use": "data_parallel"}, "hybrid": {"use": "hybrid", "data": 2}}
    for row in run_ranks(loop_after_fits, 2, str(tmp_path), strategies):
        for plain, hybrid in zip(row["plain"], row["hybrid"], strict=True):
            np.testing.assert_allclose(hybrid, plain, rtol=1e-4, atol=1e-6)


def fits_with_another_clip(folder: str, bounds: list[tuple[float | None, float | None]]) -> list[str]:
    """What the second fit says, after the clip of the first was set to another bound."""
    sentences = []
    for number, (before, after) in enumerate(bounds):
        paddle.seed(1)
        old, new = (bound and nn.ClipGradByGlobalNorm(bound) for bound in (before, after))
        model = Two()
        optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters(), grad_clip=old)
        words = described(Path(folder, str(number)), model=model, optimizer=optimizer)
        trainer = Trainer.of(**words | {"strategy": {"use": "hybrid", "data": 2}, "callbacks": []})
        trainer.fit("2 steps")
        optimizer._grad_clip = new
        try:
            trainer.fit("4 steps")
            sentences.append("")
        except UsageError as error:
            sentences.append(str(error))
        assert optimizer._grad_clip is new
        untried()
    return sentences


def test_another_clip_between_two_fits_is_refused_where_the_trainer_clips(tmp_path: Path) -> None:
    """The second fit clipped by the first bound, silently."""
    bounds = [(0.02, 0.5), (0.02, None), (None, 0.5), (0.02, 0.02)]
    for sentences in run_ranks(fits_with_another_clip, 2, str(tmp_path), bounds):
        assert "clip was 0.02 at Trainer.of and is 0.5: this strategy clips by the first" in sentences[0]
        assert "was 0.02 at Trainer.of and is none" in sentences[1]
        assert "was none at Trainer.of and is 0.5" in sentences[2]
        assert sentences[3] == ""


class Narrow(nn.Layer):
    """Of its layer `up` each of two ranks has one output."""

    cuts: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 2), nn.Linear(2, 4, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def train_biases(folder: str, length: str, **more: Any) -> list[float]:
    paddle.seed(1)
    model = Narrow()
    model.up.weight.stop_gradient = model.down.weight.stop_gradient = True
    optimizer = paddle.optimizer.AdamW(0.05, parameters=model.parameters())
    Trainer.of(**described(Path(folder), model=model, optimizer=optimizer, **more)).fit(length)
    return losses(Path(folder))


def test_states_of_slices_of_one_number_are_loaded_in_another_layout(tmp_path: Path) -> None:
    """Each rank updates one number: its step counts were saved as slices, which no other layout could load."""
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    train_biases(one, "1 epoch")
    run_ranks(train_biases, 2, many, "1 epoch", strategy=LAYOUTS["tensor"])
    resumed = [train_biases(folder, "2 epochs", resume=True) for folder in (one, many)]
    assert len(resumed[0]) == 14
    np.testing.assert_allclose(resumed[1], resumed[0], rtol=1e-5)


PARTS_OF_A_MODEL = [
    ({"pipeline": 2}, True),
    ({"tensor": 2}, True),
    ({"sharding": 2, "sharding_stage": 3}, True),
]
PARTS_OF_A_MODEL += [({}, False), ({"sharding": 2, "sharding_stage": 2}, False)]


def last_lines(folder: str) -> list[str]:
    """The screen of a step in each layout of `PARTS_OF_A_MODEL`, in the same ranks."""
    screens = []
    for number, (degrees, _) in enumerate(PARTS_OF_A_MODEL):
        words = described(Path(folder, str(number)), strategy={"use": "hybrid", **degrees}, test=None)
        with redirect_stdout(StringIO()) as screen:
            Trainer.of(**{**words, "callbacks": ["console", "checkpoint"]}).fit("1 step")
        screens.append(screen.getvalue())
    return screens


def test_a_script_is_told_where_the_weights_of_a_split_model_are(tmp_path: Path) -> None:
    """Saved from the script's own model, other ranks' layers would have their initial weights."""
    for screen, (degrees, is_split) in zip(
        run_ranks(last_lines, 2, str(tmp_path))[0], PARTS_OF_A_MODEL, strict=True
    ):
        told = re.findall(
            r"^  weights      each rank's model has a part of .*: paddle-dp merge \S+ --out ", screen, re.M
        )
        assert "  checkpoint   " in screen and len(told) == is_split, (degrees, screen)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in events(run) if row["event"] in ("step", "evaluated")]


def weights(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    found = checkpoints.load(checkpoints.newest(run / "checkpoints"))
    return {name: found.read(name) for name in found.names if name.startswith("model/")}


def test_a_layout_learns_what_one_rank_learns_or_is_refused(tmp_path: Path) -> None:
    one = Trainer.of(**described(tmp_path / "one", loss=nn.CrossEntropyLoss(reduction="none")))
    one.fit("2 epochs")
    one.evaluate()
    truth, learned = losses(tmp_path / "one"), weights(tmp_path / "one")
    assert len(truth) == 15 and truth[0] > truth[12] > truth[14] - 0.1
    layouts = [*LAYOUTS, *(f"plain {layout}" for layout in LAYOUTS)]
    folders = {layout: str(tmp_path / layout) for layout in layouts}
    for said in run_ranks(learn, 2, folders, str(tmp_path)):
        assert all(words in sentence for sentence, (_, words) in zip(said, REFUSED, strict=True)), said
    for layout in layouts:
        np.testing.assert_allclose(losses(tmp_path / layout), truth, rtol=1e-5, err_msg=layout)
        found = weights(tmp_path / layout)
        if layout.startswith("plain "):  # up0.weight is blocks.0.up.weight
            found = {
                re.sub(r"/(up|down)(\d)", r"/blocks.\2.\1", name): value for name, value in found.items()
            }
        assert found.keys() == learned.keys()
        for name, weight in learned.items():
            np.testing.assert_allclose(found[name], weight, atol=2e-5, err_msg=f"{layout} {name}")


def test_a_resumed_script_goes_on_with_the_same_batches_or_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer.of(**described(run)).fit("1 epoch")
    for change, said in (
        ({"batch": 20}, r"batch was 16 and is 20\. Give the old value, or leave resume out for a new run"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"train": Points(90)}, "samples in the data set was 100 and is 90"),
    ):
        with pytest.raises(UsageError, match=said):
            Trainer.of(**described(run, resume=True, **change))
    killed = run / ".certificate.json.partial-1-0123abcd"  # half written by a process that was killed
    killed.touch()
    os.utime(killed, (0, 0))
    again = Trainer.of(**described(run, resume=True))
    assert again.progress.step == 7 and again.fit("2 epochs").step == 14 and not killed.exists()


def test_parts_in_a_recipes_words(tmp_path: Path) -> None:
    words = {
        "loss": {"use": "cross_entropy", "label_smoothing": 0.1},
        "optimizer": {"use": "adamw", "clip": 1.0},
        "schedule": {"use": "cosine", "learning_rate": 0.01, "warmup": "2 steps"},
        "precision": "bfloat16",
        "loader": {"timeout": "30 s"},
        "length": "2 epochs",
    }
    trainer = Trainer.of(**described(tmp_path / "run", **words))
    assert trainer.run.total_steps == 14 and trainer.learner.mixed.low
    assert trainer.learner.optimizer.get_lr() == pytest.approx(0.01 / 3)
    assert trainer.fit().step == 14
    assert trainer.learner.optimizer.get_lr() == pytest.approx(0.0, abs=1e-4)


def test_an_editor_and_a_type_checker_know_the_public_words_and_the_keywords() -> None:
    """Loaded late by name, they are named for type checkers all the same."""
    tree = ast.parse(Path(paddle_dp.__file__).read_text())
    (typing,) = [node for node in tree.body if isinstance(node, ast.If)]
    named = {name.asname for node in typing.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert named == set(paddle_dp.__all__) - {"__version__"}
    keywords = inspect.signature(Trainer.of).parameters.values()
    assert {k.name for k in keywords} >= {
        "model", "loss", "optimizer", "train", "batch", "precision", "resume",
    }  # fmt: skip
    assert all(k.kind is k.KEYWORD_ONLY and k.annotation is not k.empty for k in keywords)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"precision": "bfloat61"}, RecipeError, "bfloat16"),
        ({"schedule": {"use": "cosine", "learning_rate": 0.01}}, UsageError, r'give length="3 epochs"'),
        ({"strategy": "data_paralel"}, RecipeError, "Did you mean 'data_parallel'"),
        ({"loader": {"worker": 1}}, RecipeError, r"loader\.num_workers"),
        ({"epochs": 3}, UsageError, "epochs"),
        (
            {"cuts": {"blocks.*.upp": "colwise"}},
            RecipeError,
            "Trainer.of.cuts.blocks.*.upp: .* Did you mean 'up'",
        ),
        ({"cuts": {"blocks.*.up": "colwis"}}, RecipeError, "Did you mean 'colwise'"),
    ],
)
def test_a_wrong_word_is_met_at_the_door(
    tmp_path: Path, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Trainer.of(**described(tmp_path / "run", **wrong))


def test_a_training_without_a_length_is_not_fitted_by_guess(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give a length"):
        Trainer.of(**described(tmp_path / "run")).fit()


def test_each_fit_holds_the_folder(tmp_path: Path) -> None:
    """A second one ran without the lock that the first had released."""
    held: list[bool] = []

    class Look(paddle_dp.Callback):
        def step(self, moment: Any) -> None:
            with (tmp_path / "run" / LOCK).open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held.append(False)
                except BlockingIOError:
                    held.append(True)

    trainer = Trainer.of(**described(tmp_path / "run", callbacks=[Look()]))
    trainer.fit("1 step")
    with (tmp_path / "run" / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UsageError, match="belongs to a job that is running"):
            trainer.fit("2 steps")
    trainer.fit("2 steps")
    assert held == [True, True]


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of the files of a run, by path; without the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_an_evaluation_before_fit_or_after_another_one_changes_no_run_in_the_folder(tmp_path: Path) -> None:
    """It was told to callbacks that had not started: evaluation.json and early_stop.json were of the new weights, and
    a checkpoint of them became the best of the older run, whose own was deleted."""
    watching = ["evaluate", {"use": "checkpoint", "best": "loss", "keep": 1}, {"use": "early_stop"}]
    first = Trainer.of(**described(tmp_path / "run", callbacks=watching))
    first.fit("1 epoch")
    before = contents(tmp_path / "run")
    assert {"evaluation.json", "early_stop.json", "checkpoints/best.json"} <= before.keys()
    again = Trainer.of(**described(tmp_path / "run", callbacks=watching, resume="auto"))
    assert again.evaluate().samples == 30 and contents(tmp_path / "run") == before
    new = Trainer.of(**described(tmp_path / "run", callbacks=watching))
    assert new.evaluate().numbers["loss"] > 0 and contents(tmp_path / "run") == before
    new.fit("8 steps")
    after = contents(tmp_path / "run")
    assert contents(tmp_path / "run.1") == before and "evaluation.json" in after
    assert first.evaluate().samples == 30 and contents(tmp_path / "run") == after


def test_two_trainers_of_one_folder_keep_their_results(tmp_path: Path) -> None:
    """The second one wrote over the first one's results: at its making there were none."""
    run = tmp_path / "run"
    trainers = [Trainer.of(**described(run, seed=seed)) for seed in (1, 2)]
    trainers[0].fit("1 epoch")
    first = contents(run)
    trainers[1].fit("1 epoch")
    assert contents(tmp_path / "run.1") == first
    trainers[1].fit("2 epochs")  # its own run, which stays
    second = contents(run)
    assert len(losses(run)) == 14 and not (tmp_path / "run.2").exists()
    resumed, new = (Trainer.of(**described(run, seed=2, resume=resume)) for resume in (True, False))
    new.fit("1 step")
    assert contents(tmp_path / "run.2") == second
    assert (
        resumed.fit("3 epochs").step == 21 and len(losses(tmp_path / "run.3")) == 1 and len(losses(run)) == 7
    )


def test_files_from_between_of_and_fit_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were taken for an older run, and the folder of the job's logs may not move."""
    monkeypatch.chdir(tmp_path)
    trainer = Trainer.of(**described(Path("7"), callbacks=[]))
    checkpoints.save(trainer.snapshot(), Path("7/checkpoints"), trainer.mesh)
    monkeypatch.setenv("PADDLE_LOG_DIR", "7/logs")
    trainer.fit("1 step")
    assert [path.name for path in Path("7/checkpoints").iterdir()] == ["step-00000000"]
    monkeypatch.delenv("PADDLE_LOG_DIR")
    Trainer.of(**described(Path("7"))).fit("1 step")
    assert "the earlier run is now 7.1\n" in capsys.readouterr().out and Path("7.1/checkpoints").is_dir()
    trainer.fit("2 steps")  # another one has begun in its folder
    assert len(losses(tmp_path / "7.2")) == 1 and not Path("7/checkpoints").exists()


class FailingLoss(nn.CrossEntropyLoss):
    fails = ""

    def works(self, method: str) -> float:
        return 1 / (method != self.fails)

    def forward(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return super().forward(outputs, targets) * self.works("loss")

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        return {"one": outputs.sum() * self.works("scores")}


def fit_again(folder: str) -> list[str]:
    """What a second `fit` says after an update that failed on all ranks, before or after its backward."""
    untried()
    said = []
    for exchange, fails in (("per_parameter", "scores"), ("pushed", "loss"), ("pushed", "scores")):
        UNFINISHED.clear()
        loss, strategy = FailingLoss(reduction="none"), {"use": "data_parallel", "exchange": exchange}
        run = {"loss": loss, "strategy": strategy, "callbacks": CALLBACKS[:1], "micro_batches": 1}
        trainer = Trainer.of(**described(Path(folder, f"{exchange}-{fails}"), **run))
        trainer.fit("1 step")
        loss.fails = fails
        with pytest.raises(ZeroDivisionError):
            trainer.fit("2 steps")
        loss.fails = ""
        try:
            said.append(f"step {trainer.fit('2 steps').step}")
        except UsageError as error:
            said.append(str(error))
    return said


def test_after_an_update_that_failed_with_gradients_on_their_way_there_is_no_other(tmp_path: Path) -> None:
    """They were added to the next update's, without a word."""
    for wrong, good, wrong_too in run_ranks(fit_again, 2, str(tmp_path)):
        assert wrong.startswith("an update of this process failed after some of its gradients had been sent")
        assert (good, wrong_too) == ("step 2", wrong)


@pytest.mark.parametrize(
    "strategy", ["data_parallel", "async_average", {"use": "replicas", "count": 2}], ids=str
)
def test_gradients_from_before_a_fit_are_not_learned(
    tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an update that failed after its first backward, and of a backward before the trainer, were added to the
    next update's."""
    monkeypatch.setattr(TrainerBuilder, "_tried", lambda self, task: task)
    criterion, calls = nn.CrossEntropyLoss(reduction="none"), iter(range(100))
    fails_at = -1

    def loss(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        if next(calls) == fails_at:
            raise ZeroDivisionError
        return criterion(outputs, targets)

    def learned(folder: str, interrupted: bool) -> list[np.ndarray[Any, Any]]:
        nonlocal calls, fails_at
        given = described(tmp_path / folder, strategy=strategy, loss=loss, test=None, callbacks=[])
        if interrupted:
            given["model"](paddle.ones([2, 6])).sum().backward()
        trainer = Trainer.of(**given)
        calls, fails_at = iter(range(100)), 1 if interrupted else -1  # in the second micro-batch
        if interrupted:
            with pytest.raises(ZeroDivisionError):
                trainer.fit("1 step")
        trainer.fit("2 steps")
        return [parameter.numpy() for parameter in given["model"].parameters()]

    for ours, truth in zip(learned("failed", True), learned("straight", False), strict=True):
        np.testing.assert_array_equal(ours, truth)


def test_a_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run was written into a folder named `~`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Trainer.of(**described(Path("~/runs/own"))).fit("1 epoch")
    for resume in ("auto", True, "~/runs/own"):
        again = Trainer.of(**described(Path("~/runs/own"), resume=resume))
        assert again.progress.step == 7 and again.run.folder == tmp_path / "home/runs/own"
    assert not (tmp_path / "~").exists()


def test_what_is_wrong_with_a_folder_is_said_in_a_scripts_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        UsageError, match=r"Leave resume out to start one, or name the run's folder: folder=…\."
    ):
        Trainer.of(**described(run, resume=True))
    run.mkdir()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"Remove it, or choose another folder with folder=…\."):
        Trainer.of(**described(run))
    (run / "metrics.jsonl").rmdir()
    with (run / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"belongs to a job .* choose another folder with folder=…\."):
            Trainer.of(**described(run))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written .* choose another one with folder=…\."):
        Trainer.of(**described(tmp_path / "file"))


def test_a_scheduler_says_how_often_it_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loops of Paddle's step one after every epoch; here that would swing the rate within an epoch."""
    given = described(tmp_path / "run", batch=8)
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=2)
    given["optimizer"] = paddle.optimizer.SGD(rate, parameters=given["model"].parameters())
    Trainer.of(**given).fit("2 epochs")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "CosineAnnealingDecay" in line]
    assert line == (
        "CosineAnnealingDecay steps after every update, 13 times an epoch: 0.1 at first, 0.05 after an epoch, 0.05 at "
        "the end. If T_max=2 counts epochs, multiply by 13."
    )
    assert rate.last_epoch == 26  # the line was made of a copy


@pytest.mark.parametrize("parts", [1, 3])
def test_a_line_says_that_batch_norm_sees_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: int
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Linear(8, 4))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    Trainer.of(
        **described(tmp_path / "run", model=model, optimizer=optimizer, batch=24, micro_batches=parts)
    ).fit("2 steps")
    assert ("BatchNorm takes the statistics of each of the 3 micro-batches" in capsys.readouterr().err) == (
        parts > 1
    )


def test_a_loader_is_no_data_set(tmp_path: Path) -> None:
    """Its batches would count as samples: 40 of them for 1280."""
    loader = paddle.io.DataLoader(Points(), batch_size=8)
    with pytest.raises(
        UsageError, match=r"Trainer.of.train: a DataLoader makes batches.* its data set \(Points\)"
    ):
        Trainer.of(**described(tmp_path / "run", train=loader))


@pytest.mark.parametrize("reading", ["each", "scatter"])
def test_a_held_out_iterator_is_refused_with_what_helps(tmp_path: Path, reading: str) -> None:
    held_out = iter([(np.zeros(6, "float32"), 0)])
    with pytest.raises(UsageError, match=r"Trainer\.of\.test: .* every evaluation\. Give the function"):
        Trainer.of(**described(tmp_path, test=held_out, reading=reading))


def test_samples_of_a_streams_epoch_are_refused_for_other_data(tmp_path: Path) -> None:
    """An epoch had all samples of the data set, silently."""
    with pytest.raises(UsageError, match=r"loader.samples: 8 would be the samples of a stream's epoch"):
        Trainer.of(**described(tmp_path / "run", loader={"samples": 8}))


@pytest.mark.parametrize(("split", "said"), [("train", "training"), ("test", "held-out")])
def test_samples_that_are_random_without_a_seed_are_named(tmp_path: Path, split: str, said: str) -> None:
    """Held-out ones gave another loss on each number of ranks, silently."""
    draws = np.random.default_rng(0)
    data = Samples(20, lambda i: (draws.normal(size=6).astype("float32"), i % 4))
    trainer = Trainer.of(**{**described(tmp_path / "run"), "test": Points(30), split: data})
    (sentence,) = trainer.learner.known_differences
    assert sentence.startswith(f"sample 0 of the {said} data is another one each time it is read")


class Handed(Points):
    """Has what the data within it has."""

    def __getattr__(self, name: str) -> Any:
        if name == "epoch_order":
            return lambda seed, epoch: range(12)
        raise AttributeError(name)


def test_an_order_that_a_wrapper_hands_out_is_not_used_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer.of(**described(tmp_path / "run", train=Handed(30)))
    assert trainer.loader.sampler.samples == 30
    assert "Handed hands out epoch_order of the data set within it" in capsys.readouterr().err


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    given = described(tmp_path / "run")
    with pytest.warns(UserWarning, match="single-card"):
        given["model"] = paddle.DataParallel(given["model"])
    with pytest.raises(UsageError, match=r"it is wrapped in DataParallel\. Give the model itself"):
        Trainer.of(**given)


def test_an_optimizer_of_something_else_is_refused(tmp_path: Path) -> None:
    centre = paddle.create_parameter([4], "float32")
    given = described(tmp_path / "run")
    given["optimizer"] = paddle.optimizer.SGD(0.1, parameters=[*given["model"].parameters(), centre])
    with pytest.raises(UsageError, match=r"optimizer: .* \[4\] is not one of the model's \(Two\)"):
        Trainer.of(**given)


def test_a_function_that_needs_a_rate_is_refused_without_a_schedule(tmp_path: Path) -> None:
    given = described(tmp_path / "run", schedule=None)
    given["optimizer"] = lambda rate, named: paddle.optimizer.AdamW(rate, parameters=[p for _, p in named])
    with pytest.raises(UsageError, match="the learning rate None, because no schedule is given, and raised"):
        Trainer.of(**given)


def test_a_partial_of_an_optimizer_class_is_the_class_with_settings(tmp_path: Path) -> None:
    given = described(tmp_path / "run", schedule=None)
    given["optimizer"] = partial(paddle.optimizer.AdamW, weight_decay=0.25)
    optimizer = Trainer.of(**given).learner.optimizer
    assert (optimizer.get_lr(), optimizer._weight_decay) == (1e-3, 0.25)


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ((), {"learning_rate": 3e-4}, r"partial\(AdamW, …\) sets learning_rate, .* belongs into the schedule, such as"),
        ((), {"parameters": []}, r"partial\(AdamW, …\) sets parameters, which the training provides\. Give it"),
        ((), {"wieght_decay": 0.1}, r"optimizer AdamW has no setting 'wieght_decay'\. Did you mean 'weight_decay'\?"),
        ((), {"lr": 0.1, "beta1": 0.5}, r"optimizer AdamW has no setting 'lr'\. In a recipe that is schedule"),
        ((3e-4,), {}, r"partial\(AdamW, 0\.0003, …\) has an argument without a name\. .* by name, as in"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_partial_of_an_optimizer_class_is_answered_as_a_recipes(
    tmp_path: Path, arguments: tuple[Any, ...], settings: dict[str, Any], said: str
) -> None:
    given = described(tmp_path / "run", schedule=None)
    given["optimizer"] = partial(paddle.optimizer.AdamW, *arguments, **settings)
    with pytest.raises(UsageError, match=said) as refused:
        Trainer.of(**given)
    assert "pydantic" not in str(refused.value)


def test_a_partial_of_a_function_of_a_rate_and_parameters_stays_one(tmp_path: Path) -> None:
    class Decayed(paddle.optimizer.SGD):
        def __init__(self, decay: float, rate: float, named: Any) -> None:
            super().__init__(rate, parameters=[p for _, p in named], weight_decay=decay)

    class Wrapped(Decayed):  # the names of Paddle's
        def __init__(self, decay: float, learning_rate: float, parameters: Any) -> None:
            super().__init__(decay, learning_rate, parameters)

    for kind in (Decayed, Wrapped):
        given = described(tmp_path / kind.__name__, schedule={"use": "constant", "learning_rate": 0.5})
        given["optimizer"] = partial(kind, 0.25)
        assert Trainer.of(**given).learner.optimizer.get_lr() == 0.5


def test_an_error_in_an_optimizers_function_is_not_blamed_on_the_schedule(tmp_path: Path) -> None:
    given = described(tmp_path / "run", schedule=None)
    given["optimizer"] = lambda rate, named: paddle.optimizer.SGD(0.1, parameters=nmaed)  # noqa: F821
    with pytest.raises(NameError, match="'nmaed' is not defined"):
        Trainer.of(**given)


def test_a_finished_optimizer_does_not_train_an_adapter(tmp_path: Path) -> None:
    """Its parameters are the frozen ones: nothing was learned."""
    given = described(tmp_path / "run", adapter={"use": "lora", "match": ["*.up"]})
    names = [name for name, _ in given["model"].named_parameters()]
    with pytest.raises(UsageError, match="does not have the adapter's parameters: give it by word, class or"):
        Trainer.of(**given)
    assert [name for name, _ in given["model"].named_parameters()] == names, "the model is as it was"
    for optimizer in ("sgd", paddle.optimizer.SGD):
        trainer = Trainer.of(**described(tmp_path / "run", adapter=given["adapter"], optimizer=optimizer))
        trained = dict(trainer.learner.placed.named_trainable)
        before = {name: parameter.numpy() for name, parameter in trained.items()}
        trainer.fit("1 step")
        assert any((parameter.numpy() != before[name]).any() for name, parameter in trained.items())


def test_a_loss_that_would_learn_by_itself_is_refused(tmp_path: Path) -> None:
    loss = nn.BCEWithLogitsLoss(reduction="none")
    loss.scale = loss.create_parameter([1])
    turns = {
        "first": {"match": ["blocks.0.*"], "loss": loss},
        "second": {"match": ["blocks.1.*"], "loss": loss.forward},
    }
    for losses in ({"loss": loss}, {"loss": loss.forward}, {"loss": None, "turns": turns}):
        with pytest.raises(UsageError, match=r"loss: .* \[1\] is not one of the model's \(Two\)"):
            Trainer.of(**described(tmp_path / "run", **{"optimizer": "adamw", **losses}))


scale = nn.Linear(4, 4)  # a global that a loss uses


class Scaled:
    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(self.layers[0](outputs), targets, reduction="none")


def scaled(layer: Any, outputs: Any, targets: Any) -> Any:
    return Scaled([layer])(outputs, targets)


def closure(layer: Any, learns: bool = True) -> Any:
    def loss(outputs: Any, targets: Any) -> Any:
        with paddle.set_grad_enabled(learns):
            shift = layer(outputs)
        return nn.functional.cross_entropy(outputs + shift, targets, reduction="none")

    return loss


class Listed(Two):
    """Keeps a layer in a plain list, where Paddle does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [nn.Linear(4, 4)]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.heads[0](super().forward(x))


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: scaled(scale, o, t),
        closure(nn.Linear(4, 4)),
        partial(scaled, nn.Linear(4, 4)),
        Scaled([nn.Linear(4, 4)]),
        Scaled([nn.Linear(4, 4)]).__call__,
    ],
    ids=["global", "closure", "partial", "object", "method"],
)
def test_a_loss_that_learns_with_a_layer_of_its_own_is_told_once_in_each_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: Any
) -> None:
    """Also in the second training, before which its parameter has a gradient of the first."""
    for number in range(2):
        Trainer.of(**described(tmp_path / f"{number}", optimizer="adamw", loss=loss)).fit("3 steps")
        lines = re.findall("not trained: .*", capsys.readouterr().err)
        assert [line.partition(": this training")[0].partition(" [4, 4] ")[2] for line in lines] == [
            "and 1 more, which the loss or a forward uses, is not one of the model's (Two)"
        ]


def test_a_layer_in_a_plain_list_of_the_model_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer.of(**described(tmp_path / "run", model=Listed(), optimizer="adamw")).fit("1 step")
    assert re.search(r"not one of the model's \(Listed\).*nn\.LayerList for a list", capsys.readouterr().err)


def lines_and_weights(folder: str, strategy: dict[str, Any], layer_rank: int) -> tuple[int, list[Any]]:
    """The lines on the screen and the weights of this rank, with a loss that uses a layer on one rank alone."""
    untried()
    learned = closure(nn.Linear(4, 4))

    def loss(outputs: Any, targets: Any) -> Any:
        plain = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return plain + 0 * learned(outputs, targets) if dist.get_rank() == layer_rank else plain

    with redirect_stderr(StringIO()) as screen:
        trainer = Trainer.of(**described(Path(folder), strategy=strategy, loss=loss))
        trainer.fit("2 steps")
    weights = [p.numpy() for _, p in trainer.learner.placed.named_parameters()]
    return screen.getvalue().count("not trained: parameter"), weights


@pytest.mark.parametrize(
    "strategy", [{"use": "data_parallel"}, LAYOUTS["pipeline"]], ids=["data", "pipeline"]
)
def test_the_first_rank_tells_of_a_layer_that_another_uses(tmp_path: Path, strategy: dict[str, Any]) -> None:
    ranks, silent = (
        run_ranks(lines_and_weights, 2, str(tmp_path / str(rank)), strategy, rank) for rank in (1, 2)
    )
    assert [lines for lines, _ in ranks] == [1, 0] and [lines for lines, _ in silent] == [0, 0]
    assert [weights for _, weights in ranks] == [weights for _, weights in silent]


class HeadAlone(nn.Layer):
    """Returns its head's parameters, as some models for fine-tuning do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(6), nn.Linear(6, 4)
        self.settings = Unusual()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.settings(self.body(x)))

    def parameters(self, include_sublayers: bool = True) -> list[paddle.Tensor]:
        return self.head.parameters(include_sublayers)


class Unusual(nn.Layer):
    """Has `parameters` that are no method."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = [1, 2]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x


class Lazy:
    """Raises where its class is asked for, as a proxy outside of its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a context")


def of_lazy(outputs: Any, targets: Any) -> Any:
    if targets is lazy:  # type: ignore[name-defined]  # noqa: F821
        return None
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_layers_and_globals_of_any_class_are_looked_at_without_an_error_or_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = FunctionType(of_lazy.__code__, {**globals(), "lazy": Lazy()})
    model = HeadAlone()
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    Trainer.of(**described(tmp_path / "run", model=model, optimizer=sgd, loss=loss)).fit("2 steps")
    assert "not trained" not in capsys.readouterr().err


def test_a_loss_may_use_a_layer_that_does_not_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher is frozen, or called without gradients; one that learned before has old gradients."""
    frozen, older = nn.Linear(4, 4), nn.Linear(4, 4)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    older(paddle.ones([1, 4])).sum().backward()
    for loss in (closure(frozen), closure(older, False), closure(nn.Linear(4, 4), False)):
        Trainer.of(**described(tmp_path / "run", optimizer="adamw", loss=loss)).fit("1 step")
    assert "not trained" not in capsys.readouterr().err


def test_an_optimizers_function_that_takes_another_parameter_is_refused(tmp_path: Path) -> None:
    given = described(tmp_path / "run", schedule={"use": "constant", "learning_rate": 0.1})
    listed = [*given["model"].parameters(), paddle.create_parameter([4], "float32")]
    given["optimizer"] = lambda rate, named: paddle.optimizer.SGD(rate, parameters=listed)
    with pytest.raises(UsageError, match=r"optimizer: .* \[4\] is not one of the model's \(Two\)"):
        Trainer.of(**given)


def weights_of_function(folder: str, strategy: dict[str, Any], listed_before: bool) -> list[Any]:
    """The weights of this rank after two updates by an optimizer of parameters listed before the model is cut."""
    untried()
    given = described(Path(folder), strategy=strategy, schedule={"use": "constant", "learning_rate": 0.1})
    listed = given["model"].parameters()
    given["optimizer"] = lambda rate, named: paddle.optimizer.SGD(
        rate, parameters=listed if listed_before else [p for _, p in named]
    )
    trainer = Trainer.of(**given)
    trainer.fit("2 steps")
    return [parameter.numpy() for _, parameter in trainer.learner.placed.named_parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizers_function_may_list_parameters_before_the_model_is_cut(
    tmp_path: Path, layout: str
) -> None:
    folder = str(tmp_path / "run")
    before, named = (
        run_ranks(weights_of_function, 2, folder, LAYOUTS[layout], listed_before)
        for listed_before in (True, False)
    )
    assert before == named


@pytest.mark.parametrize(
    ("strategy", "more", "said"),
    [
        ({"use": "local_sgd"}, {"ema": {"decay": 0.9}}, "ema averages weights that all ranks have"),
        ({"use": "async_average"}, {"ema": {"decay": 0.9}}, "ema averages weights that all ranks have"),
        (
            {"use": "async_average"},
            {"guard": {"non_finite": "skip"}},
            "guard.non_finite lets all ranks judge",
        ),
        ({"use": "local_sgd"}, {"guard": {"recompute": "2 steps"}}, "guard.recompute compares gradients"),
    ],
)
def test_what_a_strategy_refuses_in_a_recipe_it_refuses_in_a_script(
    tmp_path: Path, strategy: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    """It was asked with a recipe that had no guard and no ema: both then did nothing, in silence."""
    with pytest.raises(UsageError, match=said):
        Trainer.of(**described(tmp_path / "run", strategy=strategy, **more))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch": 16.0}, "Trainer.of.batch: 16.0 is not a whole number: write 16"),
        ({"batch": np.float32(16)}, "Trainer.of.batch: 16.0 is not a whole number"),
        ({"micro_batches": "2"}, "Trainer.of.micro_batches: '2' is not a whole number: leave the quotes out"),
        ({"seed": "0"}, "Trainer.of.seed: '0' is not a whole number"),
        ({"drop_last": "keep"}, "Trainer.of.drop_last: 'keep' is not true or false"),
        ({"dropout": "Exact"}, "Trainer.of.dropout: 'Exact' is not one of"),
        ({"length": 3}, "Trainer.of.length: .*has no unit"),
        ({"resume": 1}, "Trainer.of.resume: 1 is not"),
        ({"folder": 5}, "Trainer.of.folder: 5 is not a text"),
        ({"callbacks": "console"}, "Trainer.of.callbacks: 'console' is not a list"),
        (
            {"callbacks": ["console", {"use": "console"}]},
            "Trainer.of.callbacks: console is there twice, and would",
        ),
        ({"cuts": 5}, "Trainer.of.cuts: 5 is not a mapping"),
        ({"batch": 16.0, "seed": "0"}, "batch: 16.0 (.|\n)*seed: '0'"),
    ],
)
def test_a_keyword_is_read_as_a_recipe_reads_it(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Trainer.of(**{**described(tmp_path / "run"), **wrong})
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    trainer = Trainer.of(**described(tmp_path / "run", batch=np.int64(20), seed=np.uint8(1)))
    assert trainer.run.train_loader.batches == 5


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian", "Did you mean 'train'?"),
        ("train_dataset", "Data sets are train and test: train=…."),
        ("val_loader", "Data sets are train and test: test=…."),
        ("epochs", "Here that is length=… (a length with its unit"),
        ("output_dir", "Here that is folder=…."),
        ("criterion", "Here that is loss=…."),
        ("lr", "Here that is schedule={'learning_rate': …}."),
        ("gpus", "paddle-dp train RECIPE --devices 0,1"),
        ("resume_from_checkpoint", "Here that is resume=…."),
        ("eval_batch_size", "Here that is evaluation={'batch': …}"),
        ("max_seq_length", "It takes accept, adapter"),
        ("num_classes", "It takes accept, adapter"),
        ("device", "Here that is join(device=…), before the model is made."),
        ("no_cuda", "Here that is join(device=…)"),
        ("patience", "Of exchanges on CPUs that is join(patience=…), in seconds"),
        ("max_time", "A recipe alone has it: train.max_time."),
        ("compile", "A recipe alone has it: train.compile."),
        ("watch", "A recipe alone has it."),
        ("val_check_interval", "Here that is callbacks=[…, {'use': 'evaluate', 'every': …}]"),
        ("log_freq", "Here that is callbacks=[…, {'use': 'console', 'every': …}]"),
        ("logger", "Here that is callbacks=[…, 'dashboard']"),
        ("topk", "Here that is metrics=[…, {'use': 'top_k', 'k': …}]"),
        ("run_name", "Here that is folder=…."),
        ("loss_fn", "Here that is loss=…."),
    ],
)
def test_an_unknown_argument_is_answered_with_the_one_meant(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"Trainer\.of has no argument '{word}'\. .*{re.escape(said)}"):
        Trainer.of(**{word: 1})


def test_arguments_have_names() -> None:
    with pytest.raises(UsageError, match=r"takes its arguments by name: model=…"):
        Trainer.of(nn.Linear(2, 2))
