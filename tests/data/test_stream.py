"""Streams as data sets: any reader's sample i is the i-th of the stream."""

import itertools
import random

import numpy as np
import pytest
from paddle.io import Dataset as PaddleDataset
from paddle.io import IterableDataset

from paddle_dp.data import Loader, Sampler
from paddle_dp.data.fingerprint import RANDOM, common, fingerprint
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import class_names, read_seeded
from paddle_dp.data.stream import FreshIterable, Stream, as_dataset
from paddle_dp.errors import DataError, UsageError


def numbers(count=10):
    def generate():
        for i in range(count):
            yield np.float32(i), i

    return generate


class Counted(IterableDataset):
    """Counts how often it is begun, and what it gives."""

    classes = ("even", "odd")

    def __init__(self, count=10):
        self.count, self.begun, self.given = count, 0, 0

    def __iter__(self):
        self.begun += 1
        for i in range(self.count):
            self.given += 1
            yield np.float32(i), i % 2


class OfEpochs(Counted):
    def set_epoch(self, epoch):
        self.first = 100 * epoch

    def __iter__(self):
        return ((np.float32(self.first + i), i) for i in range(self.count))


class Seeks(Counted):
    def iterate_from(self, position):
        self.begun += 1
        return ((np.float32(i), i) for i in range(position, self.count))


def inputs(stream, epoch, indices, seed=0):
    return [float(read_seeded(stream, seed, epoch, i)[0]) for i in indices]


@pytest.mark.parametrize("given", [numbers(), Counted(), Seeks()])
def test_sample_i_is_the_ith_in_any_order(given):
    stream = as_dataset(given, None, "train")
    assert isinstance(stream, Stream)
    assert len(stream) == 10
    for indices in (range(10), [1, 4, 5, 9], [3, 3, 2, 7]):
        assert inputs(stream, 0, indices) == list(map(float, indices))


def test_reading_on_begins_it_once_and_the_same_sample_again_costs_nothing():
    source = Counted()
    stream = Stream(source, 10)
    inputs(stream, 0, [0, 3, 3, 8])
    assert (source.begun, source.given) == (1, 9)
    inputs(stream, 0, [2])
    assert source.begun == 2
    seeking = Seeks()
    inputs(Stream(seeking, 10), 0, [7, 8])
    assert (seeking.begun, seeking.given) == (1, 0)


def test_an_epoch_is_iterated_anew_and_told_to_the_stream():
    stream = Stream(OfEpochs(), 10)
    assert inputs(stream, 2, [0, 5]) == [200.0, 205.0]
    assert inputs(stream, 3, [1]) == [301.0]


def test_random_numbers_are_each_samples_own_also_of_those_that_are_passed_over():
    def noisy():
        state = 0.0
        while True:
            state += random.random()
            yield np.float32(state), 0

    stream = Stream(FreshIterable(noisy), 100)
    whole = inputs(stream, 1, range(20), seed=5)
    assert inputs(stream, 1, [13, 19], seed=5) == [whole[13], whole[19]]
    assert inputs(stream, 2, range(20), seed=5) != whole


class Drawn(OfEpochs):
    """Draws its order when it is iterated: `__iter__` returns an iterator, whose code runs before any sample's."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.last = random.randrange(10)

    def __iter__(self):
        order = np.random.permutation(10)
        return ((np.float32(i), self.last) for i in order)

    def iterate_from(self, position):
        return itertools.islice(iter(self), position, None)


@pytest.mark.parametrize("method", [None, Drawn.iterate_from])
def test_the_order_that_a_stream_draws_is_the_epochs_in_every_process(monkeypatch, method):
    monkeypatch.setattr(Drawn, "iterate_from", method)
    readers = [Stream(Drawn(), 10) for _ in range(3)]
    with restoring_globals():
        read = [[read_seeded(reader, 5, 1, i) for i in range(10)] for reader in readers]
        assert read[0] == read[1] == read[2] == [read_seeded(readers[0], 5, 1, i) for i in range(10)]
        assert sorted(int(number) for number, _ in read[0]) == list(range(10))
        assert [read_seeded(readers[0], 5, 2, i) for i in range(10)] != read[0]


@pytest.mark.processes
def test_ranks_and_workers_read_each_sample_once():
    for ranks in (1, 2, 3):
        seen = []
        for rank in range(ranks):
            sampler = Sampler(
                samples=10, batch=4, dp_rank=rank, dp_size=ranks, shuffle=False, micro_batches=2
            )
            with Loader(Stream(FreshIterable(numbers()), 10), sampler, num_workers=2) as loader:
                for batch in loader.read(0):
                    for part in batch.micro_batches:
                        seen += part.targets.tolist()[: part.samples]
        assert sorted(seen) == list(range(10))


def test_a_loader_begins_in_the_middle():
    loader = Loader(Stream(FreshIterable(numbers()), 10), Sampler(samples=10, batch=4, shuffle=False))
    rest = [part.targets.tolist() for batch in loader.read(0, start=2) for part in batch.micro_batches]
    assert rest == [[8, 9]]


def test_a_stream_that_ends_early_is_told_with_its_end():
    with pytest.raises(DataError, match="ended after 10 samples of epoch 1, and 12 were expected"):
        inputs(Stream(FreshIterable(numbers()), 12), 1, [11])
    with pytest.raises(IndexError):
        Stream(FreshIterable(numbers()), 10)[10]


@pytest.mark.parametrize("said", ["counted", "len"])
def test_a_stream_that_goes_on_is_told_at_its_end(said):
    class Grows(OfEpochs):
        def __iter__(self):
            return ((np.float32(i), i) for i in range(10 + self.first // 100))

    if said == "len":
        Grows.__len__ = lambda self: 10
    stream = as_dataset(Grows(), None, "train")
    assert inputs(stream, 0, range(10)) == list(map(float, range(10)))
    assert inputs(stream, 1, [8]) == [8.0]
    with pytest.raises(DataError, match=r"more than 10 samples in epoch 1, .*set loader\.samples"):
        inputs(stream, 1, [9])
    assert inputs(as_dataset(Grows(), 10, "train"), 1, [9]) == [9.0]  # an epoch of ten is what was asked for


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(UsageError, match=r"train: generator can be read only once.*reading='scatter'"):
        as_dataset(numbers()(), None, "train")


def test_a_held_out_iterator_is_read_more_than_once_whoever_reads_it():
    with pytest.raises(
        UsageError, match=r"every evaluation\. Give the function that makes it, .* __iter__ does\.$"
    ):
        as_dataset(numbers()(), None, "test", once=None)


@pytest.mark.parametrize("kind", [object, PaddleDataset])
def test_a_data_set_without_a_length_is_refused(kind):
    class Endless(kind):
        def __getitem__(self, index):
            return np.float32(index), 0

    with pytest.raises(UsageError, match=r"^train: .*Endless.*\. A data set has a method __len__"):
        as_dataset(Endless(), None, "train")
    assert as_dataset(None, None, "test") is None


def test_a_generator_that_can_be_made_again_is_a_stream():
    stream = as_dataset(numbers()(), None, "train", recreate=numbers())
    assert len(stream) == 10
    assert inputs(stream, 0, [9, 2]) == inputs(stream, 1, [9, 2]) == [9.0, 2.0]


class Once(IterableDataset):
    """An iterator over two numbers of its epoch."""

    first = given = 0

    def set_epoch(self, epoch):
        self.first = 100 * epoch

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == 2:
            raise StopIteration
        self.given += 1
        return np.float32(self.first + self.given), 0


def test_an_iterator_that_can_be_made_again_is_told_the_epoch():
    """Each was of epoch 0."""
    stream = as_dataset(Once(), None, "train", recreate=Once)
    assert [inputs(stream, epoch, range(2)) for epoch in range(3)] == [[1, 2], [101, 102], [201, 202]]


def test_without_an_end_the_number_must_be_given(monkeypatch):
    def endless():
        while True:
            yield 0, 0

    monkeypatch.setattr("paddle_dp.data.stream.LARGEST", 1000)
    with pytest.raises(UsageError, match=r"more than 1,000 samples, or no end\. Set loader\.samples"):
        as_dataset(endless, None, "train")
    assert len(as_dataset(endless, 7, "train")) == 7


def test_a_map_style_data_set_stays_what_it_is():
    for given in ([(0, 0)], None, Pairs()):
        assert as_dataset(given, None, "train") is given


class Pairs:
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return 0, 0

    def __iter__(self):
        return iter(())


def test_names_of_classes_are_the_sources():
    assert class_names(Stream(Counted(), 10)) == ("even", "odd")


def test_fingerprints_differ_where_streams_do_and_find_what_is_not_seeded():
    one, other = (fingerprint(Stream(FreshIterable(numbers(50)), 50), seed=0) for _ in range(2))
    assert one == other and len(one) > 5

    def changed():
        for i, (x, y) in enumerate(numbers(50)()):
            yield (x + (i == 40), y)

    third = fingerprint(Stream(FreshIterable(changed), 50), seed=0)
    differ = [key for key in common(one, third) if one[key] != third[key]]
    assert differ == ["samples 32, 33, 34, 35, 36, 37, 38, 39, … (18 of them)"]
    draw = np.random.default_rng()

    def unseeded():
        while True:
            yield draw.random(2), 0

    assert fingerprint(Stream(FreshIterable(unseeded), 50), seed=0)["sample 0"] == RANDOM


def test_what_failed_is_begun_anew():
    class Once(Seeks):
        failed = False

        def iterate_from(self, position):
            for i in range(position, 10):
                if i == 5 and not self.failed:
                    self.failed = True
                    raise OSError("a bad disk")
                yield np.float32(i), i

    stream = as_dataset(Once(), None, "train")
    with pytest.raises(OSError, match="a bad disk"):
        stream[5]
    assert [stream[i][1] for i in (4, 5, 6)] == [4, 5, 6]


def test_what_is_counted_is_epoch_0():
    assert len(as_dataset(OfEpochs(7), None, "train")) == 7


def test_what_fails_while_it_is_counted_is_told_with_its_place():
    def breaks():
        yield 0.0, 0
        raise OSError("a bad disk")

    with pytest.raises(DataError, match="train: sample 1: OSError: a bad disk"):
        as_dataset(breaks, None, "train")


def test_what_can_be_read_only_once_gives_what_was_looked_at_again_and_each_sample_once():
    """Where one process reads it."""
    produced = []

    def arrivals():
        for index in range(6):
            produced.append(index)
            yield np.float32(index), np.int64(index)

    with pytest.raises(UsageError, match=r"set loader\.samples"):
        as_dataset(arrivals(), None, "train", once=True)
    stream = as_dataset(arrivals(), 6, "train", once=True)
    assert stream.is_once
    assert [int(stream.at_epoch(0, 0)[i][1]) for i in (0, 1)] == [0, 1]
    stream.begin()
    assert [int(stream.at_epoch(0, 0)[i][1]) for i in range(6)] == list(range(6))
    assert produced == list(range(6))
    with pytest.raises(DataError, match="can be read only once, and its first 6 samples have been"):
        stream.at_epoch(0, 1)[0]


def test_of_what_can_be_read_only_once_a_resume_passes_over_the_beginning():
    stream = as_dataset(iter([(np.float32(i), np.int64(i)) for i in range(9)]), 9, "train", once=True)
    stream.begin()
    assert int(stream.at_epoch(0, 0)[5][1]) == 5
    assert len(stream.source._buffer) == 0
