"""When a sample or its worker fails, it is said which, where and how; and the loader can be used again."""

import os
import signal
import time

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.errors import DataError
from tests.house.batches import rows
from tests.house.datasets import Numbers, Slow
from tests.rank_pool import children

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


class Failing(Numbers):
    """Does `fail` at sample 6; in the order of the data set, batches of 2, that is in batch 3."""

    def __init__(self, fail):
        super().__init__(20)
        self.fail = fail

    def __getitem__(self, index):
        return self.fail() if index == 6 else super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_is_named_when_its_batch_is_due(workers):
    def fail():
        raise OSError("disk on fire")

    got = []
    with Loader(Failing(fail), Sampler(20, 2, shuffle=False), num_workers=workers) as loader:
        with pytest.raises(DataError, match=r"^sample 6 \(6.jpg\): OSError: disk on fire$") as error:
            got.extend(batch.index for batch in loader.read(0))
        assert got == [0, 1, 2]
        assert "in fail" in str(error.value.__cause__) or workers == 0
        assert len(rows(loader, start=4)) == 6  # and the loader can be used again


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_make_no_batch_are_named(workers):
    dataset = Failing(lambda: (np.zeros(3, np.uint8), 0))
    loader = Loader(dataset, Sampler(20, 2, shuffle=False), num_workers=workers)
    with pytest.raises(
        DataError, match=r"sample \d \(\d.jpg\) is .*\[\d\].*(uint8\[3\]|float32\[2\]).*batch"
    ):
        rows(loader)


def test_a_hung_sample_is_noticed_and_named():
    loader = Loader(
        Failing(lambda: time.sleep(3600)), Sampler(20, 2, shuffle=False), num_workers=2, timeout=0.3
    )
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"data worker \d .*sample 6 \(6.jpg\) of epoch 0.*still for 0.3 s"):
        rows(loader)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("fault", "start", "said"),
    [(lambda: time.sleep(3600), 3, "sample 6"), (lambda: os._exit(7), 0, r"sample 6 .*exit status 7")],
    ids=["hangs at its first sample", "leaves"],
)
def test_a_worker_that_gives_no_sample_is_noticed(fault, start, said):
    timeout = {"timeout": 0.3} if start else {}
    loader = Loader(Failing(fault), Sampler(20, 2, shuffle=False), num_workers=2, **timeout)
    with pytest.raises(DataError, match=said):
        rows(loader, start=start)


def test_slow_samples_are_not_taken_for_hung_ones():
    with Loader(Slow(9, 0.25), Sampler(9, 9), num_workers=1, timeout=2.0) as loader:
        assert len(rows(loader)) == 1


def test_a_killed_worker_is_noticed_at_once():
    with Loader(Numbers(4000), Sampler(4000, 4), num_workers=2, timeout=50) as loader:
        reading = loader.read(0)
        next(reading)
        os.kill(children()[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(DataError, match=r"data worker \d .*sample \d+ .*SIGKILL"):
            for _ in reading:
                pass
        assert time.monotonic() - begun < 10


def test_a_server_reads_nothing_and_has_no_worker():
    """It has no share of the data; with workers its first batch was an IndexError."""
    with Loader(Numbers(40), Sampler(40, 4, dp_rank=-1, dp_size=2), num_workers=2) as loader:
        batches = list(loader.read(0))
        assert len(batches) == 10 and not any(batch.micro_batches for batch in batches) and not children()
