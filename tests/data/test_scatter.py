"""One rank that reads for all: each rank gets to the bit what it would have read itself, in its turn and no other."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest

from paddle_dp.batch import leaves
from paddle_dp.data import Sampler
from paddle_dp.data.sample import InProcess
from paddle_dp.data.scatter import Elsewhere, ReadByMain, Received, Scatterer, is_in_order, pack, unpack
from paddle_dp.data.stream import Stream, as_dataset
from paddle_dp.errors import DataError, UsageError
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.degrees import Degrees

RANKS = 3


class Post:
    """The endpoints of all ranks in one process; `here`: whose it is now."""

    def __init__(self):
        self.boxes = defaultdict(deque)
        self.here = 0

    def send(self, group, rank, *data):
        self.boxes[group, self.here, rank].append(bytearray(b"".join(data)))

    def receive(self, group, rank):
        return self.boxes[group, rank, self.here].popleft()  # IndexError where it would wait

    def arrived(self, group, rank):
        return bool(self.boxes[group, rank, self.here])


@pytest.fixture
def post(monkeypatch):
    made = Post()
    monkeypatch.setattr(transport, "_endpoint", [made])
    return made


class Random:
    """Samples of two inputs and a target, drawn at random as augmentation is."""

    def __init__(self, samples=23, bad=None):
        self.samples, self.bad = samples, bad

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("a torn file")
        image = np.random.rand(2, 3).astype("float32")
        return {"image": image, "flag": np.array(index % 2 == 0)}, (np.int64(index), np.float64(index))


def numbers(count):
    """A stream."""
    for index in range(count):
        yield np.float32(index), np.int64(index)


def sources(monkeypatch, dataset, settings, ahead=1, degrees=None):
    """Every rank's source under scatter, which share channels as those of ranks do, and its own source without."""
    degrees = degrees or Degrees(data=RANKS)
    meshes = [Mesh(rank=rank, ranks=degrees.ranks, degrees=degrees) for rank in range(degrees.ranks)]
    samplers = [Sampler.for_mesh(len(dataset), 7, mesh, **settings) for mesh in meshes]
    channel = iter([-1000] * degrees.ranks)
    monkeypatch.setattr("paddle_dp.data.scatter._CHANNELS", channel)
    whole = InProcess(dataset, Sampler.for_mesh(len(dataset), 7, **settings))
    first = Scatterer(whole, samplers[0], ReadByMain(dataset, meshes[0]), ahead)
    others = [Received(sampler) for sampler in samplers[1:]]
    alone = [InProcess(dataset, sampler) for sampler in samplers]
    return [list(map(Reads, each, samplers)) for each in ([first, *others], alone)]


class Reads:
    """A source, asked as a loader asks it."""

    def __init__(self, source, sampler):
        self.source, self.sampler = source, sampler

    def read(self, epoch, start):
        return self.source.read(epoch, ((k, self.sampler) for k in range(start, self.sampler.batches)))


def same(one, other):
    """Micro-batches with the same bits and counts."""
    for (inputs, targets, count), (wanted, of_targets, counted) in zip(one, other, strict=True):
        assert count == counted
        for got, due in zip(leaves((inputs, targets)), leaves((wanted, of_targets)), strict=True):
            assert got.dtype == due.dtype and got.shape == due.shape
            assert got.tobytes() == due.tobytes()


@pytest.mark.parametrize("micro_batches", [1, 3, 7])
@pytest.mark.parametrize("ahead", [1, 3])
def test_every_rank_gets_what_it_would_have_read(post, monkeypatch, micro_batches, ahead):
    """Shares are unequal; with 7 micro-batches of one sample two ranks have a dummy each. The last batch is short."""
    scattered, alone = sources(monkeypatch, Random(), {"micro_batches": micro_batches}, ahead)
    for epoch, start in ((0, 0), (1, 2)):
        iterators = [source.read(epoch, start) for source in scattered]
        for due in zip(*(source.read(epoch, start) for source in alone), strict=True):
            for rank, iterator in enumerate(iterators):
                post.here = rank
                same(next(iterator), due[rank])
        assert [next(iterator, None) for iterator in iterators] == [None] * RANKS
    assert not [box for key, box in post.boxes.items() if box and key[1] == 0]


def test_ranks_of_other_axes_get_the_same_as_their_reader(post, monkeypatch):
    degrees = Degrees(data=2, tensor=2)
    scattered, alone = sources(monkeypatch, Random(), {}, degrees=degrees)
    for rank, (source, own) in enumerate(zip(scattered, alone, strict=True)):
        post.here = rank
        same(next(source.read(0, 0)), next(own.read(0, 0)))


def test_what_was_sent_for_a_read_that_was_left_is_passed_over(post, monkeypatch):
    scattered, alone = sources(monkeypatch, Random(), {})
    for epoch in (0, 0, 1):  # as after an evaluation of one batch, or a return to a checkpoint
        for rank, (source, own) in enumerate(zip(scattered, alone, strict=True)):
            post.here = rank
            same(next(source.read(epoch, epoch)), next(own.read(epoch, epoch)))


def test_an_error_is_raised_in_the_turn_of_its_batch(post, monkeypatch):
    sampler = Sampler(23, 7)
    bad = int(sampler.global_batch(0, 2)[0])
    scattered, _ = sources(monkeypatch, Random(bad=bad), {}, ahead=3)
    read = scattered[0].read(0, 0)
    next(read), next(read)
    with pytest.raises(DataError, match=f"sample {bad}: ValueError: a torn file"):
        next(read)


def test_rank_0_waits_for_a_rank_that_is_far_behind(post, monkeypatch):
    scattered, _ = sources(monkeypatch, Random(samples=100), {}, ahead=1)
    first, second, third = (source.read(0, 0) for source in scattered)
    with pytest.raises(IndexError):  # in a job it waits: nobody has taken anything
        list(first)
    sent = len(post.boxes[-1000, 0, 1])
    assert sent == 4  # 2 × ahead + 2
    for rank, read in ((1, second), (2, third)):
        post.here = rank
        for _ in range(sent):
            next(read)


def test_another_batch_than_is_due_is_refused(post, monkeypatch):
    scattered, _ = sources(monkeypatch, Random(), {})
    post.here = 0
    next(scattered[0].read(0, 0))
    post.here = 1
    with pytest.raises(DataError, match=r"rank 0 has sent batch 0 of epoch 0, .* batch 1 of epoch 0"):
        next(scattered[1].read(0, 1))


def test_a_stream_is_iterated_once_for_all_ranks(post, monkeypatch):
    seen = []

    def once():
        for sample in numbers(14):
            seen.append(sample)
            yield sample

    class Source:
        __iter__ = staticmethod(once)

    scattered, _ = sources(monkeypatch, Stream(Source(), 14), {"shuffle": False})
    got = []
    for rank, source in enumerate(scattered):
        post.here = rank
        got += [int(n) for (_, targets, _) in next(source.read(0, 0)) for n in targets]
    assert got == list(range(7))
    assert len(seen) == 14  # two batches, each sample once


def test_what_can_be_read_only_once_has_a_last_batch_of_fewer_samples_than_micro_batches(post, monkeypatch):
    """12 samples in batches of 7: the last five in eight micro-batches, three of which are empty."""
    stream = as_dataset(numbers(12), 12, "train", once=True)
    stream.begin()
    scattered, _ = sources(monkeypatch, stream, {"shuffle": False, "micro_batches": 8})
    got = []
    for rank, source in enumerate(scattered):
        post.here = rank
        for batch in source.read(0, 0):
            got += [int(n) for _, targets, count in batch for n in targets[:count]]
    assert sorted(got) == list(range(12))


def test_arrays_of_any_kind_survive_the_way():
    inputs = {
        "flags": np.array([True, False]),
        "none": np.zeros((2, 0, 3), "int32"),
        "low": np.arange(6, dtype="float16").reshape(2, 3),
        "complex": np.ones((2, 1), "complex64"),
    }
    targets = (np.arange(10, dtype="int64")[::5], np.asfortranarray(np.ones((2, 3))))
    message = pack([(inputs, targets, 2)], (3, 1, 4), np.array([8, 9]))
    key, ((got, of_targets, count),), indices = unpack(bytearray(b"".join(message)))
    assert key == (3, 1, 4) and indices.tolist() == [8, 9] and count == 2
    same([(got, of_targets, count)], [(inputs, targets, count)])


def test_elsewhere_has_a_length_and_no_sample():
    data = Elsewhere(5, ("a", "b"), stream=True)
    assert len(data) == 5 and data.classes == ("a", "b") and is_in_order(data)
    with pytest.raises(DataError, match="only rank 0 reads"):
        data[0]


def test_a_data_set_in_its_own_order_is_refused_on_every_rank():
    class Stated(Random):
        def epoch_order(self, seed, epoch):
            return [0, 1]

    with pytest.raises(UsageError, match=r"dataset\.reading: scatter .* states its epochs' order"):
        Elsewhere.for_rank(Stated(), Mesh.alone())
