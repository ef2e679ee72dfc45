"""Initial weights are one process's to the bit in every layout, and no rank holds more than its part and one weight."""

import copy
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.build import learner_of
from paddle_dp.axes.meta_init import built
from paddle_dp.core.precision import castable
from paddle_dp.mesh import join
from paddle_dp.model.initial_weights import (
    InitialWeights,
    check_lendable,
    draw,
    initial_weights,
    reads_weights,
    trial_weights,
    without_memory,
)
from paddle_dp.part import lazily, read_part
from paddle_dp.recipe import read_recipe
from tests.house.learners import Chain
from tests.house.recipes import small_recipe
from tests.ranks import run_ranks

TOKENS = "random_tokens, vocab: 32, length: 16, samples: 8, test_samples: 2"
SIZES = "vocab: 32, width: 32, depth: 4, heads: 4, length: 16"
SHIPPED = [
    {"use": "gpt", "vocab": 32, "width": 16, "depth": 4, "heads": 4, "length": 8},
    {"use": "llama", "vocab": 32, "width": 16, "depth": 4, "heads": 4, "length": 8},
    {"use": "bert", "vocab": 32, "width": 16, "depth": 4, "heads": 4, "length": 8},
    {"use": "vit", "image": 8, "patch": 4, "width": 16, "depth": 2, "heads": 4},
    {"use": "resnet"},
    {"use": "mlp"},
    {"use": "large_classifier", "classes": 40, "cosines": True},
]
MODELS = [f"{{use: gpt, {SIZES}}}", f"{{use: gpt, tied: true, {SIZES}}}", f"{{use: llama, {SIZES}}}"]


def nbytes(tensors):
    return sum(
        int(t.size) * t.element_size() for t in {id(t): t for t in tensors}.values() if t._is_initialized()
    )


def placed(strategies, models):
    """In every rank: for each layout and model [the tensors that are not one process's, how many there are, the most
    bytes of weights at once while they were drawn, those in the end, of the largest weight, of the whole model]."""
    mesh = join(seed=3)
    found = []
    most = [0]
    dealing = InitialWeights._deal

    def deal(self, whole, wanted):
        slices = [part for parts in self._slices.values() for part, _ in parts]
        most[0] = max(most[0], nbytes([d.parameter for d in self.draws] + slices))
        dealing(self, whole, wanted)

    InitialWeights._deal = deal
    for strategy in strategies:
        for model in models:
            path = Path(tempfile.mkdtemp()) / "recipe.yaml"
            path.write_text(small_recipe(
                "length: 2 steps, batch: 4, micro_batches: 2, seed: 3", dataset=TOKENS, callbacks="[]",
                model=model, schedule="constant, learning_rate: 3.0e-3", strategy=strategy,
            ))  # fmt: skip
            recipe = read_recipe(path)
            paddle.seed(3)
            one = {name: t.numpy() for name, t in recipe.model.build().state_dict().items()}
            most[0] = 0
            learner = learner_of(recipe, mesh)
            wrong = []
            for name, tensor in learner.placed.state().items():
                placement = learner.placed.placements.placement_of(tensor)
                start = placement.offset(tensor.shape)
                box = tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))
                if not np.array_equal(one[name][box], tensor.numpy()):
                    wrong.append(name)
            state = list(learner.model.parameters())
            largest, whole = max(a.nbytes for a in one.values()), sum(a.nbytes for a in one.values())
            found.append([wrong, len(learner.placed.state()), most[0], nbytes(state), largest, whole])
    return found


TWO = [
    "{use: hybrid, tensor: 2}",
    "{use: hybrid, tensor: 2, sequence_parallel: true}",
    "{use: hybrid, pipeline: 2}",
    "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved}",
]
FOUR = ["{use: hybrid, tensor: 2, pipeline: 2}", "{use: hybrid, tensor: 2, data: 2}"]
STAGE3 = [
    "{use: hybrid, sharding: 2, sharding_stage: 3, data: 2}",
    "{use: hybrid, sharding: 2, sharding_stage: 3, tensor: 2}",
    "{use: hybrid, sharding: 2, sharding_stage: 3, pipeline: 2, recompute: full}",
]


@pytest.mark.parametrize(
    ("ranks", "strategies", "models"),
    [
        (2, ["{use: hybrid, tensor: 2}"], MODELS[1:2]),
        pytest.param(2, TWO, MODELS, marks=pytest.mark.long),
        pytest.param(4, FOUR, MODELS, marks=pytest.mark.long),
        pytest.param(4, STAGE3, [MODELS[0], MODELS[2]], marks=pytest.mark.long),
    ],
)
def test_every_layout_begins_with_one_process_s_bits_and_never_holds_the_whole(ranks, strategies, models):
    for rows in run_ranks(placed, ranks, strategies, models):
        assert len(rows) == len(strategies) * len(models)
        for wrong, tensors, most, kept, largest, whole in rows:
            assert not wrong and tensors
            assert 0 < most <= kept + largest < whole


class Own(nn.initializer.Initializer):
    """An initializer of a user's, with a generator that Paddle does not know."""

    def forward(self, var, block=None):
        var.set_value(np.random.rand(*var.shape).astype("float32"))


class Odd(nn.Layer):
    """Two linear layers, and what `do(self)` does with them while the model is built."""

    def __init__(self, do):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4, weight_attr=nn.initializer.Normal(0.0, 0.1))
        do(self)
        self.behind = nn.Linear(4, 4, weight_attr=nn.initializer.TruncatedNormal())


def with_own_initializer(model):
    model.own = nn.Linear(3, 3, weight_attr=paddle.ParamAttr(initializer=Own()))


def seeded(model):
    with paddle.no_grad():
        model.first.weight.set_value(paddle.randn([8, 8]))


def again(model):
    nn.initializer.Uniform(-1.0, 1.0)(model.first.weight)  # the first values are drawn, and overwritten


def replaced(model):
    model.first = nn.Linear(8, 8)  # those of the first layer are drawn, and dropped


def swallowed(model):
    try:
        model.scale = float(model.first.weight.abs().max())
    except Exception:  # noqa: BLE001 - the constructor goes on with something else
        model.scale = 1.0


def twins(model):
    state = paddle.get_rng_state()
    model.left = nn.Linear(2, 2)
    paddle.set_rng_state(state)
    model.right = nn.Linear(2, 2)


def taken(model):
    model.twin = nn.Linear(8, 8)
    model.twin.weight.data = model.first.weight


EYE = np.eye(2, dtype="float32")
REPRODUCED = {
    "nothing": lambda model: None,
    "tied": lambda model: setattr(model, "tied", model.first.weight),
    "drawn again": again,
    "replaced": replaced,
    "frozen": lambda model: setattr(model.first.weight, "stop_gradient", True),
    "a buffer": lambda model: model.register_buffer("mask", paddle.tril(paddle.ones([8, 8]))),
    "NumPy": lambda model: model.register_buffer("noise", paddle.to_tensor(np.random.rand(3))),
    "given": lambda model: setattr(model, "a", nn.Linear(2, 2, weight_attr=nn.initializer.Assign(EYE))),
}  # fmt: skip
WHOLE = {
    "reads": (lambda model: setattr(model, "scale", float(model.first.weight.abs().max())), "reads"),
    "reads, and goes on": (swallowed, "reads"),
    "copies": (lambda model: setattr(model, "twin", copy.deepcopy(model.first)), "reads"),
    "detaches": (lambda model: model.register_buffer("ema", model.first.weight.detach()), "reads"),
    "copies into a buffer": (
        lambda model: (model.register_buffer("ema", paddle.zeros([8, 8])), model.ema.copy_(model.first.weight, True)),
        "copy_",
    ),
    "computes": (lambda model: model.register_buffer("sum", model.first.weight + model.first.weight), ""),
    "sets": (lambda model: model.last.weight.set_value(np.eye(8, 4, dtype="float32")), "reads|sets"),
    "fills in place": (lambda model: paddle.assign(paddle.ones([8, 8]), model.first.weight), "sets|reads"),
    "draws into a weight": (seeded, "reads|drawn|sets"),
    "draws": (lambda model: model.register_buffer("noise", paddle.randn([3])), "drawn"),
    "orthogonal": (  # Paddle's own, and it draws where it should only be recorded
        lambda model: setattr(model, "o", nn.Linear(6, 6, weight_attr=nn.initializer.Orthogonal())), "drawn",
    ),
    "seeds": (lambda model: paddle.seed(5), "drawn"),
    "seeds as it was": (lambda model: paddle.seed(7), "generator is set"),
    "sets the generator back": (twins, "generator is set"),
    "pads": (lambda model: setattr(model, "words", nn.Embedding(5, 4, padding_idx=1)), "padding row"),
    "takes the data": (taken, "data"),
    "own initializer": (with_own_initializer, "Own"),
    "spectral norm": (lambda model: nn.utils.spectral_norm(model.first), ""),
    "weight norm": (lambda model: nn.utils.weight_norm(model.first), ""),
    "LSTM": (lambda model: setattr(model, "rnn", nn.LSTM(4, 4)), ""),
}  # fmt: skip


def bits(model):
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


@contextmanager
def begun():
    """The generators and names of a process that begins."""
    paddle.seed(7)
    np.random.seed(7)
    with paddle.utils.unique_name.guard():
        yield


def built_both_ways(do):
    """One process's model; then that without memory, or None and why; from the same state of the generators."""
    with begun():
        one = Odd(do)
    with begun():
        return one, *without_memory(lambda: Odd(do))


@pytest.mark.parametrize("name", REPRODUCED)
def test_what_lazy_building_reproduces_has_one_process_s_bits_and_names(name):
    one, model, reason = built_both_ways(REPRODUCED[name])
    assert model is not None, reason
    drawn = [p for p in model.parameters() if not p._is_initialized()]
    assert drawn
    paddle.randn([5])  # they begin where the model was built, wherever the generator is by then
    draw(model)
    assert initial_weights(model) is None
    assert bits(model) == bits(one)
    assert [p.name for p in model.parameters()] == [p.name for p in one.parameters()]


@pytest.mark.parametrize("name", WHOLE)
def test_what_it_cannot_reproduce_is_built_whole_as_if_nothing_had_been_tried(name):
    do, why = WHOLE[name]
    with begun():
        one = Odd(do)
    with begun():
        model, reason = without_memory(lambda: Odd(do))
        assert model is None
        assert reason and re.search(why, reason), reason
        whole = Odd(do)
    assert bits(whole) == bits(one)
    assert [p.name for p in whole.parameters()] == [p.name for p in one.parameters()]


@pytest.mark.parametrize("settings", SHIPPED, ids=lambda s: s["use"])
def test_shipped_models_are_built_without_memory(settings):
    build = read_part("models", settings).build
    model, reason = without_memory(build)
    assert model is not None, reason
    assert not any(p._is_initialized() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_is_cast_before_it_is_drawn_has_the_bits_of_what_is_cast_afterwards(dtype):
    build = read_part("models", SHIPPED[0]).build
    paddle.seed(3)
    one = build()
    paddle.seed(3)
    model, _ = without_memory(build)
    for each in (one, model):
        with castable(each):
            for layer in each.sublayers(include_self=True):
                layer._to_impl(dtype=dtype, include_sublayers=False, floating_only=True)
    assert not any(p._is_initialized() for p in model.parameters())
    draw(model)
    assert bits(model) == bits(one)
    assert {str(p.dtype) for p in model.parameters()} == {f"paddle.{dtype}"}


def test_weights_are_lent_to_a_block_while_it_runs_and_are_the_same_each_time():
    model, _ = without_memory(read_part("models", SHIPPED[0]).build)
    tokens, most, values = paddle.zeros([2, 8], "int64"), [], set()

    def look(block, inputs, outputs):
        most.append(nbytes(model.parameters()))
        values.update(p.numpy().tobytes() for p in block.parameters() if p.ndim > 1)

    for block in model.blocks:
        block.register_forward_post_hook(look)
    with paddle.no_grad():
        with trial_weights(model):
            first, again = model(tokens), model(tokens)
        assert nbytes(model.parameters()) == 0
        assert bool((first == again).all()) and float(first.std()) > 0
    assert len(values) == sum(p.ndim > 1 for p in model.parameters())  # no two are alike
    with lazily():
        sizes = [sum(p.size * 4 for p in block.parameters()) for block in model.blocks]
    assert 0 < max(most) <= max(sizes) < sum(sizes) / 2


class Peeks(Chain):
    """Its second block's forward reads a weight of the first one, which is none of its own."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return super().forward(x) @ self.blocks[0].weight


def test_a_model_that_reads_weights_between_its_blocks_is_drawn_whole_before_it_is_tried():
    paddle.seed(3)
    one = Peeks()
    paddle.seed(3)
    model, _ = without_memory(Peeks)
    check_lendable(model, lambda: paddle.ones([2, 4]))
    assert initial_weights(model) is None
    assert bits(model) == bits(one)


def test_large_weights_that_are_lent_repeat_a_pattern_of_their_distribution():
    model, _ = without_memory(lambda: nn.Sequential(nn.Linear(1100, 1100), nn.Linear(1100, 1100)))
    values = []
    for layer in model:
        layer.register_forward_post_hook(lambda layer, *_: values.append(layer.weight.numpy()))
    with paddle.no_grad(), trial_weights(model):
        model(paddle.ones([1, 1100]))
    drawn = nn.Linear(1100, 1100).weight.numpy()
    assert not np.array_equal(*values)
    for one in values:
        assert one.std() == pytest.approx(drawn.std(), rel=0.02)
        assert len({row.tobytes() for row in one}) == 1100  # no two rows are the same


def test_an_optimizer_that_reads_weights_when_it_is_made_is_noticed():
    model, _ = without_memory(lambda: Odd(lambda model: None))
    parameters = model.parameters()
    assert not reads_weights(model, lambda: paddle.optimizer.AdamW(parameters=parameters, weight_decay=0.1))
    assert reads_weights(model, lambda: [p.detach() for p in parameters])
    assert reads_weights(model, lambda: [p.clone() for p in parameters])
    draw(model)
    assert not reads_weights(model, lambda: [p.clone() for p in parameters])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_part_has_the_values_that_come_behind_all_that_is_drawn_before_it(number, rank):
    """One block of a GPT, cut for one of two ranks, without the other blocks and without the other rank."""
    build = read_part("models", SHIPPED[0]).build
    paddle.seed(3)
    one = dict(build().blocks[number].named_parameters())
    (block,) = built(build, [number], rank, 2, seed=3)
    cut = 0
    for name, part in block.named_parameters():
        whole = one[name].numpy()
        dims = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
        if dims:
            whole, cut = np.split(whole, 2, dims[0])[rank], cut + 1
        assert np.array_equal(part.numpy(), whole), name
    assert cut
