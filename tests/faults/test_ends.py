"""However the supervisor itself is ended, its ranks end with it."""

from __future__ import annotations

import signal
import time

import pytest

from paddle_dp.launch.processes import alive
from tests.eventually import eventually


def test_ranks_die_with_a_supervisor_that_is_killed(launch):
    job = launch("work_for_ever")
    pids = job.rank_pids(2)
    assert all(alive(pid) for pid in pids) and len(job.left()) >= 4  # supervisor, launcher, two ranks
    job.process.send_signal(signal.SIGKILL)
    assert job.gone_within(10.0)


def test_ranks_put_their_work_away_when_the_supervisor_is_told_to_end(fork):
    job = fork("put_work_away")
    job.rank_pids(2)
    job.process.send_signal(signal.SIGHUP)
    status, said, complained = job.finish()
    assert len(said.strip().splitlines()) == 1  # the headline; not what Paddle says of its own SIGTERM
    assert (status, complained) == (129, "ended by SIGHUP: no process is left.\n") and not job.left()
    assert {path.name for path in job.pids.glob("*.away")} == {"0.away", "1.away"}


@pytest.mark.long
def test_ranks_that_will_not_listen_are_ended_all_the_same(fork):
    job = fork("will_not_end")
    job.rank_pids(2)
    begun = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143 and not job.left()
    assert 4 < time.monotonic() - begun < 10  # they were given their time


@pytest.mark.parametrize("pause", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_second_interrupt_means_now(fork, pause):
    """Also where it comes while the supervisor is still sending the ranks their signal."""
    job = fork("will_not_end", env={"GRACE": "300", "PAUSE_AFTER_SEND": pause})
    job.rank_pids(2)
    job.process.send_signal(signal.SIGINT)
    eventually(
        lambda: list(job.pids.glob("*.told")), 60
    )  # two that come before the first is seen would be one
    job.process.send_signal(signal.SIGINT)
    status, _, complained = job.finish()
    assert (status, complained) == (130, "ended by SIGINT: no process is left.\n") and not job.left()


def test_a_job_can_be_ended_before_its_ranks_have_come(launch):
    job = launch("work_for_ever")
    while not (job.out / "logs" / "attempt-001" / "launcher.log").exists():
        time.sleep(0.01)
    job.process.send_signal(signal.SIGTERM)
    status, _, complained = job.finish()
    assert (status, complained) == (143, "ended by SIGTERM: no process is left.\n") and not job.left()


def test_one_rank_is_interrupted_in_this_process(fork):
    job = fork("wait_alone", ranks=1)
    job.rank_pids(1)
    job.process.send_signal(signal.SIGINT)
    status, _, complained = job.finish()
    assert (status, complained) == (130, "interrupted.\n")
