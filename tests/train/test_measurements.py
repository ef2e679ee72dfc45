"""Where a step's time goes is told right, and a change gains what was said of it: of runs with one fault each.

What is slow sleeps, so that another program's work on the same cores changes little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.mesh import join, late_ranks, transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.plan.changes import Facts, changes
from paddle_dp.plan.measured import Measured
from paddle_dp.train import Callback, Moment
from tests.ranks import run_ranks

Found = dict[str, Any]
STEPS = 24


class Samples:
    """Of which reading each takes `seconds`."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return np.full(8, index / 2000, "float32"), np.int64(index % 3)


class Slow(nn.Layer):
    """A perceptron whose forward takes `seconds` longer for each sample, on the late rank LATE more."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 3))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        time.sleep((self.seconds + float(os.environ.get("LATE", "0"))) * len(x))
        return self.layers(x)


class Nap(Callback):
    """Takes `seconds`, every so many steps."""

    reads = False

    def __init__(self, seconds: float, every: int):
        self.seconds, self.often = seconds, every

    def due_at_step(self, step: int) -> bool:
        return step % self.often == 0

    def step(self, moment: Moment) -> None:
        time.sleep(self.seconds)


class Watch(Callback):
    """Keeps what was measured, and when each step ended."""

    reads = False

    def __init__(self) -> None:
        self.found: Any = None
        self.ends: list[float] = []

    def step(self, moment: Moment) -> None:
        self.ends.append(time.perf_counter())

    def measured(self, moment: Moment, measured: Any) -> None:
        self.found = measured


@contextmanager
def slow_link(seconds: float) -> Iterator[None]:
    """Within it each message and each all_reduce of more than 4 KiB takes so much longer, on its way between the ranks.

    One parameter of `Slow` is as large.
    """
    arrivals, read = next(iter(late_ranks._arrivals), None), transport.read
    if not seconds or arrivals is None:
        yield
        return
    waiting = arrivals.waiting

    @contextmanager
    def slow_waiting(group: str, members: Any, what: str, *more: Any) -> Iterator[None]:
        with waiting(group, members, what, *more):
            yield
            if what == "all_reduce" and heartbeat._phase == "exchange":
                time.sleep(seconds)

    def slow_read(connection: Any, length: int) -> Any:
        data = read(connection, length)
        time.sleep(seconds if length > 4096 else 0.0)
        return data

    arrivals.waiting, transport.read = slow_waiting, slow_read  # type: ignore[method-assign]
    try:
        yield
    finally:
        arrivals.waiting, transport.read = waiting, read  # type: ignore[method-assign]


def train(
    folder: str,
    reading: float = 0.0,
    computing: float = 0.0,
    slow: float = 0.0,
    calling: float = 0.0,
    every: int = 1,
    batch: int = 8,
    link: float = 0.0,
    strategy: Any = "data_parallel",
    workers: int = 0,
    steps: int = STEPS,
) -> Found:
    """In each rank: trains with these faults, and tells the parts, the changes, and how long a step really takes.

    `slow`: seconds that the last rank takes longer for each sample; `link`: that a step's exchange of gradients takes
    longer. Every tenth step may have a callback's work, so the mean is taken over ten.
    """
    mesh = join()
    watch = Watch()
    os.environ["LATE"] = str(slow if mesh.rank == mesh.ranks - 1 else 0.0)
    paddle.seed(1)
    trainer = Trainer.of(
        model=Slow(computing), loss=nn.CrossEntropyLoss(reduction="none"), optimizer="sgd",
        train=Samples(reading), batch=batch, length=f"{steps} steps", folder=folder,
        strategy=strategy, loader={"num_workers": workers}, callbacks=[Nap(calling, every), watch],
    )  # fmt: skip
    trainer.measurements.is_shown = True
    with slow_link(link):
        trainer.fit()
    assert heartbeat.tape is None
    parts, facts = watch.found.rank_times, watch.found.facts
    return {
        "step": (watch.ends[-1] - watch.ends[-11]) / 10, "parts": [part.as_json() for part in parts],
        "changes": [[one.what, one.seconds] for one in changes(parts, facts)],
        "lines": watch.found.report(),
        "starved": watch.found.starvation(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "measured"),
    [(2, []), (3, [(2, 3)]), (16, [(6, 16)]), (40, [(11, 30)]), (130, [(11, 30), (111, 130)])],
)
def test_so_many_steps_are_measured_and_no_tape_is_left(tmp_path, steps, measured):
    class Found(Callback):
        def measured(self, moment: Moment, measured: Any) -> None:
            found.append((measured.first, measured.last))

    found: list[tuple[int, int]] = []
    Trainer.of(
        model=nn.Linear(8, 3), loss="cross_entropy", optimizer="sgd", train=Samples(0.0),
        batch=2, length=f"{steps} steps", folder=str(tmp_path), callbacks=[Found()],
    ).fit()  # fmt: skip
    assert found == measured and heartbeat.tape is None


@pytest.mark.long
@pytest.mark.processes
def test_a_slow_data_set_is_named_and_the_workers_that_would_do_do(tmp_path):
    before = train(str(tmp_path / "a"), reading=0.010, computing=0.006)
    (row,) = before["parts"]
    assert row["data"] == pytest.approx(0.080, rel=0.25) and row["forward"] == pytest.approx(0.048, rel=0.25)
    what, expected = before["changes"][0]
    assert what == "loader.num_workers=2"
    assert "loader.num_workers=2 would do" in before["starved"]
    assert all(len(line) <= 80 for line in before["lines"])
    after = train(str(tmp_path / "b"), reading=0.010, computing=0.006, workers=2)
    assert after["step"] == pytest.approx(expected, rel=0.2)
    assert not after["starved"]


@pytest.mark.long
@pytest.mark.processes
def test_too_few_workers_are_named_too(tmp_path):
    before = train(str(tmp_path / "a"), reading=0.020, computing=0.006, workers=1)
    what, expected = before["changes"][0]
    assert what == "loader.num_workers=4"
    after = train(str(tmp_path / "b"), reading=0.020, computing=0.006, workers=4)
    assert after["step"] == pytest.approx(expected, rel=0.2)


@pytest.mark.long
def test_a_callback_that_takes_time_is_named(tmp_path):
    before = train(str(tmp_path / "a"), computing=0.006, calling=0.1)
    (row,) = before["parts"]
    assert row["works"]["Nap.step"] == pytest.approx(0.1, rel=0.15)
    what, expected = before["changes"][0]
    assert what.startswith("call Nap.step a tenth as often")
    after = train(str(tmp_path / "b"), computing=0.006, calling=0.1, every=10)
    assert after["step"] == pytest.approx(expected, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["data_parallel", {"use": "hybrid"}, {"use": "hybrid", "sharding": 2, "sharding_stage": 2}]
)
def test_a_slow_rank_is_named_and_what_it_costs(tmp_path, strategy):
    before = run_ranks(train, 2, str(tmp_path / "a"), computing=0.006, slow=0.020, strategy=strategy)[0]
    text = " ".join(line.strip() for line in before["lines"])
    assert "Slowest is rank 1" in text and "Most of that is forward" in text
    fast, slow = before["parts"]
    assert fast["waits_for"] == {"1": pytest.approx(0.080, rel=0.25)}
    assert slow["waiting"] < 0.1 * fast["waiting"]
    expected = next(seconds for what, seconds in before["changes"] if what.startswith("speed up rank 1"))
    after = run_ranks(train, 2, str(tmp_path / "b"), computing=0.006, strategy=strategy)[0]
    assert after["step"] == pytest.approx(expected, rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [{"use": "hybrid"}, {"use": "hybrid", "sharding": 2}])
def test_a_slow_link_is_named_and_a_larger_batch_gains_what_was_said(tmp_path, strategy):
    slow = {"computing": 0.006, "link": 0.1, "strategy": strategy}
    before = run_ranks(train, 2, str(tmp_path / "a"), **slow)[0]
    assert all(part["exchange"] > 0.5 * part["step"] for part in before["parts"])
    expected = next(seconds for what, seconds in before["changes"] if what.startswith("train.batch=16"))
    after = run_ranks(train, 2, str(tmp_path / "b"), **slow, batch=16)[0]
    assert after["step"] / 2 == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("last", "load", "said"),
    [(15, 0.0, "No advice from 5 steps"), (30, 9.0, "No advice: some 9 processes"), (30, 1.0, "")],
)
def test_nothing_is_concluded_from_few_steps_or_a_busy_machine(last: int, load: float, said: str) -> None:
    """Five steps beside another user's job gave "2.98 × as fast"."""
    facts = Facts(batch=8, degrees={}, cores=2, local_ranks=2, load=load)
    assert Measured(first=11, last=last, rank_times=[], facts=facts).doubt().startswith(said)
