"""Mixup and CutMix: the same samples on any number of ranks, micro-batches and workers; and losses of soft targets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.batch import mapped
from paddle_dp.data import Loader, Sampler
from paddle_dp.data.mix import Mixture, draw, mixed
from paddle_dp.errors import DataError, LossError
from paddle_dp.losses.contrastive import Config as Contrastive
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.losses.margin_softmax import Config as MarginSoftmax
from paddle_dp.recipe.schema import Mix
from tests.house.batches import global_batches

BOTH = Mix(mixup=0.5, cutmix=1.0)
SAMPLES, BATCH, SIZE = 23, 10, 6


class Images:
    """Image i has the numbers i + noise, which Python's `random` draws as an augmentation does; its class is i % 5."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.int64]:
        return (i + np.random.rand(3, SIZE, SIZE)).astype("float32"), np.int64(i % 5)


class Taken:
    """The same without noise, in memory, with targets of floats."""

    images = np.arange(SAMPLES * 3 * SIZE * SIZE, dtype="float64").reshape(SAMPLES, 3, SIZE, SIZE)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.images[i], np.float32([i, i % 5])

    def take(self, indices: Any) -> Any:
        return self.images[indices], np.stack([indices, indices % 5], 1).astype("float32")


def batches(dataset: Any, mix: Mix | None = BOTH, **settings: Any) -> list[list[np.ndarray]]:
    sampler = Sampler(SAMPLES, BATCH, seed=3, micro_batches=settings.pop("micro_batches", 1))
    return global_batches(dataset, sampler, mix=mix, **settings)


ALONE = {kind: batches(kind()) for kind in (Images, Taken)}


@pytest.mark.parametrize("dataset", [Images, Taken])
@pytest.mark.parametrize(("dp_size", "micro_batches"), [*itertools.product((1, 2, 3, 7), (1, 2, 3))])
def test_samples_are_mixed_equally_on_any_ranks_and_micro_batches(
    dataset: Any, dp_size: int, micro_batches: int
) -> None:
    for alone, together in zip(
        ALONE[dataset], batches(dataset(), dp_size=dp_size, micro_batches=micro_batches), strict=True
    ):
        for expected, array in zip(alone, together, strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.processes
@pytest.mark.parametrize("dataset", [Images, Taken])
def test_workers_mix_equally_also_from_the_middle_of_an_epoch(dataset: Any) -> None:
    of_workers = batches(dataset(), dp_size=2, micro_batches=2, num_workers=2, start=1)
    expected = [batch for number, batch in enumerate(ALONE[dataset]) if number % 3 >= 1]
    for one, other in zip(expected, of_workers, strict=True):
        for first, second in zip(one, other, strict=True):
            np.testing.assert_array_equal(first, second)


def test_each_sample_is_mixed_with_the_one_before_it_in_the_global_batch() -> None:
    plain, shares = batches(Images(), None), []
    for (images, numbers), (mixture, first, other, share) in zip(plain, ALONE[Images], strict=True):
        before = np.roll(images, 1, axis=0)
        np.testing.assert_array_equal(first, numbers)
        np.testing.assert_array_equal(other, np.roll(numbers, 1))
        assert len({*share.tolist()}) == 1 and 0 <= share[0] <= 1 and share.dtype == np.float32
        pasted = mixture == before
        if (pasted | (mixture == images)).all():  # CutMix: the target's share is that of the area
            assert (pasted == pasted[:1, :1]).all()
            assert 1 - pasted[0, 0].mean() == pytest.approx(share[0])
        else:
            blend = share[0] * images + (1 - share[0]) * before
            np.testing.assert_allclose(mixture, blend, rtol=1e-6)
        shares.append(share[0])
    assert len({*shares}) >= 4  # a small rectangle may be of no pixel


def test_targets_of_floats_are_mixed_as_numbers() -> None:
    mixup = batches(Taken(), Mix(mixup=1.0))
    for (images, targets), (mixture, soft) in zip(batches(Taken(), None), mixup, strict=True):
        share = ((mixture - np.roll(images, 1, 0)) / (images - np.roll(images, 1, 0))).mean()
        np.testing.assert_allclose(soft, share * targets + (1 - share) * np.roll(targets, 1, 0), rtol=1e-5)


def test_draws_have_the_distributions_of_the_papers() -> None:
    mix = Mix(mixup=0.2, cutmix=1.0, probability=0.8, cutmix_probability=0.25)
    draws = [draw(mix, seed=1, epoch=e, k=k) for e in range(40) for k in range(100)]
    blends = np.array([d.share for d in draws if d.center is None and d.share < 1])
    cuts = [d for d in draws if d.center is not None]
    assert len(blends) + len(cuts) == pytest.approx(0.8 * 4000, rel=0.05)
    assert len(cuts) == pytest.approx(0.25 * 0.8 * 4000, rel=0.1)
    assert blends.mean() == pytest.approx(0.5, abs=0.03)
    assert blends.var() == pytest.approx(0.25 / 1.4, rel=0.08)  # of Beta(0.2, 0.2): 1 / (4 · (2 · 0.2 + 1))
    assert np.var([d.share for d in cuts]) == pytest.approx(1 / 12, rel=0.1)
    assert np.mean([d.center for d in cuts], axis=0) == pytest.approx([0.5, 0.5], abs=0.04)
    assert {draw(mix, 1, 0, 0), draw(mix, 2, 0, 0), draw(mix, 1, 1, 0), draw(mix, 1, 0, 1)}.__len__() == 4


def test_a_rectangle_has_its_share_of_the_area_and_stays_inside() -> None:
    assert Mixture(0.75, (0.5, 0.5)).rectangle(32, 64) == (8, 24, 16, 48)
    assert Mixture(0.0, (0.5, 0.5)).rectangle(32, 32) == (0, 32, 0, 32)
    assert Mixture(1.0, (0.5, 0.5)).rectangle(32, 32) == (16, 16, 16, 16)
    assert Mixture(0.75, (0.999, 0.0)).rectangle(32, 32) == (23, 32, 0, 8)


def test_without_a_draw_samples_are_as_they_were() -> None:
    rows = np.random.rand(4, 1, 5, 5).astype("float32")
    images, soft = mixed(rows, np.arange(4), Mixture(1.0))
    np.testing.assert_array_equal(images, rows[1:])
    assert {name: array.tolist() for name, array in soft.items()} == {
        "first": [1, 2, 3], "second": [0, 1, 2], "share": [1, 1, 1]
    }  # fmt: skip


def soft(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> dict[str, paddle.Tensor]:
    """The targets of mixed samples."""
    return {
        name: paddle.to_tensor(each)
        for name, each in (("first", first), ("second", second), ("share", share))
    }


def soft_cross_entropy(outputs: np.ndarray, soft: np.ndarray) -> float:
    shifted = outputs.astype("float64") - outputs.max(-1, keepdims=True)
    return float(-(soft * (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_soft_targets(smoothing: float) -> None:
    outputs = np.random.default_rng(0).normal(0, 2, (6, 7)).astype("float32")
    first, other = np.array([0, 1, 2, 3, 4, 5]), np.array([5, 5, 0, 3, 6, 1])
    share = np.float32([0.3, 0.3, 1, 0, 0.5, 0.9])
    one_hot = np.eye(7)[first] * share[:, None] + np.eye(7)[other] * (1 - share[:, None])
    targets = soft(first, other, share)
    loss = CrossEntropy(label_smoothing=smoothing).build()
    total, count = loss(paddle.to_tensor(outputs), targets)
    assert total.item() == pytest.approx(
        soft_cross_entropy(outputs, one_hot * (1 - smoothing) + smoothing / 7), rel=1e-6
    )
    assert count == 6
    hits = loss.scores(paddle.to_tensor(outputs), targets)["acc1"].item()
    assert hits == pytest.approx(one_hot[np.arange(6), outputs.argmax(-1)].sum())


def test_an_ignored_class_counts_with_the_share_of_the_other() -> None:
    outputs = np.random.default_rng(0).normal(0, 2, (3, 4)).astype("float32")
    targets = soft(np.array([1, 2, -1]), np.array([-1, 0, -1]), np.float32([0.25, 0.5, 0.7]))
    loss = CrossEntropy(ignore_index=-1).build()
    total, count = loss(paddle.to_tensor(outputs), targets)
    one_hot = np.float32([[0, 0.25, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 0]])
    assert total.item() == pytest.approx(soft_cross_entropy(outputs, one_hot), rel=1e-6)
    assert count.item() == loss.count(targets).item() == pytest.approx(1.25)  # type: ignore[attr-defined,union-attr]


def test_a_margin_applies_to_each_of_the_two_classes() -> None:
    cosines = paddle.to_tensor(np.random.default_rng(0).uniform(-1, 1, (5, 4)).astype("float32"))
    first, other = paddle.to_tensor([0, 1, 2, 3, 0]), paddle.to_tensor([3, 3, 1, 0, 2])
    share = paddle.to_tensor(np.float32([0.4] * 5))
    loss = MarginSoftmax(scale=8.0).build()
    total = loss(cosines, {"first": first, "second": other, "share": share})[0].item()
    assert total == pytest.approx(
        0.4 * loss(cosines, first)[0].item() + 0.6 * loss(cosines, other)[0].item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        (np.zeros((3, 2, 4, 4), "uint8"), np.zeros(3, "int64"), r"needs one array of floats as inputs.*uint8"),
        ({"ids": np.zeros((3, 4))}, np.zeros(3, "int64"), "needs one array of floats"),
        (np.zeros((3, 2, 4, 4)), np.zeros((3, 4, 4), "int64"), "a class number for each sample as target"),
        (np.zeros((3, 2, 4, 4)), {"a": np.zeros(3)}, "a class number for each sample as target"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_named(inputs: Any, targets: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        mixed(inputs, targets, Mixture(0.5, (0.5, 0.5)))


@pytest.mark.parametrize("shape", [(8,), (8, 8), (32, 32, 3)], ids=str)
def test_the_first_batch_tells_that_there_are_no_images_to_cut(shape: tuple[int, ...]) -> None:
    """With both, it may be the thousandth batch that is cut first."""
    rows = [(np.zeros(shape, "float32"), np.int64(0))] * 4
    mix = Mix(mixup=0.2, cutmix=1.0, cutmix_probability=0.0)
    with pytest.raises(
        DataError, match=r"mix.cutmix needs images \[channels, height, width\].*leave mix.cutmix out"
    ):
        next(iter(Loader.plain(rows, batch=2, mix=mix).read(epoch=0)))


@pytest.mark.parametrize("targets", [(1, 2, 0.5), (1, 2), {"a": 1}], ids=str)
def test_other_structures_of_targets_are_no_mixed_samples(targets: Any) -> None:
    """Three tasks' class numbers would be taken for two classes and a share."""
    made = mapped(lambda number: paddle.to_tensor([number]), targets)
    with pytest.raises(LossError, match="takes one array of class numbers as targets, and these are a"):
        CrossEntropy().build()(paddle.rand([1, 5]), made)


def test_a_loss_that_compares_samples_does_not_take_mixed_ones() -> None:
    with pytest.raises(LossError, match="takes one class number for each sample as targets"):
        Contrastive().build()(paddle.rand([2, 3]), soft(np.array([0, 1]), np.array([1, 0]), np.ones(2)))


def test_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="neither mixup nor cutmix"):
        Mix()
