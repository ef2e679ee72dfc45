"""Losses over cut classes are the losses over whole ones: totals, counts, scores and gradients; then in training."""

import numpy as np
import pytest

from tests.house.training import trained_each
from tests.parity import assert_same
from tests.ranks import run_ranks

CLASSES = 12
LOSSES = [
    {"use": "cross_entropy"},
    {"use": "cross_entropy", "label_smoothing": 0.2},
    {"use": "cross_entropy", "ignore_index": 3},
    {"use": "cross_entropy", "ignore_index": -100, "label_smoothing": 0.1},
    {"use": "margin_softmax", "angle": 0.4, "cosine": 0.1, "scale": 16},
    {"use": "margin_softmax", "angle": 0.0, "cosine": 0.35, "scale": 30, "ignore_index": 5, "label_smoothing": 0.1},
]  # fmt: skip


def answers(loss, whole, outputs, targets):
    """What a loss says of these outputs, and the gradient that it gives them, over all classes."""
    total, count = loss(outputs, targets)
    (total * 0.7).backward()
    scores = {name: float(score) for name, score in loss.scores(outputs.detach(), targets).items()}
    said = {
        "said": loss.predictions(outputs.detach()),
        "many": loss.num_classes(outputs),
        "gradient": whole(outputs.grad),
    }
    return {"total": float(total), "count": float(count), **scores, **said}


def compared(strategy):
    """For every loss and shape: the answers from cut scores, and those from whole ones."""
    import paddle
    from paddle.distributed.fleet.layers.mpu import mp_ops

    from paddle_dp.axes.tensor.vocab_parallel_loss import vocab_parallel
    from paddle_dp.core.loss import as_loss
    from paddle_dp.mesh import join
    from paddle_dp.part import read_part

    mesh = join(seed=0)
    placer = read_part("strategies", {"use": "hybrid", "tensor": mesh.ranks}).build(mesh)
    group, found = placer.hcg.get_model_parallel_group(), []
    random = np.random.default_rng(5)
    for settings in strategy:
        for shape in ((40,), (6, 7)):
            # Rounded: there are equals.
            scores = random.uniform(-1, 1, (*shape, CLASSES)).astype("float32").round(2)
            numbers = random.integers(0, CLASSES, shape)
            if "ignore_index" in settings:
                numbers[random.random(shape) < 0.3] = settings["ignore_index"]
            loss, targets = read_part("losses", settings).build(), paddle.to_tensor(numbers)
            whole = paddle.to_tensor(scores, stop_gradient=False)
            part = paddle.split(paddle.to_tensor(scores), mesh.ranks, -1)[group.rank].clone()
            part.stop_gradient = False
            joined = lambda g: mp_ops._c_concat(g, group=group)  # noqa: E731
            cut = vocab_parallel(as_loss(loss), group)
            found.append([answers(cut, joined, part, targets), answers(loss, lambda g: g, whole, targets)])
    bad = vocab_parallel(as_loss(read_part("losses", {"use": "cross_entropy"}).build()), group)
    return found, refused(lambda: bad(part, paddle.full_like(targets, CLASSES))), refused(lambda: mean(group))


def mean(group):
    from paddle_dp.axes.tensor.vocab_parallel_loss import vocab_parallel
    from paddle_dp.core.loss import as_loss
    from paddle_dp.part import read_part

    vocab_parallel(as_loss(read_part("losses", {"use": "mean_squared_error"}).build()), group)


def refused(what):
    from paddle_dp.errors import PaddleDPError

    try:
        what()
    except PaddleDPError as error:
        return str(error)


def same(rows):
    for cut, whole in rows:
        assert set(cut) == set(whole)
        mine, truth = cut.pop("gradient"), np.array(whole.pop("gradient"))
        np.testing.assert_allclose(mine, truth, atol=1e-6 * np.abs(truth).max())
        np.testing.assert_allclose(cut.pop("total"), whole.pop("total"), rtol=1e-6)
        assert cut == whole


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_cut_classes_give_what_whole_ones_give(ranks):
    """12 classes on 4 ranks are 3 a rank: fewer than the 5 best that acc5 looks at."""
    for rows, of_no_class, refusal in run_ranks(compared, ranks, LOSSES):
        assert len(rows) == 2 * len(LOSSES)
        same(rows)
        assert f"target {CLASSES} is no class: the {CLASSES} classes" in of_no_class
        assert "cannot be computed from parts" in refusal


RECIPES = {
    "classifier": """
model: {use: large_classifier, inputs: 6, hidden: [16], width: 8, classes: 24, cosines: true}
dataset: {use: random_identities, features: 6, classes: 24, seen: 12, samples: 14, test_samples: 10}
loss: {use: margin_softmax, angle: 0.3, scale: 10, label_smoothing: 0.1}
optimizer: {use: adamw, clip: 0.5}
""",
    "gpt": """
model: {use: gpt, vocab: 32, width: 32, depth: 2, heads: 4, length: 16, tied: %s}
dataset: {use: random_tokens, vocab: 32, length: 16, samples: 14, test_samples: 10}
loss: {use: cross_entropy, ignore_index: 7, label_smoothing: 0.1}
optimizer: {use: adamw, clip: 0.5}
""",
    "vit": """
model: {use: vit, image: 8, patch: 4, channels: 1, classes: 10, width: 16, depth: 1, heads: 2}
dataset: {use: random_images, shape: [1, 8, 8], classes: 10, samples: 14, test_samples: 10}
loss: {use: cross_entropy}
optimizer: {use: adamw, clip: 0.5}
""",
}
REST = """
strategy: {strategy}
train: {{length: 3 steps, batch: 8, micro_batches: 2, seed: 3}}
callbacks: []
"""


def recipes(strategy, tied):
    rest = REST.format(strategy=strategy)
    return {name: (text % tied if name == "gpt" else text) + rest for name, text in RECIPES.items()}


@pytest.mark.parametrize(
    ("ranks", "strategy", "tied"),
    [
        (2, "{use: hybrid, tensor: 2}", "true"),
        pytest.param(4, "{use: hybrid, tensor: 2, data: 2}", "true", marks=pytest.mark.long),
        pytest.param(4, "{use: hybrid, tensor: 2, pipeline: 2}", "false", marks=pytest.mark.long),
    ],
)
def test_training_over_cut_classes_is_one_process(tmp_path, ranks, strategy, tied):
    """With smoothing, an ignored class, a margin, tied scores, and scores that are not cut at all (vit)."""
    one = run_ranks(trained_each, 1, recipes("{use: single}", tied), str(tmp_path / "one"))[0]
    cases = recipes(strategy, tied)
    if "pipeline" in strategy:
        del cases["classifier"]
    many = run_ranks(trained_each, ranks, cases, str(tmp_path / "many"), timeout=300)
    for name in cases:
        assert_same([found[name] for found in many], one[name])
        for found in many:
            assert found[name]["confusion"] == one[name]["confusion"], name
            assert (found[name]["confusion"] is None) == (name == "gpt")
