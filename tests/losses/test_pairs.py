"""Losses over pairs: the formulas against loops in double precision; and cut into unequal shares, the same loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import paddle
import pytest

from paddle_dp.errors import LossError
from paddle_dp.losses._pairs import class_numbers
from paddle_dp.losses.contrastive import Config as Contrastive
from paddle_dp.losses.pairwise import Config as Pairwise
from paddle_dp.losses.siamese import Config as Siamese
from paddle_dp.losses.triplet import Config as Triplet

N, D, CLASSES = 13, 5, 4
LOSSES = {
    "contrastive": Contrastive().build(),
    "triplet": Triplet(margin=0.5).build(),
    "pairwise": Pairwise(margin=3.0).build(),
}


def drawn(n=N):
    random = np.random.default_rng(3)
    classes = random.integers(0, CLASSES, n)
    classes[0] = CLASSES  # alone in its class
    return random.standard_normal((n, D)), classes


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def of_contrastive(rows, classes):
    total = count = 0
    near = unit(rows) @ unit(rows).T / 0.1
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        positives = [j for j in others if classes[j] == classes[i]]
        if positives:
            competing = np.log(sum(np.exp(near[i, j]) for j in others))
            total += np.mean([competing - near[i, j] for j in positives])
            count += 1
    return total, count


def of_triplet(rows, classes):
    total = count = 0
    apart = ((unit(rows)[:, None] - unit(rows)) ** 2).sum(-1)
    for i in range(len(rows)):
        positives = [apart[i, j] for j in range(len(rows)) if j != i and classes[j] == classes[i]]
        negatives = [apart[i, j] for j in range(len(rows)) if classes[j] != classes[i]]
        if positives and negatives:
            total += max(0, max(positives) - min(negatives) + 0.5)
            count += 1
    return total, count


def of_pairwise(rows, classes):
    total = 0
    for i in range(len(rows)):
        for j in range(len(rows)):
            d = np.linalg.norm(rows[i] - rows[j])
            if i != j:
                total += d**2 if classes[i] == classes[j] else max(0, 3.0 - d) ** 2
    return total, len(rows) * (len(rows) - 1)


TRUTH = {"contrastive": of_contrastive, "triplet": of_triplet, "pairwise": of_pairwise}


class Shares:
    """The samples of all ranks, in one process: those of each share, of which one asks."""

    def __init__(self, of_ranks, place):
        self.of_ranks, self.index = of_ranks, place

    def gather(self, *rows):
        first = sum(len(share[0]) for share in self.of_ranks[: self.index])
        return [paddle.concat(column) for column in zip(*self.of_ranks, strict=True)], first


@pytest.mark.parametrize("name", LOSSES)
def test_the_total_and_the_count_are_the_formula_s(name):
    rows, classes = drawn()
    total, count = LOSSES[name](paddle.to_tensor(rows), paddle.to_tensor(classes))
    wanted, counted = TRUTH[name](rows, classes)
    assert total.item() == pytest.approx(wanted, rel=1e-6)
    assert float(count) == counted


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [(13,), (6, 7), (1, 8, 4)])
def test_shares_add_up_to_the_loss_of_one_process_and_so_do_gradients(name, sizes):
    rows, classes = drawn()
    whole = paddle.to_tensor(rows, stop_gradient=False)
    total, count = LOSSES[name](whole, paddle.to_tensor(classes))
    total.backward()
    scores = LOSSES[name].scores(whole, paddle.to_tensor(classes))

    shared = paddle.to_tensor(rows, stop_gradient=False)
    cuts = np.cumsum((0, *sizes))
    parts = [(shared[a:b], paddle.to_tensor(classes[a:b])) for a, b in pairwise(cuts)]
    ready = [(unit_of(name, part), of_class) for part, of_class in parts]
    totals, counts, found = 0.0, 0.0, 0.0
    for place, part in enumerate(parts):
        loss = LOSSES[name].across(Shares(ready, place))
        own, number = loss(*part)
        totals, counts = totals + own, counts + float(number)
        found += sum(value.item() for value in loss.scores(*part).values())
    totals.backward()
    assert totals.item() == pytest.approx(total.item(), rel=1e-12)
    assert counts == float(count)
    assert found == pytest.approx(sum(value.item() for value in scores.values()))
    np.testing.assert_allclose(shared.grad.numpy(), whole.grad.numpy(), atol=1e-11)
    assert float(whole.grad.abs().max()) > 0.01


def unit_of(name, rows):
    """Embeddings as the loss gathers them."""
    return rows if name == "pairwise" else paddle.nn.functional.normalize(rows, axis=-1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_dummy_hangs_on_all_samples_and_counts_finite_numbers(name):
    """Its total is multiplied by 0, and its backward takes part in the gather's."""
    rows, classes = drawn()
    others = paddle.to_tensor(rows, stop_gradient=False)

    class Dummy:
        def gather(self, *_):
            return [unit_of(name, others), paddle.to_tensor(classes)], N

    row = paddle.to_tensor(rows[:1], stop_gradient=False)
    total, _ = LOSSES[name].across(Dummy())(row, paddle.to_tensor(classes[:1]))
    total.backward(paddle.zeros_like(total))
    assert np.array_equal(row.grad.numpy(), np.zeros((1, D)))
    assert np.array_equal(others.grad.numpy(), np.zeros((N, D)))


def test_two_towers_are_compared_in_both_directions():
    rows, _ = drawn(6)
    other, _ = drawn(12)
    a, b = unit(rows), unit(other[6:])
    logits = a @ b.T / 0.1
    each = [
        -np.log(np.exp(m[i, i]) / np.exp(m[i]).sum()) for m in (logits, logits.T) for i in range(len(rows))
    ]
    total, count = LOSSES["contrastive"]((paddle.to_tensor(rows), paddle.to_tensor(other[6:])), None)
    assert total.item() == pytest.approx(sum(each) / 2, rel=1e-6)
    assert float(count) == 6


def test_siamese_is_hadsell_s_formula_and_counts_pairs():
    a, b = drawn(6)[0], drawn(12)[0][6:]
    same = np.array([1, 0, 1, 0, 0, 1])
    d = np.linalg.norm(a - b, axis=1)
    loss = Siamese(margin=4.0).build()
    given = (paddle.to_tensor(a), paddle.to_tensor(b)), paddle.to_tensor(same)
    total, count = loss(*given)
    assert total.item() == pytest.approx(np.where(same == 1, d**2, np.maximum(0, 4 - d) ** 2).sum())
    assert count == 6
    assert loss.scores(*given)["acc1"].item() == ((d < 2) == (same == 1)).sum()


def test_two_that_are_equal_have_a_finite_gradient():
    row = paddle.ones([2, 3])
    row.stop_gradient = False
    total, _ = Siamese().build()((row, paddle.ones([2, 3])), paddle.to_tensor([0, 1]))
    total.backward()
    assert np.isfinite(row.grad.numpy()).all()


@pytest.mark.parametrize(
    ("outputs", "targets", "said"),
    [
        (paddle.zeros([3, 2, 2]), paddle.zeros([3], "int64"), r"one embedding for each sample as outputs"),
        (paddle.zeros([3, 2]), paddle.zeros([3]), r"one class number for each sample as targets"),
        (paddle.zeros([3, 2]), paddle.zeros([3, 2], "int64"), r"one class number"),
    ],
)
def test_outputs_and_targets_of_another_form_are_refused(outputs, targets, said):
    for loss in LOSSES.values():
        with pytest.raises(LossError, match=said):
            loss(outputs, targets)


def test_siamese_says_where_pairs_within_a_batch_belong():
    with pytest.raises(LossError, match="pairwise"):
        Siamese().build()(paddle.zeros([3, 2]), paddle.zeros([3], "int64"))


@pytest.mark.parametrize("dtype", ["int16", "uint8", "bool", "int64"])
def test_class_numbers_are_gathered_in_a_dtype_that_gloo_has(dtype):
    """It ends the process at int16, without a word."""
    assert class_numbers(paddle.to_tensor([[1], [0]]).astype(dtype), 2, "triplet").dtype == paddle.int64
