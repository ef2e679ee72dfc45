"""Batches of tensors in the order of the share, read here."""

import itertools
import random

import numpy as np
import paddle
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.errors import UsageError
from tests.house.batches import rows
from tests.house.datasets import InMemory, Noisy, Numbers, Slow


def test_batches_hold_the_shares_samples_as_tensors():
    loader = Loader(Numbers(10), Sampler(10, 4, seed=1, micro_batches=2))
    batches = list(loader.read(epoch=3))
    assert [batch.samples for batch in batches] == [4, 4, 2]
    assert [batch.index for batch in batches] == [0, 1, 2]
    for batch in batches:
        expected = loader.sampler.local_batch(3, batch.index)
        assert [micro_batch.targets.tolist() for micro_batch in batch.micro_batches] == [
            (10 * part).tolist() for part in expected
        ]
        assert [micro_batch.samples for micro_batch in batch.micro_batches] == [
            len(part) for part in expected
        ]
    first = batches[0].micro_batches[0]
    assert first.inputs.shape == [2, 2] and first.inputs.dtype == paddle.float32
    assert first.targets.dtype == paddle.int64 and batches[0].epoch == 3


def test_take_gives_what_one_by_one_gives():
    for micro_batches, dp_size in itertools.product((1, 3), (1, 2)):
        sampler = Sampler(11, 4, micro_batches=micro_batches, dp_size=dp_size)
        assert rows(Loader(InMemory(11), sampler)) == rows(Loader(Numbers(11), sampler))


def test_take_may_fill_the_same_memory_each_time():
    """The second micro-batch of a batch was read over the first."""
    data, memory = InMemory(11), np.zeros([11, 2], "float32")

    def take(indices):
        memory[: len(indices)], targets = InMemory.take(data, indices)
        return memory[: len(indices)], targets

    data.take = take
    for micro_batches in (1, 3):
        sampler = Sampler(11, 4, micro_batches=micro_batches)
        assert rows(Loader(data, sampler)) == rows(Loader(Numbers(11), sampler))


def test_starting_in_the_middle_gives_the_rest_and_reads_nothing_else():
    read = []

    class Counted(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    loader = Loader(Counted(20), Sampler(20, 4))
    whole = rows(loader, epoch=2)
    read.clear()
    assert rows(loader, epoch=2, start=3) == whole[3:]
    assert read == loader.sampler.order(2)[12:].tolist()
    assert rows(loader, start=5) == []


@pytest.mark.parametrize(("epoch", "start"), [(0, 6), (0, -1), (-1, 0)])
def test_a_place_outside_the_epoch_is_refused_at_once(epoch, start):
    with pytest.raises(ValueError, match="not one of 0 to 5"):
        Loader(Numbers(20), Sampler(20, 4)).read(epoch, start)


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    def noise(epoch=0, **sampler):
        batches = Loader(Noisy(12), Sampler(12, 5, **sampler)).read(epoch)
        micro_batches = [
            micro_batch for batch in batches for micro_batch in batch.micro_batches if micro_batch.samples
        ]
        return {
            index: tuple(values)
            for micro_batch in micro_batches
            for index, values in zip(micro_batch.targets.tolist(), micro_batch.inputs.tolist(), strict=True)
        }

    whole = noise()
    halves = noise(dp_size=2, micro_batches=2) | noise(dp_size=2, dp_rank=1, micro_batches=2)
    assert whole == halves
    assert len(set(whole.values())) == 12
    assert set(whole.values()).isdisjoint(noise(epoch=1).values())
    assert set(whole.values()).isdisjoint(noise(seed=1).values())


def test_reading_leaves_the_programs_own_randomness_alone():
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    list(Loader(Noisy(12), Sampler(12, 5)).read(0))
    assert (random.random(), np.random.random()) == expected


def test_a_reader_without_a_sample_gets_a_dummy():
    batches = list(Loader(Numbers(9), Sampler(9, 8, dp_rank=0, dp_size=2)).read(0))
    dummy = batches[1].micro_batches[0]
    assert dummy.is_dummy and dummy.samples == 0 and batches[1].samples == 1
    assert dummy.targets.tolist() == (10 * batches_first(9, 8)).tolist()


def batches_first(samples, batch):
    return Sampler(samples, batch).global_batch(0, samples // batch)[:1]


def test_a_share_of_another_length_is_refused():
    with pytest.raises(ValueError, match="made for 9 samples, but the data set has 10"):
        Loader(Numbers(10), Sampler(9, 4))


@pytest.mark.parametrize("settings", [{"num_workers": -1}, {"prefetch": 0}, {"timeout": 0}])
def test_nonsense_is_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Loader(Numbers(10), Sampler(10, 4), **settings)


def test_plain_is_the_short_way():
    loader = Loader.plain(Numbers(10), batch=4, seed=2, drop_last=True)
    assert loader.sampler == Sampler(10, 4, seed=2, drop_last=True)
    assert loader.batches == 2


def test_waiting_is_measured():
    (batch,) = Loader(Slow(2, 0.02), Sampler(2, 2)).read(0)
    assert 0.04 <= batch.waited < 1


def test_tensors_do_not_change_with_what_they_were_read_from():
    data = InMemory(4)
    kept = np.arange(8, dtype=np.float32).reshape(4, 2)
    data.take = lambda indices: (kept, indices)
    (batch,) = Loader(data, Sampler(4, 4)).read(0)
    kept[:] = -1
    assert batch.micro_batches[0].inputs.tolist()[3] == [6, 7]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_may_read_any_rank_s_share(num_workers):
    """Asked for one by one, in any order; together the shares are the global batch."""
    shares = [(0, 2), (0, 0), (1, 1), (0, 1), (2, 0)]
    with Loader(Numbers(11), Sampler(11, 5, dp_rank=1, dp_size=3), num_workers=num_workers) as loader:
        read = [
            part.targets.tolist() for b in loader.read_shares(1, iter(shares)) for part in b.micro_batches
        ]
    wanted = [Sampler(11, 5, dp_rank=j, dp_size=3).reads(1, k) for k, j in shares]
    assert read == [(10 * indices).tolist() for part in wanted for indices, _ in part]


def test_a_data_set_that_a_loader_is_given_later_is_refused() -> None:
    loader = Loader.plain(list(range(8)), 4)
    with pytest.raises(UsageError, match=r"was made for, not a list.*between two calls of fit"):
        loader.dataset = list(range(4))
