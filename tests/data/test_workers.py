"""Workers change the speed and nothing else; and when one fails, it is said which, where and how."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from paddle_dp.data import Loader, Share
from paddle_dp.errors import DataError

pytestmark = pytest.mark.timeout(60)


class Noisy:
    """Sample i is noise of both generators, and i."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return np.float32([random.random(), np.random.random()]), index

    def name_of(self, index):
        return f"{index}.jpg"


class InMemory(Noisy):
    def __getitem__(self, index):
        return np.full(3, index, np.uint8), 2 * index

    def take(self, indices):
        return np.repeat(indices.astype(np.uint8)[:, None], 3, axis=1), 2 * indices


class Failing(Noisy):
    """Does `fail` at sample 6; in the order of the data set, batches of 2, that is in batch 3."""

    def __init__(self, fail):
        super().__init__(20)
        self.fail = fail

    def __getitem__(self, index):
        return self.fail() if index == 6 else super().__getitem__(index)


def rows(loader, epoch=0, start=0):
    return [
        (batch.index, [(m.inputs.tolist(), m.targets.tolist(), m.samples) for m in batch.micros])
        for batch in loader.read(epoch, start)
    ]


def children():
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    descriptors = psutil.Process().num_fds()
    yield
    assert children() == []
    assert psutil.Process().num_fds() == descriptors


@pytest.mark.parametrize("dataset", [Noisy(23), InMemory(23)], ids=["one by one", "take"])
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (3, 5)])
def test_they_give_what_one_process_gives(dataset, workers, prefetch):
    for readers, micros in ((1, 1), (2, 2), (7, 1)):
        share = Share(23, 5, seed=4, readers=readers, reader=readers - 1, micros=micros)
        here = Loader(dataset, share)
        with Loader(dataset, share, workers=workers, prefetch=prefetch) as loader:
            for epoch, start in ((0, 0), (1, 3), (2, 5)):
                assert rows(loader, epoch, start) == rows(here, epoch, start)


def test_they_live_from_epoch_to_epoch():
    with Loader(Noisy(20), Share(20, 4), workers=2) as loader:
        assert children() == []
        rows(loader)
        first = {child.pid for child in children()}
        rows(loader, epoch=1)
        assert {child.pid for child in children()} == first and len(first) == 2


def test_a_reading_that_is_left_or_overtaken_ends_cleanly():
    with Loader(Noisy(40), Share(40, 4), workers=2) as loader:
        expected = rows(loader, epoch=1)
        left = loader.read(0)
        next(left)
        assert rows(loader, epoch=1) == expected
        with pytest.raises(RuntimeError, match="a newer one"):
            next(left)
        for _ in loader.read(0):
            break
        assert rows(loader, epoch=1) == expected


def test_they_read_ahead_and_no_further_than_asked(tmp_path):
    class Marking(Noisy):
        def __getitem__(self, index):
            (tmp_path / str(index)).touch()
            return super().__getitem__(index)

    share = Share(40, 4, shuffle=False)
    with Loader(Marking(40), share, workers=2, prefetch=3) as loader:
        reading = loader.read(0)
        next(reading)
        _until(lambda: len(list(tmp_path.iterdir())) == 16)  # the batch in hand, and three ahead of it
        time.sleep(0.1)
        assert {int(path.name) for path in tmp_path.iterdir()} == set(range(16))
        reading.close()


def test_reading_goes_on_while_training_does():
    class Slow(Noisy):
        def __getitem__(self, index):
            time.sleep(0.03)
            return super().__getitem__(index)

    with Loader(Slow(12), Share(12, 1), workers=1, prefetch=2) as loader:
        reading = loader.read(0)
        next(reading)
        waits = []
        for batch in itertools.islice(reading, 8):
            waits.append(batch.waited)
            time.sleep(0.06)
        reading.close()
    assert sorted(waits)[4] < 0.025  # a sample takes 0.03 s


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_is_named_when_its_batch_is_due(workers):
    def fail():
        raise OSError("disk on fire")

    got = []
    with Loader(Failing(fail), Share(20, 2, shuffle=False), workers=workers) as loader:
        with pytest.raises(DataError, match=r"^sample 6 \(6.jpg\): OSError: disk on fire$") as error:
            got.extend(batch.index for batch in loader.read(0))
        assert got == [0, 1, 2]
        assert "in fail" in str(error.value.__cause__) or workers == 0
        assert len(rows(loader, start=4)) == 6  # and the loader can be used again


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_make_no_batch_are_named(workers):
    dataset = Failing(lambda: (np.zeros(3, np.uint8), 0))
    loader = Loader(dataset, Share(20, 2, shuffle=False), workers=workers)
    with pytest.raises(
        DataError, match=r"sample \d \(\d.jpg\) is .*\[\d\].*(uint8\[3\]|float32\[2\]).*batch"
    ):
        rows(loader)


def test_a_hung_sample_is_noticed_and_named():
    loader = Loader(Failing(lambda: time.sleep(3600)), Share(20, 2, shuffle=False), workers=2, timeout=0.3)
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"data worker \d .*sample 6 \(6.jpg\) of epoch 0.*still for 0.3 s"):
        rows(loader)
    assert time.monotonic() - begun < 5


def test_a_first_sample_that_hangs_is_noticed_too():
    loader = Loader(Failing(lambda: time.sleep(3600)), Share(20, 2, shuffle=False), workers=2, timeout=0.3)
    with pytest.raises(DataError, match="sample 6"):
        rows(loader, start=3)


def test_slow_samples_are_not_taken_for_hung_ones():
    class Slow(Noisy):
        def __getitem__(self, index):
            time.sleep(0.1)
            return super().__getitem__(index)

    with Loader(Slow(10), Share(10, 10), workers=1, timeout=0.4) as loader:
        assert len(rows(loader)) == 1


def test_a_killed_worker_is_noticed_at_once():
    with Loader(Noisy(4000), Share(4000, 4), workers=2, timeout=50) as loader:
        reading = loader.read(0)
        next(reading)
        os.kill(children()[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(DataError, match=r"data worker \d .*sample \d+ .*SIGKILL"):
            for _ in reading:
                pass
        assert time.monotonic() - begun < 10


def test_a_worker_that_leaves_is_noticed_with_its_status():
    loader = Loader(Failing(lambda: os._exit(7)), Share(20, 2, shuffle=False), workers=2)
    with pytest.raises(DataError, match=r"sample 6 .*exit status 7"):
        rows(loader)


def test_a_keyboard_interrupt_and_a_sigterm_are_left_to_the_parent():
    with Loader(Noisy(400), Share(400, 4), workers=2) as loader:
        reading = loader.read(0)
        next(reading)
        for child in children():
            child.send_signal(signal.SIGINT)
            assert os.getsid(child.pid) != os.getsid(0)  # a signal to the parent's group does not reach it
        assert len(list(reading)) == 99


def test_a_file_opened_at_the_first_sample_is_each_workers_own(tmp_path):
    path = tmp_path / "numbers"
    np.arange(400).tofile(path)

    class Lazy(Noisy):
        file = None

        def __getitem__(self, index):
            self.file = self.file or path.open("rb", buffering=0)
            self.file.seek(8 * index)
            return np.frombuffer(self.file.read(8), np.int64), index

    dataset = Lazy(400)
    with Loader(dataset, Share(400, 8), workers=2) as loader:
        for batch in loader.read(0):
            assert batch.micros[0].inputs[:, 0].tolist() == batch.micros[0].targets.tolist()
    assert dataset.file is None


PARENT = """
import os, sys, time
sys.path.insert(0, {root!r})
import numpy as np
from paddle_dp.data.share import Share
from paddle_dp.data.workers import Workers
class Slow(list):
    def __getitem__(self, index):
        time.sleep(3600 if index > 3 else 0)
        return np.zeros(1000), index
sys.stdout.write("not yet written ")
source = Workers(Slow(range(64)), Share(64, 2, shuffle=False), 2, 4, 60.0)
reading = source.read(0, 0)
next(reading)
print(*[child.pid for child in source._crew._children], flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(3600)", "raise SystemExit(3)"], ids=["killed", "leaves"])
def test_they_die_with_their_parent_and_leave_nothing(then):
    """Workers in the middle of a sample that never ends: neither a kill -9 nor an end of the parent is outlived."""
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(root=root, then=then)], stdout=subprocess.PIPE, text=True
    ) as parent:
        line = parent.stdout.readline()
        workers = [psutil.Process(int(pid)) for pid in line.replace("not yet written", "").split()]
        assert len(workers) == 2 and line.count("not yet written") == 1
        assert not any("/dev/shm" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in workers)
        if "sleep" in then:
            parent.kill()
        parent.wait(10)
        _until(lambda: not any(_alive(worker) for worker in workers))
        assert parent.stdout.read() == ""  # what the parent had not yet written was not written again


def _alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(condition, seconds=10):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.01)
