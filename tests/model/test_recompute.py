"""Recomputed runs are the plain runs, bit for bit, with dropout; and they keep less."""

from dataclasses import replace

import numpy as np
import paddle
import pytest
from paddle import nn

from models import gpt, llama, vit
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import join
from paddle_dp.mesh.mesh import seed_ranks
from paddle_dp.model.recompute import recomputed
from paddle_dp.part import read_part
from paddle_dp.units import Recompute
from tests.house.datasets import Points
from tests.house.learners import task_of
from tests.ranks import run_ranks

HOWS = ("none", "full", "selective", "every 2 blocks")
TEXT = {"vocab": 32, "width": 32, "depth": 4, "heads": 4, "length": 64}
MODELS = {
    "gpt": lambda: gpt.Config(**TEXT, dropout=0.2).build(),
    "llama": lambda: llama.Config(**TEXT, kv_heads=2, hidden=64).build(),
    "vit": lambda: vit.Config(image=8, patch=2, channels=1, classes=5, width=32, depth=4, heads=4).build(),
}


def once(name, how):
    """[bytes kept for backward besides the weights, [loss, the next random number], gradients] of one pass."""
    paddle.seed(3)
    model = recomputed(MODELS[name](), Recompute.parse(how))
    given = paddle.randn([2, 1, 8, 8]) if name == "vit" else paddle.randint(0, 32, [2, 64])
    wanted = paddle.randint(0, 5, [2]) if name == "vit" else paddle.randint(0, 32, [2, 64])
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.size * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _ = CrossEntropy().build()(model(given), wanted)
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)
    total.backward()
    gradients = [p.grad.numpy() for p in model.parameters()]
    return sum(kept.values()), [total.item(), paddle.rand([1]).item()], gradients


@pytest.mark.parametrize("name", MODELS)
def test_equal_bits_and_fewer_bytes(name):
    found = {how: once(name, how) for how in HOWS}
    for how in HOWS[1:]:
        assert found[how][1] == found["none"][1], how
        # llama's attention has three inputs, whose gradients are then added in another order
        near = 1e-6 if (name, how) == ("llama", "selective") else 0
        for ours, plain in zip(found[how][2], found["none"][2], strict=True):
            np.testing.assert_allclose(ours, plain, rtol=0, atol=near, err_msg=how)
    kept = {how: found[how][0] for how in HOWS}
    assert kept["full"] < 0.45 * kept["none"]
    assert kept["full"] < kept["every 2 blocks"] < kept["none"]
    assert kept["selective"] < 0.9 * kept["none"]


def test_embeddings_learn_although_tokens_have_no_gradient():
    model = recomputed(MODELS["gpt"](), Recompute.parse("full"))
    model(paddle.randint(0, 32, [1, 8])).sum().backward()
    assert float(model.blocks[0].position.grad.abs().sum()) > 0


def test_nothing_is_computed_twice_without_a_backward():
    model, calls = MODELS["gpt"](), []
    attend = model.blocks[1]._attend
    model.blocks[1]._attend = lambda *given: calls.append(1) or attend(*given)
    recomputed(model, Recompute.parse("full"))
    with paddle.no_grad():
        model(paddle.randint(0, 32, [1, 8]))
    assert len(calls) == 1
    model(paddle.randint(0, 32, [1, 8])).sum().backward()
    assert len(calls) == 3


class Nested(nn.Layer):
    """A block of inputs and outputs in dicts and tuples, with a mask that is passed on; it counts its forwards."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, given):
        self.calls += 1
        (x, others), mask = given["states"], given["mask"]
        y = paddle.tanh(self.layer(x)) * mask
        return {"states": (y, [*others, y.sum()]), "mask": mask, "name": "a block"}


class Nests(nn.Layer):
    def __init__(self):
        super().__init__()
        self.blocks = nn.LayerList([Nested() for _ in range(3)])

    def forward(self, x):
        given = {"states": (x, []), "mask": paddle.to_tensor([1.0, 1.0, 0.0, 1.0]), "name": ""}
        for block in self.blocks:
            given = block(given)
        return given


def test_tensors_in_dicts_and_tuples_are_recomputed_too():
    found = {}
    for how in ("none", "full"):
        paddle.seed(1)
        model = recomputed(Nests(), Recompute.parse(how))
        x = paddle.randn([2, 4])
        x.stop_gradient = False
        outputs = model(x)
        y, others = outputs["states"]
        assert (len(others), outputs["name"], outputs["mask"].stop_gradient) == (3, "a block", True)
        (y.sum() + sum(others)).backward()
        calls = [block.calls for block in model.blocks]
        assert calls == ([1, 1, 1] if how == "none" else [2, 2, 1])
        found[how] = [p.grad.numpy() for p in [x, *model.parameters()]]
    for plain, again in zip(found["none"], found["full"], strict=True):
        np.testing.assert_allclose(again, plain, rtol=0, atol=1e-6)


def test_tensors_that_recompute_cannot_find_are_refused():
    class Held:
        def __init__(self, x):
            self.x = x

    class Block(nn.Layer):
        def forward(self, held):
            return Held(held.x * 2)

    class Holds(Nests):
        def __init__(self):
            super().__init__()
            self.blocks = nn.LayerList([Block(), Block()])

        def forward(self, x):
            return self.blocks[1](self.blocks[0](Held(x))).x

    with pytest.raises(UsageError, match="takes or returns a Held with tensors"):
        recomputed(Holds(), Recompute.parse("full"))(paddle.randn([2, 4]))


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        (lambda: nn.Linear(2, 2), "full", "no ordered `blocks`"),
        (lambda: nn.Linear(2, 2), "selective", "`attention_methods`"),
    ],
)
def test_what_cannot_be_recomputed_is_said(model, how, said):
    with pytest.raises(UsageError, match=said):
        recomputed(model(), Recompute.parse(how))


def learned(strategy, mesh, dtype="float32"):
    """The weights after a few updates with dropout: batches of 6 and a last of 4, two micro-batches, over the ranks."""
    paddle.seed(3)
    clip = paddle.nn.ClipGradByGlobalNorm(0.5)
    task = task_of(MODELS["gpt"](), optimizer="AdamW", rate=0.01, settings={"grad_clip": clip}, dtype=dtype)
    learner = strategy.place(task)
    seed_ranks(3, strategy.mesh)
    texts = [np.random.RandomState(i).randint(0, 32, 17) for i in range(10)]
    for batch in Loader.plain([(text[:-1], text[1:]) for text in texts], 6, mesh, micro_batches=2).read(0):
        learner.train_batch(batch)
    return {name: p.numpy() for name, p in learner.placed.named_parameters()}


def in_every_way(use, settings, dtype):
    """Whether each way of recomputing learns the bits that a plain run learns, on this rank."""
    mesh = join(seed=3)
    strategy = read_part("strategies", {"use": use, **settings}).build(mesh)
    found = []
    for how in HOWS:
        config = replace(strategy.config, recompute=Recompute.parse(how))
        found.append(learned(replace(strategy, config=config), strategy.mesh, dtype))
    return [all((one[name] == found[0][name]).all() for name in found[0]) for one in found]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_one_process_learns_the_same_bits(dtype):
    assert in_every_way("single", {}, dtype) == [True] * 4


def several(layouts):
    return [in_every_way(*layout) for layout in layouts]


def test_several_ranks_learn_the_same_bits():
    """Averaging in backward (paddle.DataParallel), and fleet's pipeline, in low precision too."""
    layouts = [("data_parallel", {}, "float32"), ("hybrid", {"pipeline": 2}, "bfloat16")]
    assert run_ranks(several, 2, layouts) == [[[True] * 4] * 2] * 2


class Reused(nn.Layer):
    """ALBERT: one layer in every place of a list, between layers that are no blocks."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
        self.layers = nn.LayerList([layer] * 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def reused(recompute, folder):
    paddle.seed(0)
    model = Reused()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    trainer = Trainer.of(
        model=model, loss="cross_entropy", optimizer=optimizer, train=Points(24), batch=6, length="6 steps",
        micro_batches=2, folder=folder, callbacks=[], blocks=["layers.*"],
        strategy={"use": "data_parallel", "recompute": recompute},
    )  # fmt: skip
    trainer.fit()
    return [parameter.numpy() for parameter in model.parameters()]


def test_a_layer_that_is_used_three_times_learns_the_same_recomputed(tmp_path):
    """With dropout, on one rank and on two. It was refused: "forward is not its blocks one after another"."""
    expected = run_ranks(reused, 1, "none", str(tmp_path / "plain"))[0]
    for ranks in (1, 2):
        learned = run_ranks(reused, ranks, "full", str(tmp_path / f"{ranks}"))[0]
        for a, b in zip(expected, learned, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_four_ranks_learn_the_same_bits(settings):
    assert run_ranks(several, 4, [("hybrid", settings, "float32")], timeout=400) == [[[True] * 4]] * 4


class Remembers(nn.Layer):
    """A block that subtracts the mean of a queue of what went through it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("queue", paddle.zeros([3, 6]))
        self.register_buffer("none", None)

    def forward(self, x):
        h = self.linear(x) - self.queue.mean(0)
        with paddle.no_grad():
            self.queue = paddle.concat([self.queue[1:], h[:1].detach()])
        return h


@pytest.mark.parametrize("block", [Remembers, lambda: nn.utils.spectral_norm(nn.Linear(6, 6))])
@pytest.mark.parametrize("how", ["full", "every 2 blocks"])
def test_blocks_that_keep_state_in_buffers_learn_what_they_learn_without_recompute(how, block):
    """Also where the second forward comes behind another micro-batch's first, and where a hook of the block itself
    computes its weight, outside of what is recomputed."""
    found = []
    for each in ("none", how):
        paddle.seed(3)
        model = nn.Sequential(*(block() for _ in range(4)), nn.Linear(6, 1))
        recomputed(model, Recompute.parse(each))
        for _ in range(3):
            totals = [model(x).square().sum() for x in given(2)]
            for total in totals:
                total.backward()
        kept = ("weight_u", "weight_v", "queue")
        buffers = [buffer.numpy() for name, buffer in model.named_buffers() if name.endswith(kept)]
        found.append([[p.grad.numpy() for p in model.parameters()], buffers])
    for plain, again in zip(*found, strict=True):
        for one, other in zip(plain, again, strict=True):
            np.testing.assert_array_equal(one, other)


class Scales(nn.Layer):
    """Two layers share a buffer: the first one writes it, and the second one multiplies by it."""

    class Writes(nn.Linear):
        def forward(self, x):
            with paddle.no_grad():
                self.scale.set_value(self.scale + 1)
            return super().forward(x)

    class Multiplies(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.scale

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Writes(6, 6), self.Multiplies(6, 6)
        scale = paddle.ones([6])
        for layer in (self.first, self.second):
            layer.register_buffer("scale", scale)

    def forward(self, x):
        return self.second(self.first(x))


class Views(nn.Layer):
    """Forward writes a buffer, and multiplies by two others that are views of it, a row and every second number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        table = paddle.arange(24, dtype="float32").reshape([2, 12])
        self.register_buffer("row", table[1])
        self.register_buffer("table", table)
        self.register_buffer("column", table[0][::2])
        positions = paddle.randn([8])
        self.register_buffer("positions", positions[1:7])
        self.register_buffer("positions_again", positions[1:7])

    def forward(self, x):
        with paddle.no_grad():
            self.table.set_value(self.table + 1)
        return self.linear(x) * self.column * self.positions + self.row[3:9] * self.positions_again


@pytest.mark.parametrize("block", [Scales, Views])
def test_buffers_that_share_memory_do_so_in_the_second_forward(block):
    gradients = []
    for how in ("none", "full"):
        paddle.seed(3)
        model = nn.Sequential(block(), block(), nn.Linear(6, 1))
        recomputed(model, Recompute.parse(how))
        for x in given(2):
            model(x).square().sum().backward()
        gradients.append([parameter.grad.numpy() for parameter in model.parameters()])
        if block is Scales:
            assert model[0].first.scale is model[0].second.scale
            assert model[0].first.scale.tolist() == [3] * 6
        else:
            assert model[0].row.tolist() == model[0].table[1].tolist() == list(range(14, 26))
    for plain, again in zip(*gradients, strict=True):
        np.testing.assert_array_equal(plain, again)


def given(count):
    inputs = [paddle.randn([5, 6]) for _ in range(count)]
    for x in inputs:
        x.stop_gradient = False  # or the first block would not be recomputed
    return inputs
