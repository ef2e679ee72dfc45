"""Every schedule, split and tied weight of a pipeline against one process: losses, scores, gradient norms, weights."""

import itertools
from dataclasses import replace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.axes.pipeline.runner import separate_buffers
from paddle_dp.axes.pipeline.schedules import _with_gradient
from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.learner.task import full_model_learner
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from paddle_dp.plan.pipeline_schedule import orders
from paddle_dp.train.evaluate import evaluate
from paddle_dp.train.state import model_shards, optimizer_shards
from tests.house.learners import Chain, numbers_of, task_of
from tests.proof.zoo.models import Scaling
from tests.ranks import run_ranks

SAMPLES, BATCH, STEPS = 14, 8, 3  # batches of 8 and 6 an epoch
GPT = {"use": "gpt", "vocab": 32, "width": 32, "depth": 4, "heads": 4, "length": 12}


class Normed(Chain):
    """Scores from tokens, through BatchNorm in every block: running statistics on every stage."""

    def __init__(self):
        norms = [nn.BatchNorm1D(16, data_format="NLC") for _ in range(4)]
        inner = [nn.Sequential(nn.Linear(16, 16, bias_attr=False), norm, nn.GELU()) for norm in norms]
        super().__init__(nn.Embedding(32, 16), *inner, nn.Linear(16, 32))


def learn(strategy, cases):
    """Trains as each case says, one after another in the same ranks; what this rank saw and holds after each."""
    placer, found = read_part("strategies", strategy).build(join(seed=3)), []
    for case in cases:
        config = read_part("strategies", {**strategy, **case.get("strategy", {})}).config
        found.append(_train(replace(placer, config=config), case))
    return found


def _task(case):
    paddle.seed(7)
    gpt, clip = read_part("models", {**GPT, **case.get("model", {})}), paddle.nn.ClipGradByGlobalNorm(0.4)
    model = {"norms": Normed, "scales": Scaling}.get(case.get("blocks"), gpt.build)()
    return task_of(model, None, "AdamW", 3e-3, settings={"grad_clip": clip, "weight_decay": 0.1})


def _train(placer, case):
    learner, mesh = placer.place(_task(case)), placer.mesh
    words = {"use": "random_tokens", "vocab": 32, "length": 12, "samples": SAMPLES}
    tokens = read_part("datasets", words).build("train")
    loader = Loader.plain(tokens, BATCH, mesh, micro_batches=case.get("micro_batches", 4), seed=1)
    held_out = Loader.plain(tokens, BATCH, mesh, shuffle=False)
    rows, epoch, ordered = [], 0, None
    while len(rows) < STEPS:
        for batch in itertools.islice(loader.read(epoch), STEPS - len(rows)):
            if recorder := learner.runner.recorder:
                recorder.armed = len(rows) == STEPS - 1
            metrics = learner.train_batch(batch, collect_metrics=True)
            if recorder and recorder.armed:
                ordered = _order(recorder.recordings(), mesh)
            norm = metrics.pop("gradient_norm")
            rows.append([*metrics.values(), norm])
        epoch += 1
        if epoch == 1:  # between batches of the same shape: it must not leave a trace
            evaluate(learner, held_out, mesh)
    learner.check("at the end")
    held = {**model_shards(learner), **optimizer_shards(learner)}
    return {
        "names": list(metrics),
        "rows": rows,
        "order": ordered,
        "held_out": dict(evaluate(learner, held_out, mesh).numbers),
        "shards": {name: [shard.offset, shard.array] for name, shard in held.items()},
    }


def _order(recordings, mesh):
    """What each stage of the first pipeline did, in order; its spans do not overlap."""
    spans = recordings[0].spans
    lanes = [[s for s in spans if s.stage == stage] for stage in range(mesh.axes.pipeline)]
    assert all(a.stop <= b.start for lane in lanes for a, b in itertools.pairwise(lane))
    return [[[s.work.kind, s.work.micro_batch, s.work.chunk] for s in lane] for lane in lanes]


DEEP = {"depth": 6}  # eight blocks
TIED = {"tied": True}
FEW = [
    {"strategy": {"pipeline_schedule": "1f1b"}, "model": TIED},
    {"strategy": {"pipeline_schedule": "f_then_b", "partition": "parameters"}},
    {"strategy": {"pipeline_schedule": "interleaved"}},
    {"strategy": {"pipeline_schedule": "interleaved"}, "blocks": "norms"},
    {"strategy": {"pipeline_schedule": "1f1b"}, "blocks": "scales"},
    {"strategy": {"partition": [5, 1]}, "micro_batches": 1},
]
MORE = [
    {"strategy": {"pipeline_schedule": "interleaved", "virtual_stages": 3}},
    {"strategy": {"pipeline_schedule": "interleaved"}, "model": TIED},
    {"strategy": {"pipeline_schedule": "interleaved"}, "micro_batches": 2},
    {"strategy": {"pipeline_schedule": "f_then_b", "virtual_stages": 2, "partition": [1, 2, 1, 2]}},
]
FOUR = [
    {"model": {**DEEP, **TIED}},
    {"strategy": {"pipeline_schedule": "f_then_b"}, "model": DEEP},
    {"strategy": {"pipeline_schedule": "interleaved"}, "model": {**DEEP, **TIED}},
    {"strategy": {"pipeline_schedule": "f_then_b", "virtual_stages": 2}, "model": DEEP},
    {"strategy": {"partition": [1, 3, 2, 2]}, "model": DEEP, "micro_batches": 1},
]


def truth(cases):
    """One process for each case, equal ones once."""
    kinds = {_kind(case): case for case in cases}
    asked = [{k: v for k, v in case.items() if k != "strategy"} for case in kinds.values()]
    found = run_ranks(learn, 1, {"use": "single"}, asked, timeout=300)[0]
    return dict(zip(kinds, found, strict=True))


def _kind(case):
    return (*case.get("model", {}).items(), case.get("micro_batches", 4), case.get("blocks"))


@pytest.fixture(scope="module")
def one():
    return truth(FEW)


def check(ranks, strategy, cases, one):
    many = run_ranks(learn, ranks, {"use": "hybrid", **strategy}, cases, timeout=400)
    for number, case in enumerate(cases):
        expected, saved, predicted = one[_kind(case)], {}, _predicted(strategy, case)
        for found in (rank[number] for rank in many):
            assert found["names"] == expected["names"], case
            assert found["order"] == predicted, case
            np.testing.assert_allclose(found["rows"], expected["rows"], rtol=2e-5, err_msg=str(case))
            assert found["held_out"] == pytest.approx(expected["held_out"], rel=1e-5), case
            for name, (offset, array) in found["shards"].items():
                whole = np.asarray(expected["shards"][name][1])
                part = whole[tuple(slice(o, o + n) for o, n in zip(offset, np.shape(array), strict=True))]
                np.testing.assert_allclose(array, part, atol=3e-5, err_msg=f"{case} {name}")
                saved[name] = saved.get(name, 0) + np.size(array)
        assert saved == {name: np.size(array) for name, (_, array) in expected["shards"].items()}, case


def _predicted(strategy, case):
    """The order in which arithmetic says that the stages work."""
    words = case.get("strategy", {})
    schedule = words.get("pipeline_schedule", "1f1b")
    each = words.get("virtual_stages", 2 if schedule == "interleaved" else 1)
    ordered = orders(schedule, strategy["pipeline"], case.get("micro_batches", 4), each)
    return [[[work.kind, work.micro_batch, work.chunk] for work in lane] for lane in ordered]


def test_on_two_ranks(one):
    """Schedules, partitions, a tied weight: 14 samples in batches of 8 and 6, micro-batches of 2 and 1."""
    check(2, {"pipeline": 2}, FEW, one)


def test_a_buffer_that_layers_share_has_one_copy_in_a_forward():
    first, second, shared = nn.Layer(), nn.Layer(), paddle.ones([2])
    first.register_buffer("scale", shared)
    second.register_buffer("scale", shared)
    with separate_buffers([("first", first), ("second", second)]):
        first.scale.set_value(paddle.zeros([2]))
        assert second.scale is first.scale is not shared
        assert shared.tolist() == [1, 1]
    assert first.scale is second.scale is shared and shared.tolist() == [0, 0]


def test_a_buffer_that_is_a_view_of_another_is_one_in_a_forward():
    layer, table = nn.Layer(), paddle.zeros([2, 3])
    layer.register_buffer("row", table[1])
    layer.register_buffer("table", table)
    with separate_buffers([("layer", layer)]):
        layer.row.set_value(paddle.ones([3]))
        assert layer.table[1].tolist() == [1, 1, 1]
        assert table.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert layer.table is table and table[1].tolist() == layer.row.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "views",
    [
        lambda table: [table[:2], table[1:]],  # of one tensor that is no buffer
        lambda table: [table.transpose([1, 0]), table[1]],
        lambda table: [table[:, 0], table[:, 1]],  # which share no number
        lambda table: [table[1:], table[1:]],  # which do not begin where their memory begins
        lambda table: [table[2], table[1:]],
        lambda table: [table[1:, 1], table[1:, 1:]],
    ],
)
def test_buffers_that_share_memory_do_so_in_a_forward(views):
    layers = [nn.Layer(), nn.Layer()]
    for layer in layers:
        for number, view in enumerate(views(paddle.arange(12, dtype="float32").reshape([3, 4]))):
            layer.register_buffer(f"view_{number}", view)
    here, copied = layers
    with separate_buffers([("copied", copied)]):
        for number in (0, 1):
            np.testing.assert_array_equal(getattr(copied, f"view_{number}"), getattr(here, f"view_{number}"))
    here.view_0.set_value(here.view_0 + 5)
    with separate_buffers([("copied", copied)]):
        copied.view_0.set_value(copied.view_0 + 5)
        np.testing.assert_array_equal(copied.view_1, here.view_1)
    for number in (0, 1):
        np.testing.assert_array_equal(getattr(copied, f"view_{number}"), getattr(here, f"view_{number}"))


def test_buffers_of_two_dtypes_in_one_memory_are_refused():
    layer, table = nn.Layer(), paddle.zeros([4])
    layer.register_buffer("bits", table.view("int32"))
    layer.register_buffer("table", table)
    with (
        pytest.raises(UsageError, match="share memory with two dtypes"),
        separate_buffers([("layer", layer)]),
    ):
        pass


def test_with_other_axes(one):
    check(4, {"pipeline": 2, "tensor": 2}, FEW[:1], one)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"data": 2}], ids=str)
def test_more(axes):
    # BatchNorm over a rank's samples is another model on another number of readers; neither it nor a scale is cut.
    cases = [case for case in [*FEW, *MORE] if not (axes and case.get("blocks"))]
    check(4 if axes else 2, {"pipeline": 2, **axes}, cases, truth(cases))


@pytest.mark.long
def test_on_four_ranks():
    check(4, {"pipeline": 4}, FOUR, truth(FOUR))


class Embed(nn.Layer):
    """Tokens → (hidden, positions)."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(32, 8)

    def forward(self, tokens):
        return self.token(tokens), paddle.arange(tokens.shape[1]).expand_as(tokens)


class Shift(nn.Layer):
    """(hidden, positions), which it reads and hands on, or scores, which it hands on alone."""

    def __init__(self, width=8):
        super().__init__()
        self.linear, self.scores = nn.Linear(8, width), width != 8

    def forward(self, both):
        hidden, positions = both
        hidden = self.linear(hidden + positions.unsqueeze(-1).astype(hidden.dtype))
        return hidden if self.scores else (hidden, positions)


class Both(nn.Layer):
    """Tokens → two embeddings of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(32, 8), nn.Embedding(32, 8)

    def forward(self, tokens):
        return self.first(tokens), self.second(tokens)


class Second(nn.Layer):
    """Scores from the second of two tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 32)

    def forward(self, both):
        return self.linear(both[1])


def tuples_between(schedules):
    """For each schedule, the losses of two updates of a chain whose blocks hand on two tensors, in stages and in one
    process."""
    mesh = join(seed=3)
    layouts = [{"use": "hybrid", "pipeline": 2, "pipeline_schedule": schedule} for schedule in schedules]
    return [_tuples_between(read_part("strategies", layout).build(mesh)) for layout in layouts]


def _tuples_between(placer):
    rows = []
    for place in (placer.place, lambda task: full_model_learner(task, Mesh.alone())):
        paddle.seed(7)
        frozen = placer.config.pipeline_schedule == "interleaved"
        model = Chain(Embed(), Shift(), Shift(), Shift(32)) if frozen else Chain(Both(), Second())
        for parameter in model.blocks[0].parameters() if frozen else ():
            parameter.stop_gradient = True
        learner, tokens = place(task_of(model)), paddle.arange(24).reshape([4, 6])
        halves = [MicroBatch(tokens[i : i + 2], tokens[i : i + 2], 2, i, (i, i + 1)) for i in (0, 2)]
        rows.append(numbers_of(learner, [Batch(tuple(halves), 4, 0, number) for number in (0, 1)]))
    return rows


def test_stages_may_hand_on_positions_and_a_tensor_that_nobody_reads():
    """Interleaved, as of packed texts under LoRA, the first stage is frozen: it waited for a gradient of none of its
    outputs. With 1f1b the last stage does not read a tensor, which had no gradient for fleet to send: it is zeros."""
    for found in run_ranks(tuples_between, 2, ["interleaved", "1f1b"]):
        for stages, one in found:
            np.testing.assert_allclose(stages, one, rtol=1e-5)


def test_a_stage_of_integers_alone_is_refused():
    for output in (paddle.arange(3), (paddle.arange(3), paddle.arange(2))):
        with pytest.raises(UsageError, match=r"a stage ends with an output of paddle\.int64"):
            _with_gradient(output)


def met(strategy):
    """Of this rank's first norm: its name, its running mean, and what that is when the ranks have met."""
    placer = read_part("strategies", {"use": "hybrid", "sync_batch_norm": False, **strategy}).build(
        join(seed=3)
    )
    learner = placer.place(_task({"blocks": "norms"}))
    dp_rank = learner.mesh.dp_rank
    tokens = paddle.arange(24).reshape([2, 12]) + dp_rank
    second = MicroBatch(tokens, tokens, 0 if dp_rank else 2)  # of the second reader a dummy
    learner.train_batch(Batch((MicroBatch(tokens, tokens, 2), second), 6, 0, 0))
    name, mean = next((n, t) for n, t in learner.placed.state().items() if n.endswith("_mean"))
    before = mean.tolist()
    learner.statistics.sync()
    return [name, before, mean.tolist()]


@pytest.mark.long
def test_running_statistics_meet_where_the_same_stage_is():
    first, second, third, fourth = run_ranks(met, 4, {"pipeline": 2}, timeout=200)
    for one, other in ((first, third), (second, fourth)):  # neighbours in rank are neighbours on the pipeline
        assert one[0] == other[0]
        assert one[1] != other[1]
        np.testing.assert_allclose(one[2], np.mean([one[1], other[1]], 0), rtol=1e-5)
        assert one[2] == other[2]
    assert first[0] != second[0]
