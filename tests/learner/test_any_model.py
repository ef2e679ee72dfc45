"""Models that nobody prepared, in stages and cut, against one process: losses, norms, weights, statistics and names."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.axes.meta_init import anatomy
from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import Annotation, annotate, read_part
from paddle_dp.plan import Shape, legal_layouts
from paddle_dp.train.state import model_shards, optimizer_shards
from tests.house.learners import numbers_of, task_of
from tests.house.programs import run_python
from tests.part.test_annotation import TEXTS, Texts
from tests.ranks import run_ranks

SAMPLES, BATCH, STEPS = 22, 8, 3  # two batches of 8 and one of 6
IN_ORDER = ("embed", "encoder.layers.*", ({"use": "paddle.mean", "axis": 1}, "head"))


def sequential():
    hidden = [nn.Linear(12, 16, bias_attr=False), nn.BatchNorm1D(16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 5))


def shared():
    """A layer and a dropout that are used twice, on two stages."""
    twice, drop = nn.Linear(12, 12), nn.Dropout(0.3)
    return nn.Sequential(nn.Flatten(), twice, drop, twice, drop, nn.Linear(12, 5))


def shipped(use, **settings):
    return lambda: read_part("models", {"use": use, "classes": 5, **settings}).build()


MODELS = {
    "sequential": sequential,
    "shared": shared,
    "resnet": shipped("resnet", depth=18, small_images=True),
    "convnet": shipped("convnet", channels=3, widths=[4, 8, 8]),
    "mlp": shipped("mlp", inputs=12, hidden=[16, 8, 8]),
    "classes": lambda: read_part(
        "models", {"use": "large_classifier", "inputs": 12, "hidden": [16], "classes": 6}
    ).build(),
    "texts": lambda: annotate(Texts(dropout=0.2), Annotation(cuts=TEXTS, blocks=IN_ORDER)),
}


class Invented:
    """Images of 2 × 2, or texts, of five classes."""

    def __init__(self, texts):
        draw = np.random.RandomState(0)
        size = 4 if texts == "large" else 2
        self.inputs = (
            draw.randint(0, 32, [SAMPLES, 6])
            if texts is True
            else draw.randn(SAMPLES, 3, size, size).astype("float32")
        )
        self.targets = draw.randint(0, 5, SAMPLES)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return self.inputs[i], self.targets[i]


def learn(cases):
    """Trains each (model, strategy) in the job's layout and then alone, in float64; how far apart they are here."""
    joined, found, alone = join(seed=3), [], {}
    one = read_part("strategies", {"use": "single"}).build(Mesh(rank=0, ranks=1, device="cpu"))
    for model, strategy in cases:
        many = read_part("strategies", {"use": "hybrid", **strategy}).build(joined)
        trained = _train(many, model)
        if model not in alone:
            alone[model] = _train(one, model)
        found.append(_compare(trained, alone[model], many.mesh))
    return found


def _train(strategy, model):
    paddle.seed(7)
    data = Invented(model == "texts")
    clip = paddle.nn.ClipGradByGlobalNorm(0.5)
    momentum = {"optimizer": "Momentum", "rate": 0.05, "settings": {"grad_clip": clip}}
    task = task_of(
        MODELS[model](), dtype="float64", samples=lambda: paddle.to_tensor(data.inputs[:2]), **momentum
    )
    learner = strategy.place(task)
    rows = numbers_of(learner, Loader.plain(data, BATCH, strategy.mesh, micro_batches=2, seed=1).read(0))
    learner.statistics.sync()
    learner.check("at the end")
    return learner, rows


def _compare(many, one, mesh):
    (learner, rows), (truth, expected) = many, one
    mine, whole = ({**model_shards(each), **optimizer_shards(each)} for each in (learner, truth))
    apart = {}
    for name, shard in mine.items():
        if "k_proj.bias" in name:  # adds the same to all scores of a token: its true gradient is zero
            continue
        box = shard.box.inside(whole[name].box)
        wanted = whole[name].array[box]
        apart[name] = float(np.abs(shard.array - wanted).max() / (np.abs(whole[name].array).max() + 1e-6))
    everyone = set().union(*mesh.gather(sorted(mine)))
    return {
        "rows": [rows, expected],
        "apart": sorted(((value, name) for name, value in apart.items()), reverse=True)[:3],
        "names": sorted(everyone ^ set(whole)),
        "mine": len(mine),
    }


def check(ranks, cases, allowed=1e-6):  # a ResNet makes 1e-16 a thousand million times larger in three steps
    for rank in run_ranks(learn, ranks, cases, timeout=300):
        for case, found in zip(cases, rank, strict=True):
            np.testing.assert_allclose(*found["rows"], rtol=allowed, err_msg=str(case))
            assert not found["apart"] or found["apart"][0][0] < allowed, (case, found["apart"])
            assert found["names"] == [], case


def proposed(name, ranks):
    """The layouts that a refusal would call legal for one of the models."""
    shape = Shape(length=6, batch=BATCH, micro_batches=2, anatomy=anatomy(MODELS[name]()))
    return [[name, degrees.as_dict()] for degrees in legal_layouts(shape, ranks)]


def test_on_two_ranks():
    """Among them every layout that is called legal for a model without tables, and for one that a recipe annotates."""
    axes = [axis for _, strategy in proposed("shared", 2) for axis, size in strategy.items() if size > 1]
    assert sorted(axes) == ["data", "pipeline", "sharding"]
    pipeline = {"pipeline": 2}
    interleaved = {**pipeline, "pipeline_schedule": "interleaved"}
    check(2, [
        ["sequential", {**pipeline, "partition": [2, 5]}],
        ["sequential", {**interleaved, "recompute": "full"}],
        ["shared", {**pipeline, "partition": [3, 3]}],
        ["shared", {**interleaved, "partition": [2, 1, 1, 2], "recompute": "full"}],
        ["convnet", {**pipeline, "partition": [3, 1]}],
        ["mlp", {**pipeline, "recompute": "every 2 blocks", "pipeline_schedule": "f_then_b"}],
        ["texts", {**pipeline, "partition": [1, 4]}],
        *proposed("texts", 2),
        ["texts", {"tensor": 2, "sequence_parallel": True, "recompute": "full"}],
    ])  # fmt: skip


@pytest.mark.long
def test_a_resnet_on_two_ranks():
    check(2, [["resnet", {"pipeline": 2, "pipeline_schedule": "interleaved", "recompute": "full"}]])


@pytest.mark.long
def test_on_four_ranks():
    check(4, [
        ["resnet", {"pipeline": 2, "data": 2, "sync_batch_norm": True}],
        ["sequential", {"pipeline": 2, "sharding": 2, "sharding_stage": 3, "sync_batch_norm": True}],
        ["texts", {"pipeline": 2, "tensor": 2, "partition": "parameters"}],
        ["classes", {"pipeline": 2, "tensor": 2}],
    ])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ["strategy.pipeline=2"]),
        (4, ["strategy.pipeline=4", "strategy.partition=uniform"]),
        (4, ["strategy.pipeline=2", "strategy.data=2", "strategy.sync_batch_norm=true", "train.batch=8"]),
        (10, ["strategy.pipeline=10"]),
    ],
)
def test_layers_on_devices(ranks, words):
    """The textbook's ResNet-50 in stages: what one process learns, also five layers a rank on ten."""
    command = ["-m", "paddle_dp", "verify", "configs/resnet50_pipeline.yaml", "--ranks", str(ranks)]
    small = ["--steps", "2", "train.batch=4", "train.micro_batches=2", "dataset.shape=[3,16,16]"]
    done = run_python(*command, *small, *words, timeout=600)
    assert "SAME" in done.stdout, done.stdout + done.stderr
