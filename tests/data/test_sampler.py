"""Exactly once, whatever the layout: the promise that everything else stands on."""

import itertools

import numpy as np
import pytest

from paddle_dp.data.prepared import each
from paddle_dp.data.sampler import Sampler, cut
from paddle_dp.datasets._interleaved import InterleavedSamples
from paddle_dp.errors import DataError

SHAPES = [(1, 1), (1, 5), (7, 3), (9, 4), (10, 10), (11, 10), (50, 7), (64, 16), (97, 50), (1437, 50)]
LAYOUTS = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5)))


def shares(samples, batch, dp_size, micro_batches, **settings):
    return [
        Sampler(samples, batch, dp_rank=r, dp_size=dp_size, micro_batches=micro_batches, **settings)
        for r in range(dp_size)
    ]


@pytest.mark.parametrize(("samples", "batch"), SHAPES)
@pytest.mark.parametrize(("dp_size", "micro_batches"), LAYOUTS)
def test_every_sample_is_read_exactly_once(samples, batch, dp_size, micro_batches):
    everyone = shares(samples, batch, dp_size, micro_batches, seed=3)
    read = np.concatenate(
        [part for sampler in everyone for k in range(sampler.batches) for part in sampler.local_batch(5, k)]
    )
    assert sorted(read) == list(range(samples))


@pytest.mark.parametrize(("samples", "batch"), SHAPES)
@pytest.mark.parametrize(("dp_size", "micro_batches"), LAYOUTS)
def test_a_global_batch_and_its_micros_are_the_same_sets_for_any_number_of_readers(
    samples, batch, dp_size, micro_batches
):
    alone = Sampler(samples, batch, micro_batches=micro_batches)
    everyone = shares(samples, batch, dp_size, micro_batches)
    for k in range(alone.batches):
        together = [
            np.concatenate(parts) for parts in zip(*(s.local_batch(1, k) for s in everyone), strict=True)
        ]
        assert [list(part) for part in together] == [list(part) for part in alone.local_batch(1, k)]
        assert list(np.concatenate(together)) == list(alone.global_batch(1, k))
        assert len(alone.global_batch(1, k)) == alone.size(k)


def test_readers_differ_by_at_most_one_sample_in_each_micro():
    for dp_size, micro_batches in LAYOUTS:
        for j in range(micro_batches):
            sizes = [len(sampler.local_batch(0, 0)[j]) for sampler in shares(97, 50, dp_size, micro_batches)]
            assert max(sizes) - min(sizes) <= 1


def test_the_order_is_decided_by_seed_and_epoch_alone():
    assert list(Sampler(50, 7, seed=1).order(2)) == list(
        Sampler(50, 9, seed=1, dp_rank=1, dp_size=3, micro_batches=2).order(2)
    )
    orders = {tuple(Sampler(50, 7, seed=seed).order(epoch)) for seed in (-1, 0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 9
    assert list(Sampler(50, 7, shuffle=False).order(2)) == list(range(50))


def test_the_order_is_the_same_for_ever():
    """These very numbers: a run resumed under another NumPy must go on with the same epoch."""
    assert Sampler(10, 1, seed=0).order(0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert Sampler(10, 1, seed=7).order(3).tolist() == [7, 1, 9, 6, 0, 4, 2, 8, 3, 5]


def test_every_sample_comes_first_about_as_often():
    firsts = [Sampler(10, 1, seed=seed).order(0)[0] for seed in range(2000)]
    assert np.bincount(firsts, minlength=10).min() > 140  # 200 expected, standard deviation 13


def test_nobody_can_change_the_order_of_others():
    with pytest.raises(ValueError, match="read-only"):
        Sampler(10, 2).order(0)[0] = 3


def test_dropping_the_last_batch_drops_what_does_not_fill_one():
    sampler = Sampler(10, 4, drop_last=True)
    assert sampler.batches == 2
    assert [sampler.size(k) for k in range(2)] == [4, 4]
    assert Sampler(10, 4).batches == 3
    assert Sampler(10, 4).size(2) == 2


def test_a_reader_without_samples_reads_a_dummy():
    everyone = shares(9, 8, dp_size=4, micro_batches=2)
    counts = [[count for _, count in sampler.reads(0, 1)] for sampler in everyone]
    assert sum(map(sum, counts)) == 1
    dummies = [indices for sampler in everyone for indices, count in sampler.reads(0, 1) if count == 0]
    assert len(dummies) == 7
    assert all(dummy.tolist() == everyone[0].global_batch(0, 1).tolist() for dummy in dummies)


@pytest.mark.parametrize(("samples", "batch"), SHAPES)
@pytest.mark.parametrize(("dp_size", "micro_batches"), LAYOUTS)
def test_reading_never_goes_back(samples, batch, dp_size, micro_batches):
    """A dummy is the sample at which the slice would begin: a stream is read on, and not from its beginning."""
    for sampler in shares(samples, batch, dp_size, micro_batches, shuffle=False):
        read = [indices for k in range(sampler.batches) for indices, _ in sampler.reads(0, k)]
        assert all(len(indices) for indices in read)
        assert (np.diff(np.concatenate(read)) >= 0).all()


@pytest.mark.parametrize(("dp_size", "micro_batches"), LAYOUTS)
def test_rows_is_the_most_that_any_batch_needs(dp_size, micro_batches):
    for sampler in shares(53, 10, dp_size, micro_batches):
        assert sampler.rows == max(
            sum(len(indices) for indices, _ in sampler.reads(0, k)) for k in range(sampler.batches)
        )


def test_cuts_cover_everything_in_order():
    for things, parts in itertools.product(range(9), range(1, 6)):
        cuts = [cut(things, part, parts) for part in range(parts)]
        assert [i for start, stop in cuts for i in range(start, stop)] == list(range(things))


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"batch": 0}, "batch"), ({"dp_size": 0}, "dp_size"), ({"dp_rank": 2, "dp_size": 2}, "dp_rank: 2"),
     ({"micro_batches": 0}, "micro_batches")],
)  # fmt: skip
def test_nonsense_is_refused_by_name(settings, word):
    with pytest.raises(ValueError, match=word):
        Sampler(**{"samples": 10, "batch": 2} | settings)


def test_a_data_set_that_gives_no_batch_is_a_data_error():
    with pytest.raises(DataError, match="empty"):
        Sampler(0, 4)
    with pytest.raises(DataError, match=r"3 samples in batches of 4.*drop_last: false"):
        Sampler(3, 4, drop_last=True)
    with pytest.raises(IndexError, match="0 to 2"):
        Sampler(10, 4).size(3)


def test_a_share_of_a_mesh_takes_its_seat():
    class Seat:
        dp_rank, dp_size = 1, 3

    assert Sampler.for_mesh(10, 4, Seat(), seed=5) == Sampler(10, 4, dp_rank=1, dp_size=3, seed=5)
    assert Sampler.for_mesh(10, 4) == Sampler(10, 4)


def test_some_samples_lie_at_equal_distances_and_are_the_same_for_any_number_of_readers() -> None:
    chosen = Sampler(4, 3, shuffle=False, dataset_samples=10).order(5)
    assert chosen.tolist() == [0, 2, 5, 7]
    for readers in (1, 2, 3):
        shares = [Sampler(4, 3, rank, readers, shuffle=False, dataset_samples=10) for rank in range(readers)]
        read = [
            index for k in (0, 1) for share in shares for part in share.local_batch(0, k) for index in part
        ]
        assert read == chosen.tolist()
    for wrong in ({"shuffle": True, "dataset_samples": 10}, {"shuffle": False, "dataset_samples": 3}):
        with pytest.raises(ValueError, match="dataset_samples"):
            Sampler(4, 3, **wrong)


class InOwnOrder:
    """Ten samples, of which an epoch has the even ones, or `order`."""

    def __init__(self, order=None):
        self.order = order or (lambda seed, epoch: np.random.default_rng((seed, epoch)).permutation(5) * 2)

    def __len__(self):
        return 10

    def epoch_order(self, seed, epoch):
        return self.order(seed, epoch)


@pytest.mark.parametrize(("dp_size", "micro_batches"), LAYOUTS)
def test_a_data_set_states_the_order_of_global_batches(dp_size, micro_batches):
    data, read = InOwnOrder(), {}
    for dp_rank in range(dp_size):
        mesh = type("Mesh", (), {"dp_rank": dp_rank, "dp_size": dp_size})
        sampler = Sampler.for_dataset(data, 3, mesh, seed=7, micro_batches=micro_batches)
        assert (sampler.samples, sampler.batches) == (5, 2)
        for k in range(2):
            for micro_batch, indices in enumerate(sampler.local_batch(4, k)):
                read[k, micro_batch, dp_rank] = indices.tolist()
    assert [index for key in sorted(read) for index in read[key]] == data.epoch_order(7, 4).tolist()


def test_without_shuffle_samples_are_read_by_their_index():
    assert Sampler.for_dataset(InOwnOrder(), 3, shuffle=False).order(0).tolist() == list(range(10))
    assert (
        Sampler.for_dataset([1, 2, 3], 3, seed=5).order(1).tolist() == Sampler(3, 3, seed=5).order(1).tolist()
    )


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (
            lambda seed, epoch: np.random.permutation(10),
            r"InOwnOrder\.epoch_order\(0, 0\) is another one each time",
        ),
        (lambda seed, epoch: [0, 10], "has 0 to 10, and the data set has the indices 0 to 9"),
        (lambda seed, epoch: [0, -1], "has -1 to 0"),
        (lambda seed, epoch: [0.5], r"is float64\[1\], and not a list of indices"),
        (lambda seed, epoch: [], r"float64\[0\]"),
        (lambda seed, epoch: None, r"object\[\]"),
        (lambda seed, epoch: [[0]], r"int64\[1, 1\]"),
        (lambda seed, epoch: 1 / epoch, "ZeroDivisionError"),
        (lambda seed, epoch: range(5 + epoch), "gives 6 samples for epoch 1 and 5 for epoch 0"),
    ],
)
def test_an_order_of_another_kind_is_refused(order, problem):
    with pytest.raises(DataError, match=problem):
        Sampler.for_dataset(InOwnOrder(order), 3).order(1)


class Longer:
    """An ordered data set with more samples, and all of its methods."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 15

    def __getattr__(self, name):
        return getattr(self.data, name)


def test_a_wrapper_that_hands_out_the_order_of_its_data_states_none():
    """Under Python 3.10 and 3.11 its further samples were never read."""
    longer = Longer(InOwnOrder())
    transformed = each(longer, lambda sample: sample)
    orders = [Sampler.for_dataset(data, 3).order(0).tolist() for data in (longer, transformed)]
    mixture = InterleavedSamples({"a": longer}, (1,))
    assert [sorted(order) for order in [*orders, mixture.epoch_order(0, 0).tolist()]] == [[*range(15)]] * 3
    longer.epoch_order = lambda seed, epoch: [14, 0]
    assert Sampler.for_dataset(longer, 3).order(0).tolist() == [14, 0]


def test_nobody_can_change_a_stated_order():
    kept = np.arange(5)
    sampler = Sampler.for_dataset(InOwnOrder(lambda seed, epoch: kept), 3)
    with pytest.raises(ValueError, match="read-only"):
        sampler.order(0)[0] = 3
    kept[0] = 9
    assert sampler.order(0)[0] == 0
