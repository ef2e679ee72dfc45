"""The batch ramp as arithmetic: sizes by updates, epochs that are read once, the same on any number of ranks."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.data.prepared import prepared
from paddle_dp.errors import RecipeError
from paddle_dp.recipe.schema import LoaderSettings
from paddle_dp.recipe.train_schema import BatchRamp, Train
from paddle_dp.units import EverySteps, Length
from tests.house.datasets import Samples


def ramp(start: int, increment: int, every: int) -> BatchRamp:
    return BatchRamp(start=start, increment=increment, every=EverySteps(every, "steps"))


def sampler(samples: int = 50, batch: int = 16, **more: Any) -> Sampler:
    return Sampler(samples, batch, **{"ramp": ramp(4, 4, 3), "seed": 5, **more})


def positions(sampler: Sampler, epochs: int) -> list[tuple[int, int]]:
    return [(epoch, k) for epoch in range(epochs) for k in range(sampler.batches_of(epoch))]


@pytest.mark.parametrize(
    ("drop_last", "sizes"),
    [(False, [[4, 4, 4, 8, 8, 8, 12, 2], [12, 16, 16, 6], [16, 16, 16, 2]]),
     (True, [[4, 4, 4, 8, 8, 8, 12], [12, 12, 16], [16, 16, 16]])],  # a dropped rest counts as no update
)  # fmt: skip
def test_the_batch_grows_at_the_stated_updates(drop_last: bool, sizes: list[list[int]]) -> None:
    """Three updates each of 4, 8, 12 samples; an epoch of 50 samples ends with what is left."""
    small = sampler(drop_last=drop_last)
    assert [[small.size(k, epoch) for k in range(small.batches_of(epoch))] for epoch in range(3)] == sizes


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("start", "increment", "every"), [(1, 1, 1), (4, 4, 3), (5, 100, 7), (3, 2, 40), (15, 1, 1)]
)
def test_sizes_follow_from_the_update_alone(start: int, increment: int, every: int, drop_last: bool) -> None:
    ramped = sampler(ramp=ramp(start, increment, every), drop_last=drop_last)
    for update, (epoch, k) in enumerate(positions(ramped, 9)):
        size, stated = ramped.size(k, epoch), ramped.ramp.size(update, 16)  # type: ignore[union-attr]
        is_last = k == ramped.batches_of(epoch) - 1
        assert size == stated or (is_last and not drop_last and size < stated)
        assert ramped.position(update) == (epoch, k)
        assert ramped.epochs(update) == epoch + k / ramped.batches_of(epoch)


def test_every_epoch_reads_each_sample_once_in_the_order_without_a_ramp() -> None:
    plain = sampler(ramp=None)
    for epoch in range(4):
        batches = [sampler().global_batch(epoch, k) for k in range(sampler().batches_of(epoch))]
        np.testing.assert_array_equal(np.concatenate(batches), plain.order(epoch))


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranks_share_each_batch(dp_size: int, micro_batches: int) -> None:
    """No rank reads more rows than the workers' buffer has."""
    ranks = [
        sampler(dp_rank=dp_rank, dp_size=dp_size, micro_batches=micro_batches) for dp_rank in range(dp_size)
    ]
    for epoch, k in positions(ranks[0], 3):
        shares = [rank.local_batch(epoch, k) for rank in ranks]
        micro = [np.concatenate([share[j] for share in shares]) for j in range(micro_batches)]
        np.testing.assert_array_equal(np.concatenate(micro), sampler().global_batch(epoch, k))
        assert all(sum(len(rows) for rows, _ in rank.reads(epoch, k)) <= rank.most_rows for rank in ranks)


def test_lengths_in_epochs_are_counted_by_their_batches() -> None:
    lengths = {"1 epoch": 8, "1.5 epochs": 10, "2 epochs": 12, "5 epochs": 24, "7 steps": 7, "0.25 epochs": 2}
    assert {text: sampler().updates(Length.parse(text)) for text in lengths} == lengths
    plain = sampler(ramp=None)
    for text in lengths:
        assert plain.updates(Length.parse(text)) == Length.parse(text).steps(plain.batches)


def test_a_size_without_its_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="its size depends on the epoch"):
        sampler().size(0)
    with pytest.raises(IndexError, match="an epoch has batches 0 to 7"):
        sampler().size(8, 0)


def noisy(index: int) -> tuple[np.ndarray, np.int64]:
    return np.array([index, np.random.random()], np.float32), np.int64(index)


def stacked(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([row for row, _ in rows]), np.array([target for _, target in rows])


@pytest.mark.processes
@pytest.mark.parametrize("more", [{"num_workers": 2}, {"global_batches": True}])
def test_workers_and_a_start_in_mid_epoch_read_the_same(more: dict[str, Any]) -> None:
    def read(loader: Loader, start: int = 0) -> list[list[list[float]]]:
        return [m.inputs.tolist() for batch in islice(loader.read(0, start), 20) for m in batch.micro_batches]

    cut = {"dp_rank": 1, "dp_size": 2, "micro_batches": 2}
    dataset: Any = Samples(50, noisy)
    if more.get("global_batches"):
        dataset = prepared(dataset, LoaderSettings(collate="batch"), stacked)
    with (
        Loader(Samples(50, noisy), sampler(**cut)) as plain,
        Loader(dataset, sampler(**cut), **more) as other,
    ):
        assert read(other) == read(plain) and len(read(plain)) == 16
        assert read(other, 5) == read(plain)[10:]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": 4}, "batch_ramp: it begins with 4 samples, and batch is 4"),
        ({"micro_batches": 5}, r"micro_batches: the first batches, of 4 samples \(batch_ramp.start\)"),
    ],
)
def test_a_ramp_that_does_not_grow_or_cannot_be_cut_is_refused(
    changed: dict[str, int], sentence: str
) -> None:
    settings: dict[str, Any] = {"length": Length.parse("1 epoch"), "batch": 16, "batch_ramp": ramp(4, 4, 3)}
    Train(**settings)
    with pytest.raises(ValueError, match=sentence):
        Train(**{**settings, **changed})


def test_a_schedule_takes_its_lengths_in_steps(tmp_path: Any) -> None:
    from paddle_dp.recipe import read_recipe

    def read(schedule: str) -> None:
        read_recipe(
            "configs/digits_mlp.yaml",
            ["train.batch_ramp={start: 16, increment: 16, every: 20 steps}", f"schedule={schedule}"],
        )

    read("{use: cosine, learning_rate: 0.1, warmup: 20 steps}")
    read("{use: plateau, learning_rate: 0.1, every: 1 epoch}")
    for schedule, name in (
        ("cosine, warmup: 1 epoch", "warmup"),
        ("milestones, milestones: [1 epoch]", "milestones"),
    ):
        with pytest.raises(RecipeError, match=rf"schedule\.{name}: '1 epoch' has no fixed number of updates"):
            read(f"{{use: {schedule}, learning_rate: 0.1}}")
