"""The schedule that waits for a held-out number: its evaluations, its state in checkpoints, and who is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.house.datasets import Arrays
from tests.house.training import diary, untried
from tests.ranks import run_ranks

PLATEAU = {"use": "plateau", "learning_rate": 0.4, "every": "2 steps", "factor": 0.5, "patience": 0}


def points(seed: int = 0, samples: int = 23) -> Arrays:
    return Arrays(
        np.random.default_rng(seed).standard_normal((23, 5)).astype("float32")[:samples], np.arange(23) % 3
    )


def trainer(folder: str, schedule: Mapping[str, Any], callbacks: Sequence[Any] = (), **more: Any) -> Any:
    import paddle
    from paddle import nn

    from paddle_dp import Trainer
    from paddle_dp.mesh import join

    join(seed=3)
    paddle.seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    settings: dict[str, Any] = {
        "model": model, "train": points(), "test": points(1), "batch": 8, "length": "6 epochs", "seed": 7,
        "loss": {"use": "cross_entropy"}, "optimizer": {"use": "adamw"}, "schedule": schedule, "folder": folder,
        "callbacks": callbacks, **more,
    }  # fmt: skip
    return Trainer.of(**settings)


def trained(
    folder: str, length: str, schedule: Mapping[str, Any], resume: bool, evaluates: str, saves: str
) -> dict[str, Any]:
    """In every rank: the rate of each update, the state of the schedule, the steps of evaluations, the weights."""
    callbacks = [{"use": "checkpoint", "every": saves, "best": "loss"}]
    if evaluates:
        callbacks.append({"use": "evaluate", "every": evaluates})
    training = trainer(folder, schedule, callbacks, resume=resume)
    lines = diary(training)
    training.fit(length)
    state = training.learner.rate.schedule.state_dict()
    weights = [parameter.numpy() for parameter in training.learner.model.parameters()]
    rates, evaluations = [step["lr"] for step in lines.steps], [step for step, _ in lines.evaluations]
    return {"rates": rates, "state": state, "evaluations": evaluations, "weights": weights}


def trained_each(runs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """One training after the other in the same ranks."""
    untried()
    return [trained(*run) for run in runs]


def test_its_state_is_in_every_checkpoint_and_goes_on_on_other_ranks(tmp_path: Path) -> None:
    """Also where a checkpoint comes at the last step of an epoch: before its evaluation, which it does not hold twice.
    (An epoch has 3 steps.)"""
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    each_epoch = {**PLATEAU, "every": "1 epoch"}
    ((alone, _, one, _, again),) = run_ranks(trained_each, 1, [
        (a, "12 steps", PLATEAU, False, "", "3 steps"),
        (b, "6 steps", PLATEAU, False, "", "2 steps"),
        (c, "15 steps", each_epoch, False, "1 epoch", "3 steps"),
        (d, "9 steps", each_epoch, False, "", "3 steps"),
        (d, "15 steps", each_epoch, True, "", "3 steps"),
    ])  # fmt: skip
    assert one["evaluations"] == [3, 6, 9, 12, 15]
    assert one["rates"][9:] == again["rates"] and len(set(one["rates"])) >= 2
    assert one["state"] == again["state"]
    assert alone["evaluations"] == [2, 4, 6, 8, 10, 12]
    assert len(set(alone["rates"])) >= 3 and alone["rates"][:2] == [0.4, 0.4]
    for (rank,) in run_ranks(trained_each, 2, [(b, "12 steps", PLATEAU, True, "5 steps", "2 steps")]):
        assert rank["rates"] == alone["rates"][6:] and rank["evaluations"] == [8, 10, 12]
        assert rank["state"]["share"] == alone["state"]["share"]


class Failing:
    """A metric that fails once `steps` has more than `fails_after` items."""

    names = ("failing",)

    def __init__(self, steps: list[Any], fails_after: float = float("inf")):
        self.steps, self.fails_after = steps, fails_after

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        if len(self.steps) > self.fails_after:
            raise KeyError("no such label")
        return {"sum": outputs.sum()}

    def compute(self, sums: Mapping[str, Any]) -> dict[str, float]:
        return {"failing": float(sums["sum"])}


@pytest.mark.parametrize(("watch", "saved"), [("loss", 6), ("failing", 3)])
def test_a_metric_that_fails_takes_no_score_from_the_schedule(tmp_path: Path, watch: str, saved: int) -> None:
    """The training goes on from its checkpoint with the rates of an undisturbed one. (An epoch has 3 steps.)"""
    from paddle_dp.checkpoint import checkpoints
    from paddle_dp.errors import UsageError

    untried()
    falls = {
        "every": "1 epoch",
        "threshold": 1e3,
        "threshold_mode": "abs",
    }  # after each evaluation but the first
    schedule = {**PLATEAU, **falls, "watch": watch}
    alone = trainer(str(tmp_path / "alone"), schedule, metrics=[Failing([])])
    rates = diary(alone)
    alone.fit()
    metric, folder = Failing([], fails_after=3), tmp_path / "run"
    disturbed = trainer(str(folder), schedule, ["checkpoint"], metrics=[metric])
    metric.steps = diary(disturbed).steps
    with pytest.raises(UsageError, match="Failing failed: KeyError: 'no such label'"):
        disturbed.fit()
    assert max(checkpoints(folder / "checkpoints")).name == f"step-{saved:08}"
    resumed = trainer(str(folder), schedule, ["checkpoint"], metrics=[Failing([])], resume=True)
    lines = diary(resumed)
    resumed.fit()
    assert [step["lr"] for step in lines.steps] == [step["lr"] for step in rates.steps][saved:]
    assert len({step["lr"] for step in rates.steps}) == 5


@pytest.mark.long
def test_it_resumes_bit_by_bit_between_evaluations_and_at_them(tmp_path: Path) -> None:
    """Checkpoints come after the evaluation of their step, also those of the best number."""
    (alone,) = run_ranks(trained, 1, str(tmp_path / "1"), "12 steps", PLATEAU, False, "", "3 steps")
    two = run_ranks(trained, 2, str(tmp_path / "2"), "12 steps", PLATEAU, False, "5 steps", "3 steps")[0]
    assert two["rates"] == alone["rates"] and two["evaluations"] == [2, 4, 5, 6, 8, 10, 12]
    for stop, ranks in ((6, 2), (7, 2), (8, 3)):
        again = str(tmp_path / f"again{stop}")
        begun = run_ranks(trained, 2, again, f"{stop} steps", PLATEAU, False, "", "2 steps")[0]
        resumed = run_ranks(trained, ranks, again, "12 steps", PLATEAU, True, "", "2 steps")
        assert begun["rates"] + resumed[0]["rates"] == two["rates"], stop
        assert all(rank["state"]["share"] == two["state"]["share"] for rank in resumed)
        if ranks == 2:
            assert (resumed[0]["state"], resumed[0]["weights"]) == (two["state"], two["weights"])


@pytest.mark.parametrize(
    ("schedule", "more", "sentence"),
    [
        ({}, {"test": None}, r"plateau waits for a number of held-out samples, and there are none"),
        ({"watch": "acc"}, {}, r"^schedule\.watch: evaluations .* no number 'acc'\. Did you mean 'acc1'\?"),
        ({"watch": "ema_loss"}, {}, r"^schedule\.watch: evaluations of this model have no number 'ema_loss'"),
    ],
)
def test_it_is_refused_where_no_evaluation_has_its_number(
    tmp_path: Path, schedule: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    from paddle_dp.errors import UsageError

    with pytest.raises(UsageError, match=sentence):
        trainer(str(tmp_path / "run"), {**PLATEAU, **schedule}, **more).fit()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_other_held_out_samples_are_another_training(tmp_path: Path) -> None:
    from paddle_dp.errors import UsageError

    for schedule, refused in ((PLATEAU, True), ({"use": "constant", "learning_rate": 0.1}, False)):
        folder = str(tmp_path / schedule["use"])
        trainer(folder, schedule, ["checkpoint"]).fit("2 steps")
        if refused:
            with pytest.raises(UsageError, match="samples in the held-out data was 23 and is 20"):
                trainer(folder, schedule, ["checkpoint"], test=points(1, 20), resume=True)
            with pytest.raises(UsageError, match=r"evaluation\.samples was null and is 20\."):
                trainer(folder, schedule, ["checkpoint"], evaluation={"samples": 20, "batch": 4}, resume=True)
            trainer(folder, schedule, ["checkpoint"], evaluation={"batch": 4}, resume=True)
        else:
            trainer(folder, schedule, ["checkpoint"], test=points(1, 20), resume=True)
