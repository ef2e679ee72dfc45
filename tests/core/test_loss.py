"""A loss says what it is over, or is refused; and whatever form it says it in, the gradient is the one-process one."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from paddle_dp.core.loss import Loss, as_loss, total_and_count
from paddle_dp.data import Loader, Sampler
from paddle_dp.errors import LossError, TargetError
from paddle_dp.learner import Precision, full_model_learner
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from tests.house.datasets import Arrays
from tests.house.learners import Chain, numbers_of, task_of
from tests.ranks import run_ranks

CLIP = 0.5  # some of the gradients are longer, most are not: a wrong factor shows
IGNORED, WORDS, LENGTH, SAMPLES, BATCH, MICROS = -100, 7, 6, 23, 10, 3


class Texts(Arrays):
    """Rows of words, padded at the end: every sample has another number of targets, and some have none."""

    def __init__(self, padded: bool = True):
        draw = np.random.RandomState(0)
        super().__init__(*(draw.randint(0, WORDS, [SAMPLES, LENGTH]) for _ in range(2)))
        if padded:
            self.targets[np.arange(LENGTH)[None] >= draw.randint(0, LENGTH + 1, [SAMPLES, 1])] = IGNORED


class Model(Chain):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))


def kept_sum(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    """The form of the documentation: a total, and a tensor that counts."""
    return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=IGNORED), (
        targets != IGNORED
    ).sum()


class Counting:
    """The same with a count that is known before the forward."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return kept_sum(outputs, targets)

    def count(self, targets: paddle.Tensor) -> paddle.Tensor:
        return (targets != IGNORED).sum()


def per_token(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def whole_count(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    return F.cross_entropy(outputs, targets, reduction="sum"), int(targets.size)


def documented() -> Any:
    """The function on the page that tells how losses are written."""
    page = Path(__file__).resolve().parents[2] / "docs/add-a-part.md"
    (code,) = re.findall(r"```python\n# mine/losses.py\n(.*?)```", page.read_text(), re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    return found["padded"]


LOSSES: dict[str, Any] = {
    "documented": documented(),
    "kept_sum": kept_sum,
    "class": Counting(),
    "shelf": CrossEntropy(ignore_index=IGNORED).build(),
    "empty": kept_sum,
    "per_token": per_token,
    "whole_count": whole_count,
}
LAYOUTS: list[dict[str, Any]] = [
    {"use": "data_parallel"},
    {"use": "data_parallel", "recompute": "every 2 blocks"},
    {"use": "hybrid"},
    {"use": "hybrid", "sharding": 2, "sharding_stage": 2},
    {"use": "hybrid", "pipeline": 2},
    {"use": "hybrid", "pipeline": 2, "pipeline_schedule": "f_then_b"},
]


def texts(loss: str) -> Texts:
    """The data for a loss: with padding for those that leave it out; "empty": also a batch in which nothing counts."""
    data = Texts(padded=loss not in ("per_token", "whole_count"))
    if loss == "empty":
        data.targets[Sampler(SAMPLES, BATCH, seed=4).global_batch(0, 1)] = IGNORED
    return data


def by_hand(loss: str) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
    """Plain Paddle: the mean over what counts in each global batch, one optimizer step each."""
    paddle.seed(2)
    model, data = Model(), texts(loss)
    optimizer = paddle.optimizer.Momentum(
        0.5, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(CLIP)
    )
    share, losses = Sampler(SAMPLES, BATCH, seed=4), []
    for k in range(share.batches):
        chosen = share.global_batch(0, k)
        inputs, targets = paddle.to_tensor(data.inputs[chosen]), paddle.to_tensor(data.targets[chosen])
        # Paddle's own mean divides by all targets, also by those of a negative ignore_index (3.3.1).
        total = F.cross_entropy(model(inputs), targets, reduction="sum", ignore_index=IGNORED)
        count = int((data.targets[chosen] != IGNORED).sum())
        losses.append(total.item() / count if count else np.nan)
        if count:
            (total / count).backward()
            optimizer.step()
            optimizer.clear_grad()
    return losses, {name: weight.numpy() for name, weight in model.named_parameters()}


def learned(loss: str, mesh: Mesh, strategy: dict[str, Any] | None = None, dtype: Any = "float32") -> Any:
    """[losses, weights that lie here] of an epoch, in micro-batches (some are dummies), with a short last batch."""
    paddle.seed(2)
    clip, precision = {"grad_clip": nn.ClipGradByGlobalNorm(CLIP)}, Precision(dtype=dtype, scale=128.0)
    task = task_of(Model(), LOSSES[loss], "Momentum", 0.5, settings=clip, precision=precision)
    learner = read_part("strategies", strategy or {"use": "single"}).build(mesh).place(task)
    loader = Loader.plain(texts(loss), BATCH, learner.mesh, micro_batches=MICROS, seed=4)
    losses = [number for number, _ in numbers_of(learner, loader.read(0))]
    return losses, {name: tensor.numpy() for name, tensor in learner.placed.state().items()}


def everywhere(cases: list[list[Any]]) -> list[Any]:
    """In every rank: each case, one after another."""
    mesh = join()
    return [learned(loss, mesh, layout) for loss, layout in cases]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_form_is_the_mean_of_plain_paddle(loss: str) -> None:
    (losses, weights), (truth, wanted) = learned(loss, Mesh.alone()), by_hand(loss)
    np.testing.assert_allclose(losses, truth, rtol=2e-6)
    for name, weight in wanted.items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_has_the_same_mean_in_every_form(dtype: str) -> None:
    (truth, wanted), (losses, weights) = (
        learned(f, Mesh.alone(), dtype=dtype) for f in ("class", "kept_sum")
    )
    # Backward rounds another multiple of the same gradient.
    np.testing.assert_allclose(losses, truth, rtol=1e-3)
    for name, weight in wanted.items():
        np.testing.assert_allclose(weights[name], weight, atol=2e-3, err_msg=name)


def test_every_form_in_every_layout_is_plain_paddle() -> None:
    cases = [("kept_sum", layout) for layout in LAYOUTS] + [("empty", layout) for layout in LAYOUTS[::2]]
    cases += [("per_token", LAYOUTS[0]), ("class", LAYOUTS[4])]
    found = run_ranks(everywhere, 2, cases)
    for place, (loss, layout) in enumerate(cases):
        truth, wanted = by_hand(loss)
        weights = {**found[0][place][1], **found[1][place][1]}
        assert weights.keys() == wanted.keys()
        for rank in found:
            np.testing.assert_allclose(rank[place][0], truth, rtol=2e-6, err_msg=f"{loss} {layout}")
        for name, weight in wanted.items():
            np.testing.assert_allclose(weights[name], weight, atol=1e-6, err_msg=f"{loss} {layout} {name}")


def test_a_pair_is_taken_as_it_is() -> None:
    total, count = total_and_count((paddle.to_tensor(6.0), 3), 3)
    assert (total.item(), count) == (6.0, 3)


def test_one_loss_per_sample_is_added_up() -> None:
    loss = nn.CrossEntropyLoss(reduction="none")(paddle.zeros([5, 2]), paddle.zeros([5], "int64"))
    total, count = total_and_count(loss, 5)
    assert count == 5
    assert total.item() == pytest.approx(5 * 0.6931472)


def test_paddle_s_layer_does_not_hide_a_nan() -> None:
    """Its kernel on CPUs takes NaN for a very small score: log 200 would come out."""
    loss = as_loss(nn.CrossEntropyLoss(reduction="none"))
    total, count = loss(paddle.full([4, 200], math.nan), paddle.zeros([4], "int64"))
    assert math.isnan(total.item()) and count == 4
    assert loss(paddle.zeros([4, 200]), paddle.zeros([4], "int64"))[0].item() == pytest.approx(
        4 * math.log(200)
    )


def test_a_sum_of_low_precision_is_added_up_in_float32() -> None:
    total, count = total_and_count(paddle.ones([1000]).astype("bfloat16"), 1000)
    assert (total.item(), count, total.dtype) == (1000.0, 1000, paddle.float32)


class Writing:
    """As PaddleSeg's DiceLoss: what it ignores becomes class 0 in its own arguments."""

    def __call__(self, outputs: Any, targets: Any) -> Any:
        targets["class"][targets["class"] == 255] = 0
        return outputs[0].sum(), len(targets["class"])


class WritingScored(Writing):
    def scores(self, outputs: Any, targets: Any) -> Any:
        return {"ignored": (targets["class"] == 255).sum()}


def test_what_a_loss_writes_into_its_targets_is_put_back_where_others_read_them() -> None:
    def called(loss: Any) -> tuple[Any, Any]:
        outputs, targets = [paddle.ones([3])], {"class": paddle.to_tensor([0, 255, 255])}
        as_loss(loss)(outputs, targets)
        return outputs[0].tolist(), targets["class"].tolist()

    with paddle.no_grad():
        assert called(Writing()) == ([1.0, 1.0, 1.0], [0, 255, 255])
    assert called(WritingScored())[1] == [0, 255, 255]  # in training, for its scores
    assert called(Writing())[1] == [0, 0, 0]  # in training nobody reads them afterwards: no copy is made

    def into_outputs(outputs: Any, targets: Any) -> Any:
        outputs["logits"][:] = 0.0
        return outputs["logits"].sum(), 1

    with (
        paddle.no_grad(),
        pytest.raises(LossError, match="writes into the model's outputs, which metrics read"),
    ):
        as_loss(into_outputs)(OrderedDict(logits=paddle.ones([3])), paddle.to_tensor([0]))


class Outputs(OrderedDict):
    """As PaddleNLP's ModelOutput."""


def test_what_a_loss_takes_out_of_its_arguments_is_there_for_others_in_evaluations() -> None:
    def loss(outputs: Any, targets: Any) -> Any:
        targets["class"] = targets["class"].squeeze_(-1) * 0
        assert type(outputs) is Outputs
        return outputs["logits"].sum() + outputs.pop("auxiliary").sum() + outputs["layers"].pop().sum(), 1

    outputs = Outputs(logits=paddle.ones([2]), auxiliary=paddle.ones([2]), layers=[paddle.ones([2])])
    targets = {"class": paddle.to_tensor([[1], [2]])}
    with paddle.no_grad():
        assert [as_loss(loss)(outputs, targets)[0].item() for _ in range(2)] == [6.0, 6.0]
    assert [*outputs] == ["logits", "auxiliary", "layers"] and len(outputs["layers"]) == 1
    assert targets["class"].tolist() == [[1], [2]]


def test_a_loss_gets_the_model_s_own_outputs_in_evaluations_too() -> None:
    """A copy has no attributes of a user's."""

    def loss(outputs: Any, targets: Any) -> Any:
        return outputs.sum() + outputs.auxiliary, 1

    outputs = paddle.ones([3])
    outputs.auxiliary = 4.0
    with paddle.no_grad():
        assert as_loss(loss)(outputs, paddle.to_tensor([0]))[0].item() == 7.0


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (paddle.to_tensor(1.0), "reduction='none'"),
        (3.0, "float, without its count"),
        ((paddle.ones([4]), 4), r"a total of shape \[4\]: the total must be the sum"),
        ((paddle.ones([]), paddle.ones([4])), r"a count of shape \[4\]"),
    ],
)
def test_a_result_without_a_count_is_refused(result: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        total_and_count(result, 4)


def test_the_divisors_on_the_page_about_fleet_are_those_of_paddles_means() -> None:
    """It gave `weights[targets]` for ignored targets, too, which reads other memory at -100. Paddle divides at a
    negative `ignore_index` by all targets."""
    page = (Path(__file__).parents[2] / "docs/coming-from/fleet.md").read_text(encoding="utf-8")
    weighted, ignoring = re.findall(r"`\(losses\.sum\(\), (.*?\.sum\(\))\)`", page)
    outputs, weights = paddle.randn([4, 3]), paddle.to_tensor([0.5, 2.0, 3.0])
    targets, masked = paddle.to_tensor([0, 2, 1, 2]), paddle.to_tensor([0, 2, 1, -100])
    known = {"weights": weights, "targets": targets}
    for settings, labels, count in (
        ({"weight": weights}, targets, float(eval(weighted, known))),
        ({"ignore_index": 0}, targets, float(eval(ignoring, known))),
        ({"ignore_index": -100}, masked, 4.0),
    ):
        losses = nn.CrossEntropyLoss(**settings, reduction="none")(outputs, labels)
        mean = nn.CrossEntropyLoss(**settings)(outputs, labels)
        np.testing.assert_allclose(float(losses.sum()) / count, float(mean), rtol=1e-5, err_msg=str(settings))


def test_counts_samples_is_checked_against_the_returned_count() -> None:
    class Promising:
        counts_samples = True

        def __call__(self, outputs: Any, targets: Any) -> Any:
            return outputs.sum(), targets.size

    loss = as_loss(Promising())
    assert loss.counted == "samples" and loss(paddle.ones([3]), paddle.ones([3]))[1] == 3
    with pytest.raises(LossError, match="counts 12 in 3 samples: remove counts_samples"):
        loss(paddle.ones([3]), paddle.ones([3, 4]))


def padded(outputs: paddle.Tensor, targets: paddle.Tensor, padding: int = -100) -> Any:
    """The loss of docs/add-a-part.md."""
    total = F.cross_entropy(outputs, targets, reduction="sum", ignore_index=padding)
    return total, (targets != padding).sum()


def test_a_target_that_the_loss_ignores_is_not_blamed_for_another() -> None:
    outputs = paddle.zeros([3, 4])
    settings = {"ignore_index": 255, "reduction": "none"}
    for function in (
        partial(padded, padding=255), nn.CrossEntropyLoss(**settings), partial(F.cross_entropy, **settings)
    ):  # fmt: skip
        with pytest.raises(TargetError, match="target 7 is no class: the 4 classes") as caught:
            as_loss(function)(outputs, paddle.to_tensor([1, 255, 7]))
        assert caught.value.row == 2
    with pytest.raises(TargetError, match="target 255 is no class"):
        as_loss(padded)(outputs, paddle.to_tensor([-100, 255, 7]))
    with pytest.raises(TargetError, match="target -100 is no class"):
        as_loss(nn.CrossEntropyLoss(**settings))(outputs, paddle.to_tensor([-100, 255, 7]))


def test_a_loss_is_wrapped_once() -> None:
    loss = as_loss(kept_sum)
    assert isinstance(loss, Loss) and as_loss(loss) is loss and loss.counted == "answers"
    assert loss.scores(paddle.ones([1]), paddle.ones([1])) == {} and loss.parallel(None) is None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("loss", ["kept_sum", "class"])
def test_a_batch_in_which_nothing_counts_makes_no_update(loss: str, dtype: Any) -> None:
    paddle.seed(2)
    task = task_of(Model(), LOSSES[loss], "AdamW", 0.5, dtype=dtype)
    learner, data = full_model_learner(task, Mesh.alone()), Texts()
    data.targets[:] = IGNORED
    before = [p.numpy().copy() for p in learner.model.parameters()]
    for collect_metrics, batch in zip(
        (True, False), Loader(data, Sampler(SAMPLES, BATCH, micro_batches=2)).read(0), strict=False
    ):
        metrics = learner.train_batch(batch, collect_metrics)
        assert learner.empty
        assert np.isnan(metrics["loss"]) if collect_metrics else metrics is None
        for parameter, weight in zip(learner.model.parameters(), before, strict=True):
            np.testing.assert_array_equal(parameter.numpy(), weight)


def test_a_users_attribute_named_ignored_is_no_class() -> None:
    own = type("Own", (), {"ignored": 0, "__call__": lambda self, outputs, targets: outputs})()
    assert as_loss(own).ignored is None
    assert as_loss(CrossEntropy(ignore_index=3).build()).ignored == 3
    assert as_loss(paddle.nn.CrossEntropyLoss(ignore_index=2)).ignored == 2


@pytest.mark.parametrize(
    ("outputs", "returns"),
    [
        (lambda y: (y,), "a tuple of 1 item"),
        (lambda y: [y, y], "a list of 2 items"),
        (lambda y: {"logits": y}, "a dict of 'logits'"),
    ],
)
@pytest.mark.parametrize("loss", [partial(F.cross_entropy, reduction="none"), lambda y, t: F.softmax(y)])
def test_a_loss_that_takes_a_tuple_for_a_tensor_is_told_what_the_model_returns(
    loss: Any, outputs: Any, returns: str
) -> None:
    with pytest.raises(
        (AttributeError, ValueError), match=f"your model returns {returns}, and the loss gets"
    ):
        as_loss(loss)(outputs(paddle.rand([3, 4])), paddle.zeros([3], "int64"))


def test_an_index_that_a_tuple_of_outputs_lacks_and_other_errors() -> None:
    y, t = paddle.rand([3, 4]), paddle.zeros([3], "int64")
    with pytest.raises(IndexError, match=r"^tuple index out of range \(your model returns a tuple of 1 item"):
        as_loss(lambda y, t: y[1])((y,), t)
    with pytest.raises(AttributeError) as other:
        as_loss(lambda y, t: y.nothing)(y, t)
    assert "your model" not in str(other.value)
    with pytest.raises(AttributeError) as other:
        as_loss(lambda outputs, t: outputs[0].nothing)((y,), t)
    assert "your model" not in str(other.value)
