"""Workers change the speed and nothing else."""

import itertools
import os
import tempfile
import time
import weakref

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.data.prepared import each
from paddle_dp.data.stream import as_dataset
from tests.house.batches import rows
from tests.house.datasets import InMemory, Noisy, Numbers, Slow
from tests.house.programs import until
from tests.rank_pool import children

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


@pytest.mark.parametrize("dataset", [Noisy(23), InMemory(23)], ids=["one by one", "take"])
@pytest.mark.parametrize(
    ("workers", "prefetch"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.long), (3, 5)]
)
def test_they_give_what_one_process_gives(dataset, workers, prefetch):
    for dp_size, micro_batches in ((1, 1), (2, 2), (7, 1)):
        sampler = Sampler(23, 5, seed=4, dp_size=dp_size, dp_rank=dp_size - 1, micro_batches=micro_batches)
        here = Loader(dataset, sampler)
        with Loader(dataset, sampler, num_workers=workers, prefetch=prefetch) as loader:
            for epoch, start in ((0, 0), (1, 3), (2, 5)):
                assert rows(loader, epoch, start) == rows(here, epoch, start)


def test_they_live_from_epoch_to_epoch():
    with Loader(Noisy(20), Sampler(20, 4), num_workers=2) as loader:
        assert children() == []
        rows(loader)
        first = {worker.pid for worker in children()}
        rows(loader, epoch=1)
        assert {worker.pid for worker in children()} == first and len(first) == 2


def test_a_reading_that_is_left_or_overtaken_ends_cleanly():
    with Loader(Noisy(40), Sampler(40, 4), num_workers=2) as loader:
        expected = rows(loader, epoch=1)
        left = loader.read(0)
        next(left)
        assert rows(loader, epoch=1) == expected
        with pytest.raises(RuntimeError, match="a newer read"):
            next(left)
        for _ in loader.read(0):
            break
        assert rows(loader, epoch=1) == expected


def test_they_read_ahead_and_no_further_than_asked(tmp_path):
    class Marking(Noisy):
        def __getitem__(self, index):
            (tmp_path / str(index)).touch()
            return super().__getitem__(index)

    sampler = Sampler(40, 4, shuffle=False)
    with Loader(Marking(40), sampler, num_workers=2, prefetch=3) as loader:
        reading = loader.read(0)
        next(reading)
        until(lambda: len(list(tmp_path.iterdir())) == 16)  # the batch in hand, and three ahead of it
        time.sleep(0.1)
        assert {int(path.name) for path in tmp_path.iterdir()} == set(range(16))
        reading.close()


def test_reading_goes_on_while_training_does():
    with Loader(Slow(12, 0.03), Sampler(12, 1), num_workers=1, prefetch=2) as loader:
        reading = loader.read(0)
        next(reading)
        waits = []
        for batch in itertools.islice(reading, 8):
            waits.append(batch.waited)
            time.sleep(0.06)
        reading.close()
    assert sorted(waits)[4] < 0.025  # a sample takes 0.03 s


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
    with Loader(dataset, Sampler(400, 8), num_workers=2) as loader:
        for batch in loader.read(0):
            assert batch.micro_batches[0].inputs[:, 0].tolist() == batch.micro_batches[0].targets.tolist()
    assert dataset.file is None


@pytest.mark.parametrize("temporary", [False, True])
def test_each_worker_reads_at_a_position_that_no_other_process_moves(tmp_path, temporary):
    """A fork shares the position in its parent's files: one that seeks and reads would get another one's sample."""

    class Opened(Noisy):
        def __init__(self, file):
            super().__init__(400)
            self.file = file

        def __getitem__(self, index):
            self.file.seek(index * 4096)
            return np.frombuffer(self.file.read(4096), np.int64), index

    numbers = np.repeat(np.arange(400), 512)
    numbers.tofile(tmp_path / "numbers")
    with tempfile.TemporaryFile() if temporary else (tmp_path / "numbers").open("rb") as file:
        if temporary:
            numbers.tofile(file)
        file.seek(8)
        with Loader(Opened(file), Sampler(400, 8), num_workers=3) as loader:
            for batch in itertools.chain(loader.read(0), loader.read(1), loader.read(2)):
                rows, numbers = batch.micro_batches[0].inputs.numpy(), batch.micro_batches[0].targets.numpy()
                assert (rows == numbers[:, None]).all()
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 8


class Odd:
    """Raises where it is asked for attributes, and has one without a name."""

    __slots__ = ("__dict__", "closed")

    def __init__(self):
        vars(self)[7] = "seven"

    def __getattr__(self, name):
        raise KeyError(name)


class Louder(Noisy):
    """Noise times `volume` and the widths within it, and how often this process has read."""

    volume, reads = 1.0, 0

    def __init__(self, samples):
        super().__init__(samples)
        self.shift, self.inner, self.each = (0,), Numbers(samples), [Numbers(samples)]
        self.gone, self.odd = weakref.proxy(Numbers(1)), Odd()

    def __getitem__(self, index):
        self.reads += 1
        factor = self.volume * self.inner.width * self.each[0].width
        return factor * super().__getitem__(index)[0] + self.shift[0], index


def twice(sample):
    return 2 * sample[0], sample[1]


class Rows:
    """A data set as a stream."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda data: data,
        lambda data: each(data, twice),
        lambda data: each(as_dataset(Rows(data), 20, "train"), twice),
    ],
    ids=["itself", "transformed", "stream"],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "volume", 3.0),
        lambda data: setattr(data, "volume", np.float32(3.0)),
        lambda data: setattr(type(data), "volume", 4.0),
        lambda data: setattr(data, "shift", (1,)),
        lambda data: setattr(data.inner, "width", 5),
        lambda data: setattr(data.each[0], "width", 5),
        lambda data: setattr(data, "inner", Numbers(20, 7)),
    ],
    ids=["number", "number of numpy", "class", "tuple", "within", "in a list", "replaced"],
)
def test_what_a_callback_changes_between_epochs_counts_in_the_next_one(change, prepare, monkeypatch):
    """They kept the data set of their fork: a curriculum did not exist."""
    monkeypatch.setattr(Louder, "volume", 1.0)
    louder = Louder(20)
    sampler, dataset = Sampler(20, 4, shuffle=False), prepare(louder)
    with Loader(dataset, sampler, num_workers=2) as loader:
        first = rows(loader)
        pids = {worker.pid for worker in children()}
        assert (
            rows(loader) == first and {worker.pid for worker in children()} == pids
        )  # they count for themselves
        change(louder)
        changed = rows(loader)
        assert changed == rows(Loader(dataset, sampler)) != first
        assert pids.isdisjoint(worker.pid for worker in children()) and loader.workers_busy() >= 0
