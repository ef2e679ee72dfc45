"""Sequence shards, between cut layers or on an axis of their own: one process's losses, norms and weights."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from models import gpt, vit
from paddle_dp.axes.sequence import ulysses
from paddle_dp.axes.sequence.megatron_sp import SequenceParallelizer
from paddle_dp.axes.sequence.ulysses import parallelize_sequence, sequence_shard
from paddle_dp.core.loss import as_loss
from paddle_dp.core.placement import Placements
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.losses.mean_squared_error import Config as MeanSquaredError
from paddle_dp.mesh import join
from paddle_dp.mesh.mesh import seed_ranks
from paddle_dp.part import read_part
from tests.house.learners import task_of
from tests.parity import QUICK, assert_same, train, truth
from tests.ranks import run_ranks

LENGTH = 16
SMALL = {"vocab": 32, "width": 32, "depth": 2, "heads": 4, "length": LENGTH}


def check(folder, model, ranks, layout):
    """Three steps of AdamW with clip, two micro-batches, and a short last batch, on both sides."""
    strategy = f"{{use: hybrid, {layout}}}"
    many = run_ranks(train, ranks, str(folder), strategy, model=model, timeout=600, **QUICK)
    assert_same(many, truth(model=model, **QUICK))


FOUR = "llama, kv_heads: 4"
DEFAULT = [(FOUR, 4, "sequence: 2, tensor: 2, sequence_parallel: true, recompute: selective")]
LONG = [
    ("gpt", 4, "pipeline: 2, tensor: 2, sequence_parallel: true, recompute: full"),
    *((model, 2, "tensor: 2, sequence_parallel: true") for model in ("gpt", "llama")),
    *((model, 4, "tensor: 2, data: 2, sequence_parallel: true") for model in ("gpt", "llama")),
    *((model, 2, "sequence: 2") for model in ("gpt", "llama")),
    *((model, 4, "sequence: 2, data: 2") for model in ("gpt", "llama")),
    *((model, 4, "sequence: 2, tensor: 2") for model in ("gpt", FOUR)),
    ("gpt", 4, "tensor: 4, sequence_parallel: true"),
    ("gpt", 4, "sequence: 4"),
    ("gpt", 4, "sequence: 2, pipeline: 2, recompute: every 2 blocks"),
    ("gpt", 4, "sequence: 2, sharding: 2, sharding_stage: 2"),
    ("gpt", 4, "tensor: 2, sharding: 2, sharding_stage: 3, sequence_parallel: true"),
    ("llama", 4, "pipeline: 2, tensor: 2, sequence_parallel: true"),
    ("gpt", 8, "sequence: 2, tensor: 2, pipeline: 2, sequence_parallel: true"),
]


@pytest.mark.parametrize(("model", "ranks", "layout"), DEFAULT)
def test_sequence_shards_are_one_process(tmp_path, model, ranks, layout):
    check(tmp_path, model, ranks, layout)


@pytest.mark.long
@pytest.mark.parametrize(("model", "ranks", "layout"), LONG)
def test_every_layout_with_sequence_shards_is_one_process(tmp_path, model, ranks, layout):
    check(tmp_path, model, ranks, layout)


def learned(strategy, mesh, model, loss, length=LENGTH):
    """[loss, gradient norm, scores] of two updates: batches of 6, then 4; two micro-batches, over the ranks."""

    def sample(i):
        random = np.random.RandomState(i)
        if hasattr(model, "length"):
            text = random.randint(0, 8, length + 1)  # each has the class 0, which a loss may ignore
            return text[:-1], text[1:]
        return random.randn(1, 8, 8).astype("float32"), random.randint(0, 5)

    learner = strategy.place(task_of(model, loss, "AdamW", 0.01))
    loader = Loader.plain([sample(i) for i in range(10)], 6, mesh, micro_batches=2)
    rows = []
    for batch in loader.read(0):
        metrics = learner.train_batch(batch, collect_metrics=True)
        norm = metrics.pop("gradient_norm")
        rows.append([*metrics.values(), norm])
    learner.check("at the end")
    return rows


def cases(settings):
    """Rows for gpt with a smoothed loss, and with a loss that counts; with sequence_parallel, for vit too."""
    strategy = read_part("strategies", {"use": "hybrid", **settings}).build(join(seed=3))
    losses = [CrossEntropy(label_smoothing=0.1), CrossEntropy(ignore_index=0)]
    made = [(lambda: gpt.Config(**SMALL, tied=True).build(), loss) for loss in losses]
    if "sequence" not in settings:
        image = {"image": 8, "patch": 2, "channels": 1, "classes": 5, "width": 32, "depth": 2, "heads": 4}
        made.append((lambda: vit.Config(**image).build(), CrossEntropy()))
    rows = []
    for make, loss in made:
        paddle.seed(3)
        rows.append(learned(strategy, strategy.mesh, make(), loss.build()))
    more = {"masks": masks(strategy), "rounded": rounded(strategy)} if "tensor" in settings else {}
    return {"rows": rows, **more}


def cases_each(layouts):
    return [cases(settings) for settings in layouts]


@pytest.fixture(scope="module")
def one():
    return run_ranks(cases_each, 1, [{}], timeout=300)[0][0]["rows"]


@pytest.fixture(scope="module")
def two():
    """What each of two ranks finds with an axis of its own, and between cut layers."""
    layouts = [{"sequence": 2}, {"tensor": 2, "sequence_parallel": True}]
    return [*zip(*run_ranks(cases_each, 2, layouts, timeout=300), strict=True)]


@pytest.fixture(scope="module")
def cut(two):
    return two[1]


def test_losses_that_smooth_or_count(one, two):
    for found in two[0]:
        for ours, expected in zip(found["rows"], one, strict=False):
            np.testing.assert_allclose(ours, expected, rtol=2e-5)


def test_models_that_tie_and_models_that_gather(one, cut):
    """vit's last block has no `cuts` and looks at all tokens: what is sharded is gathered before it."""
    for found in cut:
        for ours, expected in zip(found["rows"], one, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=2e-5)


def rounded(strategy):
    """Whether cut layers give numbers of bfloat16, where that is the precision."""
    task = task_of(gpt.Config(**SMALL).build(), dtype="bfloat16")
    learner, seen = strategy.place(task), []
    for layer in (learner.model.blocks[1].qkv, learner.model.blocks[1].out):
        layer.register_forward_post_hook(lambda layer, given, output: seen.append(output))
    learner.runner.predict(paddle.zeros([1, LENGTH], "int64"))
    return [bool((x.astype("bfloat16").astype("float32") == x).all()) for x in seen]


def test_low_precision_is_low_in_cut_layers_too(cut):
    assert [found["rounded"] for found in cut] == [[True, True]] * 2


def masks(strategy):
    """For both words of sequence_parallel: where the first block's dropout dropped, in updates that ended equal."""
    found = []
    for along in (False, True):
        paddle.seed(3)
        model, dropped = gpt.Config(**SMALL, dropout=0.3).build(), []
        model.blocks[1].dropout.register_forward_post_hook(
            lambda layer, given, output, into=dropped: into.append((output == 0).numpy())
        )
        seed_ranks(3, strategy.mesh)
        config = replace(strategy.config, sequence_parallel=along)
        learned(replace(strategy, config=config), strategy.mesh, model, CrossEntropy().build())
        found.append([dropped[1].mean(), dropped[1].astype("int32").tolist()])
    return found


def test_what_is_whole_is_dropped_alike_and_what_is_in_shards_is_not(cut):
    first, second = (found["masks"] for found in cut)
    for share, _ in (*first, *second):
        assert 0.2 < share < 0.4
    (_, whole), (_, part) = first
    assert np.shape(whole)[1] == LENGTH and np.shape(part)[1] == LENGTH // 2
    assert whole == second[0][1] and part != second[1][1]


PAIR = SimpleNamespace(nranks=2, rank=1)


def test_attention_may_be_called_with_keywords(monkeypatch):
    """That was a TypeError: attended() got an unexpected keyword argument."""
    seen, tensors = [], [paddle.rand([1, 4, 8]) for _ in range(2)]
    monkeypatch.setattr(ulysses, "_all_to_all", lambda chunks, group: seen.append(chunks) or chunks)
    attended = ulysses._with_all_to_all(lambda q, k, scale: (q - k) * scale, PAIR)
    q, k = tensors
    assert (attended(q, k=k, scale=2) == attended(q, k, 2)).all()
    assert len(seen) == 6  # of two inputs and the output, twice


def test_uneven_shards_are_said():
    assert sequence_shard(paddle.arange(8).reshape([1, 8]), PAIR).tolist() == [[4, 5, 6, 7]]
    with pytest.raises(UsageError, match=r"sequence length 7 is not divisible by strategy\.sequence=2"):
        sequence_shard(paddle.zeros([1, 7]), PAIR)


def test_what_cannot_be_cut_in_shards_is_said():
    with pytest.raises(UsageError, match="`attention_methods`"):
        parallelize_sequence(nn.Linear(2, 2), as_loss(CrossEntropy().build()), PAIR)
    with pytest.raises(UsageError, match="MeanSquaredError cannot be computed from shards"):
        parallelize_sequence(gpt.Config(**SMALL).build(), as_loss(MeanSquaredError().build()), PAIR)
    with pytest.raises(UsageError, match="no ordered `blocks`"):
        SequenceParallelizer(PAIR, Placements()).parallelize(nn.Linear(2, 2))
    plain = nn.Layer()
    plain.blocks = nn.LayerList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="no `cuts` table"):
        SequenceParallelizer(PAIR, Placements()).parallelize(plain)
