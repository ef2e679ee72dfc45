"""How a side ends, with which samples, and what is said of a float64 run that fails on all ranks, or on some."""

from pathlib import Path
from threading import Thread

import pytest

from paddle_dp.errors import EndedError, JobError
from paddle_dp.launch.command import Job
from paddle_dp.proof.samples import short
from paddle_dp.proof.sides import SideRunner, common_failure, partial_failure


def test_what_fails_on_all_ranks_is_a_sentence_on_each(tmp_path):
    said = {}

    def rank(number):
        line = ("", "net.py, line 3")[number]
        said[number] = common_failure(TypeError(f"of {number}."), tmp_path, number, 2, line=line, wait=10.0)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {0: "TypeError: of 0", 1: "TypeError: of 1 (net.py, line 3)"}


def test_what_fails_on_one_stage_ends_its_job_with_the_cause_and_is_told_of(tmp_path):
    assert partial_failure(tmp_path / "none") is None
    with pytest.raises(TypeError, match="no float64 kernel"):
        common_failure(TypeError("no float64 kernel"), tmp_path, 3, 4, wait=0.1)
    assert partial_failure(tmp_path) == "TypeError: no float64 kernel (on rank 3 only)"


@pytest.mark.parametrize(
    ("status", "error", "exit_status", "said"),
    [
        (143, EndedError, 143, "ended by SIGTERM"),
        (130, EndedError, 130, "ended by SIGINT"),
        (1, JobError, 4, "see above"),
        (137, JobError, 4, "too little memory"),
        (-9, JobError, 4, "too little memory"),
        (2, JobError, 2, "nothing was compared"),
    ],
)
def test_a_side_that_was_ended_says_by_what(tmp_path, status, error, exit_status, said):
    """137 is a rank that somebody killed, or the machine for want of memory: the next layout may well run."""
    runner = SideRunner(Path("configs/gpt_tiny.yaml"), (), 1, 2, tmp_path)
    with pytest.raises(error, match=said) as caught:
        runner._side(status, Job(recipe=tmp_path, ranks=2))
    assert type(caught.value) is error and caught.value.exit_status == exit_status


@pytest.mark.parametrize(("batch", "ranks"), [(50, 2), (50, 3), (64, 4), (8, 8), (2, 3)])
def test_the_short_batch_cannot_be_shared_equally(batch, ranks):
    size = short(batch, ranks)
    assert 0 < size < batch
    assert size % ranks
