"""The metrics of the shelf give scikit-learn's numbers on the same outputs, and refuse outputs of another form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle as framework
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
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


def sklearn() -> Any:
    """scikit-learn's metrics, which take seconds to import."""
    from sklearn import metrics

    return metrics


def scores(
    settings: dict[str, Any], outputs: Any, targets: Any, cuts: Sequence[int] = (7, 20), loss: Any = None
) -> dict[str, float]:
    """The scores of outputs and targets that are collected in micro-batches, in another order than the samples'."""
    function = read_part("metrics", settings).build()
    (metric,) = metrics_of([(f"metrics.{settings['use']}", function)], loss)
    return collected(metric, outputs, targets, cuts)


def collected(metric: Metric, outputs: Any, targets: Any, cuts: Sequence[int] = (7, 20)) -> dict[str, float]:
    held, bounds = Collected(metric, len(outputs)), [0, *cuts, len(outputs)]
    for first, end in reversed([*pairwise(bounds)]):
        pair = (paddle.to_tensor(outputs[first:end]), paddle.to_tensor(targets[first:end]))
        micro_batch = MicroBatch(None, pair[1], end - first, first)
        held.add(Batch((micro_batch,), len(outputs), 0, 0), micro_batch, *pair)
    return held.scores(Mesh.alone(), held.gathered(Mesh.alone()), {})


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("targets", [CLASSES, LABELS], ids=["classes", "labels"])
def test_precision_recall_and_f1(average: str, targets: Any) -> None:
    result = scores({"use": "classification", "average": average}, SCORES, targets)
    predicted = SCORES > 0 if targets.ndim == 2 else SCORES.argmax(1)
    expected = sklearn().precision_recall_fscore_support(targets, predicted, average=average, zero_division=0)
    assert [result[name] for name in ("precision", "recall", "f1")] == pytest.approx(expected[:3], abs=1e-12)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_without_a_positive_label_or_a_target_that_counts_they_are_0(average: str) -> None:
    """A weighted mean ended in a ZeroDivisionError, and with it the training."""
    zeros = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    settings = {"use": "classification", "average": average}
    assert scores(settings, SCORES, np.zeros_like(LABELS)) == zeros
    assert scores({**settings, "ignore_index": 9}, SCORES, np.full(41, 9)) == zeros


def test_top_k() -> None:
    result = scores({"use": "top_k", "k": [2, 3, 6]}, SCORES, CLASSES)
    for k in (2, 3):
        expected = sklearn().top_k_accuracy_score(CLASSES, SCORES, k=k, labels=range(6))
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
        sklearn().roc_auc_score(YES, TWO[:, 1].astype("float64") - TWO[:, 0]), abs=1e-12
    )
    assert scores({"use": "auc"}, SCORES[:, 0], YES.astype("float32"))["auc"] == pytest.approx(
        sklearn().roc_auc_score(YES, SCORES[:, 0]), abs=1e-12
    )
    assert scores({"use": "auc"}, SCORES, LABELS)["auc"] == pytest.approx(
        sklearn().roc_auc_score(LABELS, SCORES), abs=1e-12
    )
    chances = np.exp(SCORES.astype("float64"))
    chances /= chances.sum(1, keepdims=True)
    each = [sklearn().roc_auc_score(c == CLASSES, chances[:, c]) for c in np.unique(CLASSES)]
    assert scores({"use": "auc"}, SCORES, CLASSES)["auc"] == pytest.approx(np.mean(each), abs=1e-12)


def test_average_precision() -> None:
    assert scores({"use": "average_precision"}, SCORES, LABELS)["average_precision"] == pytest.approx(
        sklearn().average_precision_score(LABELS, SCORES), abs=1e-12
    )


def test_regression() -> None:
    outputs = NUMBERS + 0.3 * RANDOM.standard_normal(NUMBERS.shape).astype("float32")
    true, predicted = NUMBERS.astype("float64") + 1e6, outputs.astype("float64") + 1e6  # a mean far from 0
    result = scores({"use": "regression"}, predicted, true)
    assert result["r2"] == pytest.approx(sklearn().r2_score(true, predicted), abs=1e-12)
    assert result["mae"] == pytest.approx(sklearn().mean_absolute_error(true, predicted), abs=1e-12)
    root = np.sqrt(sklearn().mean_squared_error(true, predicted, multioutput="raw_values")).mean()
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
    function = read_part("metrics", {"use": "perplexity", "bytes_per_token": 2}).build()
    (metric,) = metrics_of([("metrics.perplexity", function)], CrossEntropy(ignore_index=3).build())
    held = Collected(metric, 3)
    result = held.scores(Mesh.alone(), held.gathered(Mesh.alone()), {"loss": np.log(8)})
    assert result == pytest.approx({"perplexity": 8, "bits_per_byte": 1.5}, abs=1e-12)
    for loss in (BinaryCrossEntropy().build(), CrossEntropy(label_smoothing=0.1).build(), distance):
        with pytest.raises(UsageError, match="e to the mean cross-entropy"):
            metrics_of([("metrics.perplexity", function)], loss)


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
        ({"use": "top_k"}, SCORES, LABELS, r"metrics.top_k: it takes outputs \[n, classes\]"),
        ({"use": "auc"}, SCORES, NUMBERS, "metrics.auc: it takes outputs"),
        ({"use": "auc"}, TWO, YES * 0, "no class has both a held-out sample and one of another class"),
        ({"use": "retrieval", "k": [41]}, SCORES, CLASSES, "41 others are wanted, and there are 40"),
        ({"use": "regression"}, NUMBERS, CLASSES, "numbers of one shape"),
        ({"use": f"{__name__}.distance"}, NUMBERS, LABELS, r"distance failed: ValueError: .*test_scores.py, line"),
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
    held, micro_batch = (
        Collected(Metric(distance, "metrics.distance"), 1 + MAX_BYTES // 8),
        MicroBatch(None, np.zeros(2), 2),
    )
    held.add(Batch((micro_batch,), 2, 0, 0), micro_batch, paddle.ones([2]), paddle.ones([2]))
    with pytest.raises(UsageError, match=r"of all 134217729 held-out samples on every rank, 1.0 GB"):
        held.refuse_failed(Mesh.alone())


# Numbers that were wrong without an error, when the metrics were attacked ---------------------------------------------


IGNORING = np.where(np.arange(41) % 3 == 0, -100, CLASSES)


@pytest.mark.parametrize("use", ["top_k", "classification", "auc", "average_precision"])
def test_targets_that_the_loss_ignores_do_not_count(use: str) -> None:
    kept = IGNORING != -100
    expected = scores({"use": use}, SCORES[kept], CLASSES[kept], (3,))
    for loss in (CrossEntropy(ignore_index=-100).build(), paddle.nn.CrossEntropyLoss()):
        assert scores({"use": use}, SCORES, IGNORING, loss=loss) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(UsageError, match=rf"metrics.{use}: target -100 is no class.*set ignore_index: -100"):
        scores({"use": use}, SCORES, IGNORING, loss=CrossEntropy().build())
    with pytest.raises(UsageError, match=rf"metrics.{use}: target 6 is no class: the 6 classes are 0 to 5"):
        scores({"use": use}, SCORES, CLASSES + 1)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(soft_label=True), partial(nn.functional.cross_entropy, soft_label=True)]
)
@pytest.mark.parametrize("use", ["classification", "auc", "average_precision"])
def test_a_loss_of_shares_of_classes_is_refused(use: str, loss: Any) -> None:
    """One-hot targets were taken for yes-or-no labels."""
    with pytest.raises(UsageError, match=rf"metrics.{use}: targets of this loss \(soft_label\) are shares"):
        scores({"use": use}, SCORES, CLASSES, loss=loss)


class Smoothed(nn.CrossEntropyLoss):
    """It learns from class numbers, and makes shares of them itself."""

    def __init__(self) -> None:
        super().__init__(soft_label=True, reduction="none")
        self.keywords = ["of", "users"]

    def forward(self, outputs: Any, targets: Any) -> Any:
        return super().forward(outputs, nn.functional.one_hot(targets, outputs.shape[-1]))


@pytest.mark.parametrize("use", ["top_k", "classification", "auc", "average_precision"])
def test_attributes_of_a_users_loss_are_their_own(use: str) -> None:
    """`soft_label` was believed of any object, and `keywords` was taken for a partial's."""
    named = type("Named", (), {"soft_label": True, "keywords": {"soft_label": True}})()
    for loss in (Smoothed(), named, partial(Smoothed(), soft_label=True)):
        assert scores({"use": use}, SCORES, CLASSES, loss=loss) == scores({"use": use}, SCORES, CLASSES)


def test_a_switch_of_the_loss_is_no_class() -> None:
    loss = type("Switched", (), {"ignore_index": True})()
    assert scores({"use": "classification"}, SCORES, CLASSES, loss=loss) == scores(
        {"use": "classification"}, SCORES, CLASSES
    )


@pytest.mark.parametrize("use", ["classification", "auc", "average_precision"])
@pytest.mark.parametrize("wrong", [-100, 0.3, np.nan])
def test_labels_are_yes_or_no(use: str, wrong: float) -> None:
    targets = LABELS.copy()
    targets[5, 2] = wrong
    with pytest.raises(UsageError, match="labels are 0 or 1, and one of these targets is"):
        scores({"use": use}, SCORES, targets)


def test_labels_of_probabilities_are_refused_where_a_threshold_decides() -> None:
    with pytest.raises(UsageError, match="all outputs are from 0 to 1: give logits"):
        scores({"use": "classification"}, 1 / (1 + np.exp(-SCORES)), LABELS)
    assert scores({"use": "classification"}, SCORES[:, :1], YES) == scores(
        {"use": "classification"}, SCORES[:, 0], YES
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"use": "top_k"},
        {"use": "classification"},
        {"use": "auc"},
        {"use": "average_precision"},
        {"use": "retrieval"},
    ],
)
def test_an_output_that_is_nan_makes_the_scores_nan(settings: dict[str, Any]) -> None:
    outputs = SCORES.copy()
    outputs[3, 2] = np.nan
    assert all(np.isnan([*scores(settings, outputs, CLASSES).values()]))


@pytest.mark.parametrize("use", ["top_k", "classification", "auc", "average_precision", "retrieval"])
def test_outputs_of_16_bits_are_scored(use: str) -> None:
    for dtype in ("float16", "bfloat16"):
        rounded = framework.to_tensor(SCORES).astype(dtype)
        pair = rounded.astype("float32").numpy(), CLASSES
        (metric,) = metrics_of([(use, read_part("metrics", {"use": use}).build())], None)
        held, micro_batch = Collected(metric, 41), MicroBatch(None, CLASSES, 41)
        held.add(Batch((micro_batch,), 41, 0, 0), micro_batch, rounded, framework.to_tensor(CLASSES))
        found = held.scores(Mesh.alone(), held.gathered(Mesh.alone()), {})
        assert found == pytest.approx(scores({"use": use}, *pair), rel=1e-6)


class Sums:
    """A user's, with what `values` makes of a micro-batch."""

    names = ("total",)

    def __init__(self, values: Any):
        self.values = values

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {"total": self.values(outputs)}

    def compute(self, sums: Any) -> dict[str, Any]:
        return {"total": sums["total"].sum()}


BUFFER = np.zeros(1, "float32")


def filled(outputs: Any) -> np.ndarray:
    BUFFER[0] = len(outputs)
    return BUFFER


@pytest.mark.parametrize(
    ("values", "total"),
    [
        (lambda outputs: (outputs < 1e9).all(), 41),
        (lambda outputs: np.uint8(20), 820),
        (lambda outputs: np.int32(2**30), 41 * 2**30),
        (lambda outputs: np.float32(2**24 + 1 - 1), 41 * 2**24),
        (lambda outputs: paddle.to_tensor(2**24, "float32"), 41 * 2**24),
        (filled, 41),
    ],
)
def test_sums_are_added_up_in_64_bits(values: Any, total: int) -> None:
    metric = Metric(Sums(values), "metrics.mine")
    assert collected(metric, SCORES, CLASSES, range(1, 41))["total"] == total


class InPlace(Sums):
    """Divides the totals in place."""

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {"each": outputs.sum(0), "hits": len(outputs), "samples": len(outputs)}

    def compute(self, sums: Any) -> dict[str, Any]:
        sums["each"] /= sums["samples"]
        sums["hits"] /= sums["samples"]
        return {"total": sums["hits"] + sums["each"].sum()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_metric_may_change_its_totals_on_any_number_of_ranks(ranks: int) -> None:
    """In one process they could not be written, and whole numbers not be divided in place."""
    held = Collected(Metric(InPlace(None), "mine"), 41)
    pair = (paddle.to_tensor(SCORES), paddle.to_tensor(CLASSES))
    micro_batch = MicroBatch(None, pair[1], 41)
    held.add(Batch((micro_batch,), 41, 0, 0), micro_batch, *pair)
    (content,) = held.gathered(Mesh.alone())
    expected = 1 + SCORES.mean(0, "float64").sum()
    assert held.scores(Mesh.alone(), [content] * ranks, {})["total"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("function", [lambda x: x.mean(), lambda x: x.max(), lambda x: x.mean(0)])
def test_sums_that_do_not_add_up_are_refused(function: Any) -> None:
    """They would be other numbers on other ranks. Whether they add up is tried once, on several samples."""
    outputs, targets = paddle.to_tensor(SCORES), paddle.to_tensor(CLASSES)
    metric = Metric(Sums(function), "metrics.mine")
    for samples in (1, 41):
        micro_batch = MicroBatch(None, targets[:samples], samples)
        held, arguments = Collected(metric, 41), (outputs[:samples], targets[:samples])
        held.add(Batch((micro_batch,), samples, 0, 0), micro_batch, *arguments)
        with pytest.raises(UsageError, match=r"metrics\.mine: .* halves") if samples > 1 else nullcontext():
            held.refuse_failed(Mesh.alone())


def test_sums_of_other_lengths_are_refused_within_a_rank_and_between_ranks() -> None:
    """One element would be added to each of the others."""
    counts, refused = (
        Sums(lambda x: np.ones(len(x))),
        r"metrics\.mine: its sum 'total' is \[.\] for some samples",
    )
    contents = []
    for samples in (1, 3):
        held = Collected(Metric(counts, "metrics.mine"), 4)
        held.metric.tried = True
        arguments = paddle.to_tensor(SCORES[:samples]), paddle.to_tensor(CLASSES[:samples])
        micro_batch = MicroBatch(None, arguments[1], samples)
        held.add(Batch((micro_batch,), samples, 0, 0), micro_batch, *arguments)
        contents += held.gathered(Mesh.alone())
    with pytest.raises(UsageError, match=refused):
        held.scores(Mesh.alone(), contents, {})
    one = MicroBatch(None, arguments[1][:1], 1)
    held.add(Batch((one,), 1, 0, 0), one, *(argument[:1] for argument in arguments))
    with pytest.raises(UsageError, match=refused):
        held.refuse_failed(Mesh.alone())


class Kept(Sums):
    """Adds nothing up but the number of samples, and keeps the outputs."""

    def __init__(self) -> None:
        self.scores: list[Any] = []

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        self.scores.append(outputs.numpy())
        return {"samples": len(outputs)}

    def compute(self, sums: Any) -> dict[str, Any]:
        return {"total": sum(map(len, self.scores))}


def test_a_metric_that_remembers_sees_every_sample_once() -> None:
    assert collected(Metric(Kept(), "mine"), SCORES, CLASSES) == {"total": 41}


def losses(outputs: Any) -> Any:
    return (outputs * 1.37).sum()


@pytest.mark.parametrize(
    ("outputs", "values"),
    [
        (paddle.to_tensor(SCORES**2).astype("bfloat16"), losses),
        (paddle.to_tensor(SCORES**2).astype("bfloat16"), lambda outputs: float(losses(outputs))),
        (paddle.to_tensor(SCORES**2), lambda outputs: losses(outputs).astype("bfloat16")),
        (paddle.ones([30, 41, 6]), lambda outputs: outputs.mean(0).sum()),  # time first
        (paddle.ones([82, 6]), lambda outputs: outputs[::2].max(0).sum()),  # two rows for each sample
    ],
)
def test_sums_that_are_rounded_and_outputs_without_a_row_for_each_sample_are_not_refused(
    outputs: Any, values: Any
) -> None:
    for targets in (paddle.to_tensor(CLASSES[:samples]) for samples in range(31, 42)):
        micro_batch, samples = MicroBatch(None, targets, len(targets)), len(targets)
        part = outputs[:samples] if len(outputs) == 41 else outputs
        held = Collected(Metric(Sums(values), "mine"), 41)
        held.add(Batch((micro_batch,), samples, 0, 0), micro_batch, part, targets)


def test_a_metric_that_changes_its_arguments_changes_no_other() -> None:
    def clearing(outputs: Any) -> Any:
        outputs.scale_(0.0)
        return outputs.sum()

    outputs, targets = paddle.to_tensor(SCORES), paddle.to_tensor(CLASSES)
    micro_batch = MicroBatch(None, targets, 41)
    Collected(Metric(Sums(clearing), "mine"), 41).add(
        Batch((micro_batch,), 41, 0, 0), micro_batch, outputs, targets
    )
    assert (outputs.numpy() == SCORES).all()


@pytest.mark.parametrize("name", ["step", "samples", "lr", "epoch", "ema_loss"])
def test_names_of_other_numbers_are_refused(name: str) -> None:
    def score(outputs: Any, targets: Any) -> float:
        return 1.0

    score.__name__ = name
    with pytest.raises(UsageError, match=f"gives {name}, which is the name of another number"):
        Metric(score, "metrics.mine")


def targets_first(labels_true: Any, labels_pred: Any) -> float:
    return 0.0


def renamed(x: Any, preds: Any) -> float:
    return 0.0


class WithoutCompute:
    names = ("a",)

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {}


class NamedByText:
    names = "iou"

    def compute(self, numbers: Any) -> dict[str, Any]:
        return {"iou": 1.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (targets_first, "takes labels_true first"),
        (renamed, "takes x first"),
        (WithoutCompute(), "has sums, and no compute"),
        (None, "is no metric"),
        (lambda outputs: 1, "is called with 2 arguments, and does not take them"),
        (paddle.metric.Accuracy(), "does not take them|takes pred first|is the name"),
        (NamedByText(), "names must be a tuple of names, not 'iou'"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Metric(function, "metrics.mine")


@pytest.mark.parametrize("value", ["0.5", None, [0.5, 0.5], {"a": 1}])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"metrics\.mine: score must be a number, not"):
        collected(
            Metric(
                type("M", (), {"names": ("score",), "__call__": lambda s, o, t: {"score": value}})(),
                "metrics.mine",
            ),
            SCORES,
            CLASSES,
        )


def test_a_number_of_any_kind_is_one() -> None:
    for value in (np.array([0.5]), paddle.to_tensor(0.5), np.float32(0.5)):
        assert collected(Metric(lambda outputs, targets, v=value: v, "mine"), SCORES, CLASSES) == {
            "metric": 0.5
        }


def test_samples_of_different_lengths_are_refused_by_name() -> None:
    held = Collected(Metric(distance, "metrics.distance"), 4)
    for first, length in ((0, 3), (2, 5)):
        targets = paddle.ones([2, length])
        micro_batch = MicroBatch(None, targets, 2, first)
        held.add(Batch((micro_batch,), 4, 0, 0), micro_batch, targets, targets)
    with pytest.raises(UsageError, match=r"metrics.distance needs samples of one shape, not \[3\] and \[5\]"):
        held.scores(Mesh.alone(), held.gathered(Mesh.alone()), {})


def test_rows_are_in_the_order_of_their_places() -> None:
    def first(outputs: Any, targets: Any) -> float:
        return float((outputs * np.arange(4)).sum())

    held = Collected(Metric(first, "mine"), 4)
    for places in ((2, 0), (3, 1)):
        values = paddle.to_tensor(places, "float32")
        micro_batch = MicroBatch(None, values, 2, 0, places)
        held.add(Batch((micro_batch,), 4, 0, 0), micro_batch, values, values)
    assert held.scores(Mesh.alone(), held.gathered(Mesh.alone()), {}) == {"first": 0 + 1 + 4 + 9}


def test_metrics_of_paddle_get_all_samples_and_forget_them() -> None:
    probabilities = np.exp(TWO) / np.exp(TWO).sum(-1, keepdims=True)
    for metric, outputs in (
        (framework.metric.Auc(), probabilities),
        (framework.metric.Precision(), probabilities[:, 1:]),
        (framework.metric.Recall(), probabilities[:, 1:]),
    ):
        (used,) = metrics_of([("m", metric)], None)
        again = [used.scores({"outputs": outputs, "targets": YES[:, None]}) for _ in range(2)]
        metric.update(outputs, YES[:, None])
        assert again == [{used.names[0]: metric.accumulate()}] * 2
        with pytest.raises(UsageError, match="takes probabilities, and there are outputs below 0 or above 1"):
            used.scores({"outputs": TWO * 9, "targets": YES[:, None]})


def test_a_metric_of_paddle_has_the_names_that_it_is_given() -> None:
    metric = framework.metric.Accuracy(topk=(1, 2))
    assert metrics_of([("m", metric)], None)[0].names == ("acc_top1", "acc_top2")
    metric.name = lambda: "under one name"
    metric.names = ("one", "two")
    (used,) = metrics_of([("m", metric)], None)
    assert set(used.scores({"outputs": SCORES, "targets": CLASSES})) == {"one", "two"}


class Mean(framework.metric.Metric):
    """A mean that divides by 0 before the first sample, as many do, with an attribute `names` of something else."""

    names = ("cat", "dog")

    def name(self) -> str:
        return "mean"

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, outputs: np.ndarray, targets: np.ndarray) -> None:
        self.total, self.count = outputs.sum(), outputs.size

    def accumulate(self) -> float:
        return self.total / self.count


class OfLogits(framework.metric.Auc):
    def compute(self, outputs: Any, targets: Any) -> Any:
        return nn.functional.softmax(outputs), targets


def test_metrics_of_paddle_are_judged_by_what_they_compute() -> None:
    (mean,) = metrics_of([("m", Mean())], None)
    assert mean.scores({"outputs": SCORES, "targets": CLASSES}) == {"mean": pytest.approx(SCORES.mean())}
    (auc,) = metrics_of([("m", OfLogits())], None)
    assert 0 <= auc.scores({"outputs": TWO * 9, "targets": YES[:, None]})["auc"] <= 1
