"""Requests to stop: how ranks agree on the step, and how rarely they ask."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

import pytest

from paddle_dp.errors import JobError, StoppedError
from paddle_dp.launch.failures import Failure
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.heartbeat import STARTED, StatusTable, heartbeat, join_board
from paddle_dp.train.callback import Callback
from paddle_dp.train.stopping import EVERY, MAX_STEPS_BETWEEN, StopRequests
from paddle_dp.units import Every
from tests.assembly.test_trainer import trainer
from tests.ranks import run_ranks


class Pair:
    """Two ranks' requests, driven one after the other; each step's sum is over what both brought."""

    def __init__(self, seconds_per_step: float, max_time: float | None = None):
        self.now, self.pace = 0.0, seconds_per_step
        self.ranks = [StopRequests(_OfTwo(rank, self), max_time, lambda: self.now) for rank in range(2)]
        self.brought: list[list[float]] = []
        self.exchanges = 0

    def step(self, step: int) -> list[str | None]:
        """What `due` answers on both ranks. A first pass collects what each brings, the second hands out the sum."""
        self.now += self.pace
        before = [(r._meets, r._met) for r in self.ranks]
        self.brought, self.total = [], None
        for rank in self.ranks:
            rank.due(step)
        if self.brought:
            assert len(self.brought) == 2, "one rank meets, and the other does not come"
            self.exchanges += 1
            self.total = [sum(column) for column in zip(*self.brought, strict=True)]
            for rank, (meets, met) in zip(self.ranks, before, strict=True):
                rank._meets, rank._met = meets, met
            return [rank.due(step) for rank in self.ranks]
        return [None, None]


def interrupted_at_the_store() -> int:
    """Rank 0 gets a SIGTERM while it waits at Paddle's store for rank 1; what each has been asked."""
    mesh = join()
    with StopRequests(mesh) as requests:
        mesh.wait("begin")
        if mesh.rank == 0:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            mesh._store.get("late")
        else:
            time.sleep(0.8)
            mesh._store.set("late", "here")
        mesh.wait("end")
        return requests.signal_number


@pytest.mark.long
def test_a_signal_does_not_end_a_wait_at_paddles_store():
    assert run_ranks(interrupted_at_the_store, 2) == [signal.SIGTERM, 0]


class _OfTwo(Mesh):
    def __init__(self, rank: int, pair: Pair):
        super().__init__(rank=rank, ranks=2)
        object.__setattr__(self, "pair", pair)

    def sum(self, values):
        if self.pair.total is None:
            self.pair.brought.append(list(values))
            return list(values)
        return self.pair.total


@pytest.mark.parametrize(
    ("pace", "expected"), [(0.001, 10_000 / MAX_STEPS_BETWEEN), (0.1, 100 / 20), (10.0, 100)]
)
def test_ranks_meet_every_two_seconds_and_not_at_every_step(pace, expected):
    pair = Pair(pace)
    for step in range(1, 101 if pace > 0.01 else 10_001):
        assert pair.step(step) == [None, None]
    assert pair.exchanges <= expected + 2 + math.log2(
        MAX_STEPS_BETWEEN
    )  # the gaps double until they are two seconds


def test_quick_updates_at_the_beginning_do_not_put_the_next_meeting_far_behind_slow_ones():
    pair = Pair(0.001)
    assert [pair.step(step) for step in range(1, 9)] == [[None, None]] * 8
    pair.pace = 5.0  # each update is followed by an evaluation and a checkpoint from now on
    pair.ranks[1].signal_number = signal.SIGTERM
    answers = [pair.step(step) for step in range(9, 25)]
    assert ["SIGTERM", "SIGTERM"] in answers[:8]


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_is_asked_both_stop_after_the_same_update_and_soon(who):
    pair = Pair(0.1)
    answers = []
    for step in range(1, 200):
        if step == 100:
            pair.ranks[who].signal_number = signal.SIGUSR1
        answers.append(pair.step(step))
        if answers[-1] != [None, None]:
            break
    assert answers[-1] == ["SIGUSR1", "SIGUSR1"] and 100 <= len(answers) <= 100 + 2 * EVERY / 0.1


def test_the_main_ranks_clock_decides_for_all():
    began = heartbeat.born
    try:
        heartbeat.born = 0.0
        pair = Pair(0.1, max_time=5.0)
        pair.ranks[1]._clock = lambda: 1e9  # another machine's clock says something else
        step, answer = 0, [None, None]
        while answer == [None, None]:
            step += 1
            answer = pair.step(step)
        assert answer == ["train.max_time (5 s)"] * 2 and 5.0 <= pair.now <= 5.0 + 2 * EVERY
        pair = Pair(0.1, max_time=5.0)
        answer = [None, None]
        pair.ranks[0].start, pair.ranks[1].start = 4.0, 4.5
        while answer == [None, None]:
            step += 1
            answer = pair.step(step)
        assert answer == ["train.max_time (5 s; the updates began after 4.0 s)"] * 2
    finally:
        heartbeat.born = began


@pytest.fixture
def heard():
    """SIGINT as it is in the foreground: a shell's background ignores it from the beginning, which is respected."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_a_signal_is_a_request_and_the_handlers_are_given_back(capfd):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with StopRequests(Mesh.alone()) as requests:
        assert heartbeat.can_stop and requests.due(1) is None and not heartbeat.will_stop
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.due(2) == "SIGUSR1" and heartbeat.will_stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (
        not heartbeat.can_stop and heartbeat.will_stop and {n: signal.getsignal(n) for n in before} == before
    )
    assert "SIGUSR1: stopping after this update" in capfd.readouterr().err


class AskedTwice(Callback):
    """A scheduler sends its request once more while the training that has stopped is reported."""

    every = Every.parse("1 step")

    def step(self, moment):
        signal.raise_signal(signal.SIGTERM)

    def failed(self, moment, error):
        signal.raise_signal(signal.SIGTERM)


def test_a_request_that_is_repeated_while_a_stopped_training_closes_does_not_end_it(capfd):
    """It ended the process with 143 in place of 75."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with pytest.raises(StoppedError):
            trainer(AskedTwice()).fit("2 epochs")
        assert not came and capfd.readouterr().err.count("SIGTERM: stopping") == 1
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_keyboard_interrupt_that_is_no_signal_is_an_error_with_its_place():
    """A callback that raised it to end the training was told as a Ctrl-C of the user's, with status 130."""
    before = signal.getsignal(signal.SIGTERM)
    place = r"test_stopping.py:\d+ ended this rank .* moment.trainer.stop\(reason\)"

    def interrupt(number: int) -> None:
        if number:
            signal.raise_signal(number)
        raise KeyboardInterrupt

    for number in (0, signal.SIGTERM):  # a SIGTERM is a request, which interrupts nothing
        with pytest.raises(JobError, match=place), StopRequests(Mesh.alone()):
            interrupt(number)
    assert signal.getsignal(signal.SIGTERM) == before and not heartbeat.can_stop


class Fine(Callback):
    def end(self, moment):
        pass


class Impatient(Callback):
    def end(self, moment):
        raise KeyboardInterrupt


class Interrupted(Callback):
    reads = True

    def end(self, moment):
        signal.raise_signal(signal.SIGINT)


def test_a_keyboard_interrupt_of_a_callback_s_end_is_an_error_of_a_training_that_is_done():
    """It ended the job with 130 and "interrupted.", as if the user had ended a training in its midst."""
    one = trainer(Fine(), Impatient(), Interrupted())
    said = (
        r"raise KeyboardInterrupt at .*test_stopping.py:\d+: no signal has interrupted it. All updates are made, up to "
        r"step 6; the output of Fine is whole, and Impatient, Interrupted did not end."
    )
    with pytest.raises(JobError, match=said):
        one.fit("2 epochs")
    assert one.progress.step == 6


@pytest.mark.usefixtures("heard")
def test_a_ctrl_c_at_the_end_says_that_all_updates_are_made():
    one, before = trainer(Fine(), Interrupted()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        one.fit("2 epochs")
    failure = Failure.from_error(caught.value, 0)
    assert (failure.exit_status, failure.message) == (
        130,
        "interrupted at the end. All updates are made, up to step 6; the output of Fine is whole, and Interrupted did "
        "not end.",
    )
    assert signal.getsignal(signal.SIGINT) == before


def test_max_time_counts_from_the_jobs_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    began = heartbeat.born
    board = StatusTable(1)
    for name, value in {**board.variables, STARTED: "123.5", "PADDLE_RANK_IN_NODE": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        join_board()
        assert heartbeat.born == 123.5
    finally:
        heartbeat.born = began
        heartbeat.detach()
        board.close()
