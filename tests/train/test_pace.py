"""What a rank says that a share took it: its own time, and not that in which it is held back."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train.callback import Moment, Progress
from paddle_dp.train.ledger import Assignments
from paddle_dp.train.meter import Meter
from paddle_dp.train.rounds import RoundDriver


def said_seconds(held_back: float, computes: float) -> list[float]:
    """Of three shares, in each of which the rank waits for parameters and then computes."""
    said: list[float] = []

    def learn(batch: Any, collect: bool) -> None:
        with heartbeat.waiting("parameters"):
            time.sleep(held_back)
        time.sleep(computes)

    batch = SimpleNamespace(index=0, waited=0.0, micro_batches=[SimpleNamespace(is_dummy=False)])
    rounds: Any = SimpleNamespace(
        _async_rank=SimpleNamespace(train_share=learn),
        _training=SimpleNamespace(
            mesh=SimpleNamespace(all_read=True),
            callbacks=SimpleNamespace(due_at_step=lambda step, last: []),
            progress=SimpleNamespace(step=0),
            total_steps=9,
            early_end=None,
        ),
        _requests=SimpleNamespace(wants=False),
        _come_to=lambda index, work_queue: None,
        _waited=0.0,
        _bad_loss=None,
        _local_sums=[],
        _done_at=0.0,
        _spent=sum(heartbeat.spent().values()),
    )
    work_queue: Any = SimpleNamespace(done=lambda sums, seconds: said.append(seconds))
    for _ in range(3):
        RoundDriver._compute(rounds, batch, work_queue)
    return said


def test_a_rank_that_is_held_back_by_the_staleness_is_not_slow() -> None:
    held, slow = said_seconds(0.06, 0.002), said_seconds(0.0, 0.06)
    assert max(held) < 0.06 <= min(slow)
    ledger = Assignments(0, 6, 2)
    for rank, seconds in (*((1, s) for s in held), *((2, s) for s in slow)):
        ledger.claim(rank)
        ledger.done(rank, (0, 0), None, seconds)
    assert ledger.pace[1] < ledger.pace[2] == pytest.approx(0.06, rel=0.9)


def test_lines_that_are_due_at_once_have_one_speed() -> None:
    """A rank that computes a long share passes several steps in a moment: no line says millions of samples a second."""
    meter = Meter(Mesh())
    rounds: Any = RoundDriver.__new__(RoundDriver)
    rounds._waited, rounds._batch, rounds._known, rounds._local_sums = 0.0, None, {"loss": 1.0}, []
    progress = SimpleNamespace(batch=0, epoch=0)
    loader = SimpleNamespace(sampler=SimpleNamespace(size=lambda number, epoch: 64))
    rounds._training = SimpleNamespace(
        meter=meter, mesh=SimpleNamespace(is_main=False), progress=progress, loader=loader
    )
    lines: list[dict[str, float]] = []

    def passed(work_queue: Any) -> None:
        progress.batch += 1
        if progress.batch % 10 == 0:
            lines.append(rounds._line(progress.batch, 0.1, work_queue, met=False))

    rounds._pass = passed
    meter.began -= 2.0
    rounds._come_to(20, None)
    assert [line["samples_per_second"] for line in lines] == pytest.approx([20 * 64 / 2.0] * 2, rel=0.05)
    meter.began -= 1.0
    rounds._come_to(30, None)
    assert lines[2]["samples_per_second"] == pytest.approx(640, rel=0.05)


def test_callbacks_that_read_are_called_once_their_rank_knows_a_loss() -> None:
    """A second server computes no share, and a worker's first one may be of a later global batch."""
    losses: list[float | None] = []
    main_numbers = {"loss": 2.0}
    training: Any = SimpleNamespace(
        mesh=SimpleNamespace(is_main=False, gather=lambda numbers: [main_numbers, numbers]),
        meter=SimpleNamespace(read=lambda batch: {}),
        progress=Progress(),
        total_steps=9,
        callbacks=SimpleNamespace(due_at_step=lambda step, last: [SimpleNamespace(reads=True)]),
        learner=SimpleNamespace(
            optimizer=SimpleNamespace(get_lr=lambda: 0.1), rate=SimpleNamespace(step=lambda: None)
        ),
        loader=SimpleNamespace(sampler=SimpleNamespace(size=lambda number, epoch: 64)),
        moment=lambda name: Moment(name=name, progress=training.progress, trainer=training),
        call=lambda moment, due: losses.append(moment.numbers.get("loss")),
    )
    rounds = RoundDriver(training, async_rank=None, requests=None, check_every=None)  # type: ignore[arg-type]
    rounds._batch, rounds._local_sums, rounds._speed = None, [], {}
    rounds._pass(None)  # type: ignore[arg-type]
    assert losses == []
    rounds._pass(None, met=True)  # type: ignore[arg-type]
    rounds._local_sums = [{"loss": 12.0, "count": 4, "gradient_norm": 1.0}]
    rounds._pass(None)  # type: ignore[arg-type]
    assert losses == [2.0, 3.0]
    main_numbers = {"loss": 5.0}
    rounds._pass(None, met=True)  # type: ignore[arg-type]
    assert losses == [2.0, 3.0, 5.0]
    rounds._known, main_numbers = {}, {}  # no target has counted so far
    rounds._pass(None, met=True)  # type: ignore[arg-type]
    assert losses == [2.0, 3.0, 5.0, None]
