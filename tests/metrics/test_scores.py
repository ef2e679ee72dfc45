"""The metrics of the shelf give scikit-learn's numbers on the same outputs, and refuse outputs of another form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import pytest
from sklearn import metrics as sklearn

from paddle_dp.core.metric import MAX_BYTES, Collected, Metric, metrics_of
from paddle_dp.errors import UsageError
from paddle_dp.losses.binary_cross_entropy import Config as BinaryCrossEntropy
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part

RANDOM = np.random.default_rng(5)
SCORES = RANDOM.standard_normal((41, 6)).astype("float32")
CLASSES = RANDOM.choice([0, 1, 2, 4, 5], 41)  # no sample of class 3
TWO, YES = SCORES[:, :2], CLASSES % 2
LABELS = (RANDOM.random((41, 6)) < 0.3).astype("float32")
NUMBERS = RANDOM.standard_normal((41, 3)).astype("float32")


def scores(
    settings: dict[str, Any], outputs: Any, targets: Any, cuts: Sequence[int] = (7, 20)
) -> dict[str, float]:
    """The scores of outputs and targets that are collected in micro-batches, in another order than the samples'."""
    metric = Metric(read_part("metrics", settings).build(), f"metrics.{settings['use']}")
    collected = Collected(metric, len(outputs))
    bounds = [0, *cuts, len(outputs)]
    for first, end in reversed([*pairwise(bounds)]):
        pair = (paddle.to_tensor(outputs[first:end]), paddle.to_tensor(targets[first:end]))
        collected.add((0, first), *pair, end - first)
    return collected.scores(Mesh.alone(), collected.gathered(Mesh.alone()), {})


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("targets", [CLASSES, LABELS], ids=["classes", "labels"])
def test_precision_recall_and_f1(average: str, targets: Any) -> None:
    result = scores({"use": "classification", "average": average}, SCORES, targets)
    predicted = SCORES > 0 if targets.ndim == 2 else SCORES.argmax(1)
    expected = sklearn.precision_recall_fscore_support(targets, predicted, average=average, zero_division=0)
    assert [result[name] for name in ("precision", "recall", "f1")] == pytest.approx(expected[:3], abs=1e-12)


def test_top_k() -> None:
    result = scores({"use": "top_k", "k": [2, 3, 6]}, SCORES, CLASSES)
    for k in (2, 3):
        expected = sklearn.top_k_accuracy_score(CLASSES, SCORES, k=k, labels=range(6))
        assert result[f"acc{k}"] == pytest.approx(expected, abs=1e-12)
    assert result["acc6"] == 1


def test_ignored_targets_do_not_count() -> None:
    kept = CLASSES != 2
    for use in ({"use": "top_k", "k": [2]}, {"use": "classification"}):
        some = scores({**use, "ignore_index": 2}, SCORES, CLASSES)
        assert some == pytest.approx(scores(use, SCORES[kept], CLASSES[kept], (3,)), abs=1e-12)


def test_tokens_count_each() -> None:
    tokens, numbers = SCORES[:40].reshape(10, 4, 6), CLASSES[:40].reshape(10, 4)
    for use in ({"use": "top_k", "k": [2]}, {"use": "classification"}):
        assert scores(use, tokens, numbers, (3,)) == scores(use, SCORES[:40], CLASSES[:40])


def test_auc() -> None:
    assert scores({"use": "auc"}, TWO, YES)["auc"] == pytest.approx(
        sklearn.roc_auc_score(YES, TWO[:, 1].astype("float64") - TWO[:, 0]), abs=1e-12
    )
    assert scores({"use": "auc"}, SCORES[:, 0], YES.astype("float32"))["auc"] == pytest.approx(
        sklearn.roc_auc_score(YES, SCORES[:, 0]), abs=1e-12
    )
    assert scores({"use": "auc"}, SCORES, LABELS)["auc"] == pytest.approx(
        sklearn.roc_auc_score(LABELS, SCORES), abs=1e-12
    )
    chances = np.exp(SCORES.astype("float64"))
    chances /= chances.sum(1, keepdims=True)
    each = [sklearn.roc_auc_score(c == CLASSES, chances[:, c]) for c in np.unique(CLASSES)]
    assert scores({"use": "auc"}, SCORES, CLASSES)["auc"] == pytest.approx(np.mean(each), abs=1e-12)


def test_average_precision() -> None:
    assert scores({"use": "average_precision"}, SCORES, LABELS)["average_precision"] == pytest.approx(
        sklearn.average_precision_score(LABELS, SCORES), abs=1e-12
    )


def test_regression() -> None:
    outputs = NUMBERS + 0.3 * RANDOM.standard_normal(NUMBERS.shape).astype("float32")
    true, predicted = NUMBERS.astype("float64") + 1e6, outputs.astype("float64") + 1e6  # a mean far from 0
    result = scores({"use": "regression"}, predicted, true)
    assert result["r2"] == pytest.approx(sklearn.r2_score(true, predicted), abs=1e-12)
    assert result["mae"] == pytest.approx(sklearn.mean_absolute_error(true, predicted), abs=1e-12)
    root = np.sqrt(sklearn.mean_squared_error(true, predicted, multioutput="raw_values")).mean()
    assert result["rmse"] == pytest.approx(root, abs=1e-12)
    assert scores({"use": "regression"}, np.ones(5), np.ones(5), ())["r2"] == 1


def test_retrieval() -> None:
    result = scores({"use": "retrieval", "k": [1, 4]}, SCORES, CLASSES)
    from sklearn.neighbors import NearestNeighbors

    near = (
        NearestNeighbors(n_neighbors=5, metric="cosine").fit(SCORES).kneighbors(SCORES, return_distance=False)
    )
    for k in (1, 4):
        same = (CLASSES[near[:, 1 : k + 1]] == CLASSES[:, None]).any(1)  # the first is the query itself
        assert result[f"recall_at_{k}"] == pytest.approx(same.mean(), abs=1e-12)


def test_perplexity_is_made_of_the_loss() -> None:
    metric = Metric(
        read_part("metrics", {"use": "perplexity", "bytes_per_token": 2}).build(), "metrics.perplexity"
    )
    collected = Collected(metric, 3)
    result = collected.scores(Mesh.alone(), collected.gathered(Mesh.alone()), {"loss": np.log(8)})
    assert result == pytest.approx({"perplexity": 8, "bits_per_byte": 1.5}, abs=1e-12)
    for loss in (BinaryCrossEntropy().build(), CrossEntropy(label_smoothing=0.1).build(), lambda o, t: o):
        with pytest.raises(UsageError, match="e to the mean cross-entropy"):
            metrics_of([("metrics.perplexity", metric.function)], loss)
    assert metrics_of([("metrics.perplexity", metric.function)], CrossEntropy(ignore_index=3).build())


def distance(outputs: Any, targets: Any, power: int = 1) -> Any:
    return (abs(outputs - targets) ** power).sum()


class Weighted:
    """Sums alone, with an array among them."""

    names = ("share", "largest")

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {"rows": len(outputs), "columns": outputs.abs().sum(0)}

    def compute(self, sums: Any) -> dict[str, Any]:
        return {"share": sums["columns"][0] / sums["columns"].sum(), "largest": sums["rows"]}


def test_a_users_function_and_object() -> None:
    result = scores({"use": f"{__name__}.distance", "power": 2}, NUMBERS, LABELS[:, :3])
    assert result == {"distance": pytest.approx(((NUMBERS - LABELS[:, :3]) ** 2).sum(), rel=1e-6)}
    result = scores({"use": f"{__name__}.Weighted"}, NUMBERS, CLASSES)
    columns = abs(NUMBERS).sum(0)
    assert result == pytest.approx({"share": columns[0] / columns.sum(), "largest": 41}, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "outputs", "targets", "message"),
    [
        ({"use": "top_k", "k": [7]}, SCORES, CLASSES, "7 is more than the 6 classes"),
        ({"use": "top_k"}, SCORES, LABELS, r"metrics.top_k takes outputs \[n, classes\]"),
        ({"use": "auc"}, SCORES, NUMBERS, "metrics.auc cannot be computed: metrics.auc takes outputs"),
        ({"use": "auc"}, TWO, YES * 0, "no class has both a held-out sample and one of another class"),
        ({"use": "retrieval", "k": [41]}, SCORES, CLASSES, "41 others are wanted, and there are 40"),
        ({"use": "regression"}, NUMBERS, CLASSES, "outputs and targets of as many numbers"),
        ({"use": f"{__name__}.distance"}, NUMBERS, LABELS, r"distance failed on the 41 held-out samples: ValueError"),
        ({"use": "sklearn.metrics.f1_score"}, SCORES, CLASSES, "takes y_true first, and a metric is called with"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(settings: Any, outputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scores(settings, outputs, targets)


def test_two_metrics_with_one_name_are_refused() -> None:
    top = read_part("metrics", {"use": "top_k", "k": [2]}).build()
    with pytest.raises(UsageError, match=r"metrics\.0 and metrics\.1 both give acc2"):
        metrics_of([("metrics.0", top), ("metrics.1", top)], CrossEntropy().build())


def test_outputs_that_no_rank_can_hold_are_refused_at_the_first_batch() -> None:
    collected = Collected(Metric(distance, "metrics.distance"), 1 + MAX_BYTES // 8)
    with pytest.raises(UsageError, match=r"of all 536870913 held-out samples on every rank, 4.0 GB"):
        collected.add((0, 0), paddle.ones([2]), paddle.ones([2]), 2)
