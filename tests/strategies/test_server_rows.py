"""Rows of embedding tables between workers and servers: the bits of whole tables, fewer bytes, and refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.errors import UsageError
from tests import parity
from tests.house.training import build_trainer
from tests.parity import assert_same_weights
from tests.ranks import run_ranks

RECIPE = """
model: {{use: tests.strategies.lookups.{model}}}
dataset: {{use: random_tokens, vocab: 200, length: 4, samples: 30, test_samples: 10}}
loss: {{use: cross_entropy}}
optimizer: {optimizer}
schedule: {{use: cosine, learning_rate: 3.0e-2, warmup: 2 steps}}
strategy: {strategy}
train: {{length: 6 steps, batch: 8, micro_batches: 2, seed: 3}}
callbacks: []
"""
ADAMW, MOMENTUM = "{use: adamw, clip: 0.5}", "{use: momentum, clip: 0.5, weight_decay: 0.01}"
Found = dict[str, Any]


def strategy(servers: int, pulls: str) -> str:
    return f"{{use: parameter_server, servers: {servers}, pulls: {pulls}, check_every: 4 steps}}"


def train(folder: str, strategies: list[str], optimizer: str, model: str = "Lookup") -> list[Found]:
    """Trains under each strategy, evaluates after step 3 and at the end, and saves."""
    from paddle_dp import checkpoint
    from paddle_dp.mesh.transport import traffic
    from paddle_dp.train import Callback

    results: list[Found] = []

    class Diary(Callback):
        weights = False

        def step(self, moment: Any) -> None:
            results[-1]["rows"].append([moment.numbers["loss"], moment.numbers["gradient_norm"]])
            marks.append(traffic.sent)

    for number, each in enumerate(strategies):
        recipe = RECIPE.format(model=model, strategy=each, optimizer=optimizer)
        trainer = build_trainer(recipe, f"{folder}/{number}", "ema={decay: 0.9}", seed=3)
        trainer.add(Diary())
        results.append({"rows": []})
        marks: list[float] = []
        trainer.fit("3 steps")
        middle = trainer.evaluate().numbers
        trainer.fit("6 steps")
        last, folder_of_last = trainer.evaluate().numbers, Path(folder) / str(number) / "checkpoints"
        saved = checkpoint.save(trainer.snapshot(), folder_of_last, trainer.mesh)
        sent = min(after - before for before, after in itertools.pairwise(marks))  # of a step without a check
        results[-1] |= {"held_out": [dict(middle), dict(last)], "sent": sent, "saved": str(saved)}
    return results


def both(servers: int) -> list[str]:
    """With whole tables, and by rows."""
    return [strategy(servers, "all"), strategy(servers, "rows")]


def assert_equal(results: list[list[Found]], folder: Path, optimizer: str) -> None:
    """Asserts that each rank has learned the same bits with whole tables and by rows, and what one process learns."""
    (one,) = run_ranks(train, 1, str(folder), ["{use: single}"], optimizer, timeout=300)[0]
    for whole, by_rows in results:
        assert whole["rows"] == by_rows["rows"] and whole["held_out"] == by_rows["held_out"]
        np.testing.assert_allclose(by_rows["rows"], one["rows"], rtol=1e-5)
    expected, saved = (each["saved"] for each in results[0])
    assert_same_weights(saved, expected)
    assert_same_weights(saved, one["saved"], 2e-5)


def train_and_watch(folder: str) -> dict[str, Any]:
    """What the tests below ask of three ranks."""
    return {
        "lookup": train(f"{folder}/lookup", both(1), ADAMW),
        "nearest": train(f"{folder}/nearest", both(1), MOMENTUM, "Nearest"),
        "watched": watch(f"{folder}/watched"),
    }


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_and_watch, 3, str(tmp_path_factory.mktemp("three")), timeout=300)


def test_rows_give_the_bits_of_whole_tables_for_fewer_bytes(tmp_path: Path, three: list[Any]) -> None:
    """AdamW, which moves rows without a gradient; its decay, a clip, unequal shares, micro-batches, averages."""
    results = [rank["lookup"] for rank in three]
    assert_equal(results, tmp_path, ADAMW)
    for whole, by_rows in results:
        assert by_rows["sent"] < 0.6 * whole["sent"]  # one of three tables is whole in both


def test_a_forward_that_reads_the_whole_table_has_fresh_rows(three: list[Any]) -> None:
    for whole, by_rows in (rank["nearest"] for rank in three):
        assert whole["rows"] == by_rows["rows"] and whole["held_out"] == by_rows["held_out"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "servers", "optimizer"), [(3, 1, MOMENTUM), (5, 2, ADAMW), (4, 3, MOMENTUM)]
)
def test_rows_give_the_bits_of_whole_tables_in_other_layouts(
    tmp_path: Path, ranks: int, servers: int, optimizer: str
) -> None:
    results = run_ranks(train, ranks, str(tmp_path / "many"), both(servers), optimizer, timeout=300)
    assert_equal(results, tmp_path / "one", optimizer)


@pytest.mark.long
def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    by_rows = strategy(1, "rows")
    once = run_ranks(parity.train, 3, str(tmp_path / "once"), by_rows, timeout=300)
    run_ranks(parity.train, 3, str(tmp_path / "cut"), by_rows, "4 steps", timeout=300)
    resumed = run_ranks(parity.train, 3, str(tmp_path / "cut"), by_rows, resume=True, timeout=300)
    assert once[0]["rows"][4:] == resumed[0]["rows"]
    assert_same_weights(resumed[0]["saved"], once[0]["saved"])


def watch(folder: str) -> Found:
    """Trains two updates, and looks into this rank's table before and after `wait`."""
    from paddle_dp.train import Callback

    recipe, result = RECIPE.format(model="Plain", strategy=strategy(1, "rows"), optimizer=ADAMW), {}

    class Look(Callback):
        weights = False

        def step(self, moment: Any) -> None:
            learner = moment.trainer.learner
            table = learner.model.token._parameters["weight"]  # `weight` would pull the rows
            result["old"] = int(np.isnan(table.numpy()).all(1).sum())
            learner.weights.wait()
            result["after"] = table.numpy()
            moment.trainer.mesh.wait("all have looked")

    trainer = build_trainer(recipe, folder)
    trainer.add(Look())
    trainer.fit("2 steps")
    return result


def test_old_rows_are_nan_until_they_are_pulled(three: list[Any]) -> None:
    server, *workers = (rank["watched"] for rank in three)
    assert server["old"] == 0 and [worker["old"] for worker in workers] == [200, 200]
    assert all(worker["after"] == server["after"] for worker in workers)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Beside", "'token.weight' has a gradient in rows that its embedding did not read"),
        pytest.param("Kept", "not finite|nan", marks=pytest.mark.long),
    ],
)
def test_another_use_of_a_table_ends_the_training(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(train, 2, str(tmp_path), [strategy(1, "rows")], ADAMW, model)


def recipe_of(model: str, words: list[str] | None = None) -> Any:
    from paddle_dp.recipe import read_recipe

    return read_recipe(Path("configs/gpt_tiny.yaml"), [f"model={model}", *(words or [])])


ROWS = "strategy={use: parameter_server, pulls: rows}"


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        (
            "{use: gpt, tied: true}",
            "cpu",
            r"no nn.Embedding.*token.weight also belongs to another layer.*pulls=all",
        ),
        ("{use: mlp, inputs: 4}", "cpu", r"MLP has no nn.Embedding whose weight.*Set strategy.pulls=all"),
        ("{use: gpt}", "gpu", r"for CPUs: .*train.device=cpu"),
    ],
)
def test_it_is_refused_where_it_cannot_work(model: str, device: str, message: str) -> None:
    recipe = recipe_of(model, [ROWS, "train.device=auto"])
    with pytest.raises(UsageError, match=message):
        recipe.strategy.config.refuse(recipe, 3, device)


def test_it_is_refused_without_waiting_and_taken_with_a_table() -> None:
    with pytest.raises(UsageError, match="pulls to all, or mode to sync"):
        recipe_of("{use: gpt}", ["strategy={use: parameter_server, pulls: rows, mode: async}"])
    recipe = recipe_of("{use: gpt}", [ROWS])
    recipe.strategy.config.refuse(recipe, 3, "cpu")
