"""A processor that computes wrong is found and named; looking for it changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_dp.checkpoint import load, newest
from paddle_dp.errors import ProcessorError, UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.recipe import Guard
from paddle_dp.train import Callback
from paddle_dp.train.processors import ProcessorFault, groups, judge
from paddle_dp.units import Every
from tests.house.recipes import small_recipe
from tests.house.runs import saved_bits
from tests.house.training import build_trainer
from tests.ranks import run_ranks
from tests.train.test_guard import trainer

GOOD, BAD, WORSE = {"a": [1, 2], "b": [3, 4]}, {"a": [1, 2], "b": [9, 4]}, {"a": [5, 2], "b": [9, 4]}
FOUR = Degrees(data=4)


def test_most_data_ranks_are_right():
    assert judge([GOOD, GOOD, BAD, GOOD], [GOOD, GOOD, BAD, GOOD], FOUR) == ProcessorFault(
        (2,), ("b",), True, True
    )
    assert judge([BAD, GOOD, GOOD, WORSE], [BAD, GOOD, GOOD, WORSE], FOUR) == ProcessorFault(
        (0, 1, 2, 3), ("b", "a"), False, True
    ), "two of four are no majority"


def test_of_two_neither_is_known_to_be_right_unless_it_differs_from_itself():
    two = Degrees(data=2)
    assert judge([GOOD, BAD], [GOOD, BAD], two) == ProcessorFault((0, 1), ("b",), False, True)
    assert judge([GOOD, BAD], [GOOD, GOOD], two) == ProcessorFault((1,), ("b",), True, False)
    assert judge([GOOD], [WORSE], Degrees()) == ProcessorFault((0,), ("a", "b"), True, False)


def test_where_many_differ_from_themselves_nothing_is_told():
    assert judge([GOOD, BAD], [BAD, GOOD], Degrees(data=2)) is None
    assert judge([GOOD, BAD, GOOD], [BAD, GOOD, GOOD], Degrees(data=3)) is None


def test_ranks_are_compared_with_those_that_hold_the_same_slices():
    axes = Degrees(data=3, tensor=2)
    assert groups(axes) == [[0, 2, 4], [1, 3, 5]]
    assert groups(Degrees(sharding=2, pipeline=2)) == [[0, 1], [2, 3]]
    half = {"a": [7, 7]}
    rows = [GOOD, half, BAD, {"a": [8, 8]}, GOOD, half]
    assert judge(rows, rows, axes) == ProcessorFault((2, 3), ("b", "a"), True, True), "both of a data rank's"


def test_a_number_of_steps_is_asked_for(tmp_path):
    with pytest.raises(UsageError, match=r"recompute: '2 epochs' is not a quantity .*units: step, steps"):
        trainer(tmp_path, guard={"recompute": "2 epochs"})
    with pytest.raises(ValueError, match="recompute: '2 epochs' is not a number of steps"):
        Guard(recompute=Every.parse("2 epochs"))  # type: ignore[arg-type]  # which nobody has parsed


def test_masks_must_be_the_same_on_all_ranks(tmp_path):
    with pytest.raises(UsageError, match=r"train\.dropout=exact"):
        trainer(tmp_path, guard={"recompute": "every 2 steps"}, dropout="own")


class Flip(Callback):
    """From update `first` on, those of a layer whose number is in `calls` (None: all) have one wrong bit."""

    reads = False

    def __init__(self, first: int, calls: Any = None):
        self.first, self.calls, self.seen, self.steps = first, calls, 0, 0

    def start(self, moment: Any) -> None:
        layers = [
            layer for layer in moment.trainer.learner.model.sublayers() if type(layer).__name__ == "Linear"
        ]
        layers[0].register_forward_post_hook(self._flipped)

    def step(self, moment: Any) -> None:
        self.steps = moment.progress.step

    def _flipped(self, layer: Any, inputs: Any, output: Any) -> Any:
        if self.steps < self.first:
            return None
        self.seen += 1
        if self.calls is not None and self.seen - 1 not in self.calls:
            return None
        mask = paddle.zeros_like(output)
        mask.reshape_([-1])[0] = 1.0
        return output * (1 + mask.reshape(output.shape) * 2.0**-16)


def test_one_process_finds_what_is_wrong_now_and_then(tmp_path):
    """The check after step 4 computes two forwards."""
    with pytest.raises(
        ProcessorError, match=r"after step 4: rank 0 \(.*\) computed something else at the second time"
    ):
        trainer(tmp_path, (), guard={"recompute": "every 4 steps"}, callbacks=[Flip(4, [1])]).fit()
    trainer(
        tmp_path, (), guard={"recompute": "every 4 steps"}, callbacks=[Flip(4)]
    ).fit()  # always wrong alike


def held(run: Path) -> dict[str, bytes]:
    generators = load(newest(run / "checkpoints")).rank_state(0)
    return saved_bits(run) | {"rng": str(generators).encode()}


def test_looking_changes_nothing(tmp_path):
    for name, guard in (("with", {"recompute": "every 1 step"}), ("without", {})):
        trainer(tmp_path / name, (), guard=guard).fit()
    assert held(tmp_path / "with") == held(tmp_path / "without")


VIT = "{use: vit, image: 8, patch: 4, channels: 1, width: 16, depth: 2, heads: 2, classes: 4, dropout: 0.1}"
CONVNET = "{use: convnet, classes: 4, norm: batch, dropout: 0.2}"


def train(folder: str, strategy: str, model: str, guard: str, wrong: int = -1, calls: Any = None) -> str:
    """In every rank: trains. The error, if it is a ProcessorError; rank `wrong` turns a bit over from update 3 on."""
    recipe = small_recipe(
        "length: 8 steps, batch: 8, micro_batches: 2, seed: 3", model=model, strategy=strategy,
        dataset="tests.train.poisoned.Dataset", optimizer="adamw, clip: 0.5",
        schedule="cosine, learning_rate: 3.0e-3, warmup: 3 steps",
        callbacks="[{use: metrics, every: 1 step}, {use: checkpoint, every: 4 steps}]",
    )  # fmt: skip
    made = build_trainer(recipe, folder, *filter(None, [guard]))
    made.add(Flip(3 if made.mesh.rank == wrong else 99, calls))
    try:
        made.fit()
    except ProcessorError as error:
        return str(error)
    return ""


def both(folder: str, strategy: str, model: str) -> None:
    """In every rank: trains with a look after each step, and without."""
    for name, guard in (("with", "guard.recompute=every 1 step"), ("without", "")):
        assert train(f"{folder}/{name}", strategy, model, guard) == ""


LAYOUTS = {
    "{use: data_parallel}": 2,
    "{use: data_parallel, recompute: full}": 2,
    "{use: hybrid, tensor: 2}": 2,
    "{use: hybrid, pipeline: 2}": 2,
    "{use: hybrid, pipeline: 2, data: 2}": 4,
    "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved, virtual_stages: 2}": 2,
    "{use: hybrid, sharding: 3, sharding_stage: 2}": 3,
    "{use: hybrid, sharding: 3, sharding_stage: 3}": 3,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        *((strategy, ranks, VIT) for strategy, ranks in LAYOUTS.items()),
        ("{use: data_parallel, sync_batch_norm: true}", 3, CONVNET),
        ("{use: data_parallel, sync_batch_norm: false}", 2, CONVNET),
    ],
)
def test_looking_changes_nothing_in_any_layout(tmp_path, strategy, ranks, model):
    run_ranks(both, ranks, str(tmp_path), strategy, model, timeout=240)
    assert held(tmp_path / "with") == held(tmp_path / "without")


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["{use: data_parallel}", "{use: hybrid, sharding: 3, sharding_stage: 2}"]
)
def test_a_rank_that_computes_wrong_is_outvoted(tmp_path, strategy):
    said = run_ranks(train, 3, str(tmp_path), strategy, VIT, "guard.recompute=every 2 steps", 1, timeout=240)
    assert len(set(said)) == 1
    assert re.match(r"after step 4: rank 1 \(.*\) computed other bits than the other data ranks", said[0]), (
        said[0]
    )


@pytest.mark.long
def test_of_two_ranks_one_that_is_wrong_once_is_named_and_one_that_always_is_is_one_of_two(tmp_path):
    guard = "guard.recompute=every 4 steps"
    once, always = (
        run_ranks(train, 2, str(tmp_path / name), "{use: data_parallel}", VIT, guard, 1, calls)
        for name, calls in (("once", [2]), ("always", None))
    )
    assert re.match(r"after step 4: rank 1 \(.*\) computed something else at the second time", once[0]), once
    assert re.match(r"after step 4: of ranks 0 \(.*\), 1 \(.*\) some compute wrong", always[0]), always
