"""Sharding against one process: stages and mixtures, what each rank holds, checkpoints, weights that drift apart."""

import numpy as np
import paddle
import pytest

from paddle_dp.axes.sharding.zero import Offload
from paddle_dp.checkpoint import merge
from paddle_dp.data import Loader
from paddle_dp.datasets.random_tokens import Config as Tokens
from paddle_dp.errors import DivergenceError
from paddle_dp.learner import Task
from paddle_dp.learner.memory import size, states
from paddle_dp.losses.cross_entropy import CrossEntropy
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.plan.memory import Widths, owners, state_bytes
from paddle_dp.plan.sharded import max_fetched
from tests.house.learners import numbers_of, stored_weights, task_of
from tests.parity import QUICK, SHORT, assert_same, train, train_each, truth, weights
from tests.ranks import run_ranks


def by_layout(ranks, folder, strategies, **how):
    """For each strategy, what every rank found."""
    rows = run_ranks(train_each, ranks, str(folder), strategies, timeout=400, **how)
    return [[rank[n] for rank in rows] for n in range(len(strategies))]


def stages(axes, of=(1, 2, 3)):
    return [f"{{use: hybrid, {axes}, sharding_stage: {stage}}}" for stage in of]


def test_every_stage_is_one_process_and_holds_what_the_formula_says(tmp_path):
    """A last batch of 6, in two micro-batches of 3, shared unequally."""
    for stage, many in enumerate(by_layout(2, tmp_path, stages("sharding: 2"), **QUICK), start=1):
        assert_same(many, truth(**QUICK))
        sizes = many[0]["sizes"]
        assert many[0]["owners"] == owners(sizes, 2)  # the plan deals as fleet does
        largest = 4 * max(sizes)
        for rank, (found, said) in enumerate(
            zip(many, state_bytes(sizes, 2, stage, Widths.for_states(2)), strict=True)
        ):
            counted = found["memory"]
            assert counted["parameters"] == said.parameters
            # Besides, two numbers a parameter.
            assert said.optimizer <= counted["optimizer"] < said.optimizer * 1.01
            assert said.gradients <= counted["most gradients"] <= said.gradients + largest
            if stage == 3:  # besides its own, the layers at work and those under way
                # A bias or a norm more: a backward does not release layers exactly in the reverse of their names.
                lent = 1.01 * max_fetched(loads(found["names"], sizes, found["owners"]), rank, 1)
                assert said.parameters < counted["most parameters"] <= said.parameters + lent
                assert found["lent"] <= lent


def loads(names, sizes, owners):
    """The bytes of each layer at each of two owners, in the order of forward."""
    layers = {}
    for name, count, owner in zip(names, sizes, owners, strict=True):
        layers.setdefault(name.rpartition(".")[0], [0, 0])[owner] += 4 * count
    return list(layers.values())


def drift(strategy):
    """What the check says before and after one rank's weight has changed: the first that it holds."""
    mesh = join(seed=0)
    model = read_part("models", {"use": "gpt", "vocab": 8, "width": 8, "heads": 2, "depth": 2, "length": 4})
    task = task_of(model.build())
    learner = read_part("strategies", {"use": "hybrid", **strategy}).build(mesh).place(task)
    learner.check("now")
    if mesh.rank == 0:
        placed = [
            (p, learner.placed.placements.placement_of(p)) for _, p in learner.placed.named_parameters()
        ]
        tensor = next(p for p, placement in placed if placement.owner == 0 and placement.shard is None)
        tensor.set_value(tensor + 1e-3)
    try:
        learner.check("later")
    except DivergenceError as error:
        return str(error)


def mixtures(folder, strategies, drifting):
    return {"learned": train_each(folder, strategies), "drifted": [drift(strategy) for strategy in drifting]}


@pytest.mark.long
def test_mixtures_are_one_process_and_know_who_holds_equal_weights(tmp_path):
    mixed = stages("sharding: 2, tensor: 2", [2])
    drifting = [{"sharding": 2, "tensor": 2, "sharding_stage": stage} for stage in (1, 3)]
    ranks = run_ranks(mixtures, 4, str(tmp_path), mixed, drifting, timeout=400)
    assert_same([rank["learned"][0] for rank in ranks], truth())
    for rank in ranks:
        whole, shards = rank["drifted"]
        assert "later: rank 0 holds other values than rank 1" in whole  # three ranks hold against one
        assert "later: rank 1 holds other values than rank 0" in shards


def test_a_checkpoint_goes_on_in_other_layouts(tmp_path):
    """In mid-epoch from tensor × pipeline to data × sharding, to sharding × pipeline, and to one process; and merged,
    to plain Paddle."""
    chain = [
        ("{use: hybrid, tensor: 2, pipeline: 2}", "1 step"),
        ("{use: hybrid, data: 2, sharding: 2, sharding_stage: 3}", "3 steps"),
        ("{use: hybrid, pipeline: 2, sharding: 2, sharding_stage: 2}", "4 steps"),
    ]
    first, *more = run_ranks(train_on, 4, str(tmp_path), chain, more=QUICK["more"])[0]
    check_merged(first["saved"], first["held_out"]["loss"], tmp_path / "model.safetensors")
    more += run_ranks(train, 1, str(tmp_path), "{use: single}", SHORT, resume=True, more=QUICK["more"])
    rows = [row for found in (first, *more) for row in found["rows"]]
    np.testing.assert_allclose(rows, truth(SHORT, more=QUICK["more"])["rows"], rtol=1e-5)


def train_on(folder, chain, **how):
    """In every rank: trains in each layout, on from what the one before has saved."""
    return [
        train(folder, strategy, until, resume=number > 0, **how)
        for number, (strategy, until) in enumerate(chain)
    ]


def check_merged(checkpoint, held_out, path):
    """The merged file is the model's state dict in plain Paddle: its scores are the model's, and so its loss."""
    from safetensors.paddle import load_file

    from models.gpt import Config

    merge(checkpoint, path)
    model = Config(vocab=32, width=32, depth=2, heads=4, length=16).build()
    missing, unexpected = model.set_state_dict(load_file(path))
    assert not missing
    assert not unexpected
    model.eval()
    texts = Tokens(vocab=32, length=16, samples=14, test_samples=10).build("test")
    inputs, targets = (paddle.to_tensor(part) for part in texts.take(np.arange(10)))
    with paddle.no_grad():
        scores = model(inputs)
        assert float(paddle.nn.functional.cross_entropy(scores, targets)) == pytest.approx(held_out, rel=1e-6)
    saved = {n.removeprefix("model/"): v for n, v in weights(checkpoint).items() if n.startswith("model/")}
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), saved[name], err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (4, stages("sharding: 4")),
        (4, stages("sharding: 2, data: 2")),
        (4, stages("sharding: 2, tensor: 2")),
        (2, stages("sharding: 2, recompute: full")),
        *((4, stages("sharding: 2, pipeline: 2", [stage])) for stage in (1, 2, 3)),
        *((8, stages("sharding: 2, tensor: 2, pipeline: 2", [stage])) for stage in (1, 2, 3)),
    ],
)
def test_more_mixtures(tmp_path, ranks, strategies):
    for many in by_layout(ranks, tmp_path, strategies):
        assert_same(many, truth())


OTHERS = [
    "{use: momentum, weight_decay: 0.1, nesterov: true, clip: 0.5}",  # a regularizer, which fleet's step refuses
    "{use: lamb, clip: 0.5}",  # a norm for each parameter: slices of it would have another
    "{use: sgd, clip_value: 0.01}",
]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers(tmp_path, optimizer):
    for many in by_layout(2, tmp_path, stages("sharding: 2"), optimizer=optimizer):
        assert_same(many, truth(optimizer=optimizer))


def head_learns(strategies):
    """Weights, and [loss, norm] of each update, where the optimizer has the head's parameters and none is frozen."""
    mesh, learned = join(seed=0), []
    for strategy in strategies:
        paddle.seed(1)
        body = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 8))
        model = paddle.nn.Sequential(body, paddle.nn.Tanh(), paddle.nn.Linear(8, 3))
        clip = paddle.nn.ClipGradByGlobalNorm(0.1)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model[2].parameters(), grad_clip=clip)
        task = Task(model=model, loss=CrossEntropy(), optimizer=optimizer)
        learner = read_part("strategies", strategy).build(mesh).place(task)
        data = [(np.full([4], i / 12, "float32"), np.int64(i % 3)) for i in range(12)]
        numbers = numbers_of(learner, Loader.plain(data, 4, learner.mesh).read(0))
        learner.check("at the end")
        learned.append((stored_weights(learner), numbers))
    return learned


def test_an_optimizer_of_the_head_alone_with_a_body_that_is_not_frozen():
    """The body's gradients count in the norm that is shown, as on one process, and nobody updates it."""
    one, shown = run_ranks(head_learns, 1, [{"use": "single"}])[0][0]
    strategies = [{"use": "hybrid", "sharding": 2, "sharding_stage": stage} for stage in (1, 2, 3)]
    for ranks in zip(*run_ranks(head_learns, 2, [*strategies, {"use": "data_parallel"}]), strict=True):
        together = {name: value for weights, _ in ranks for name, value in weights.items()}
        assert set(together) == set(one)
        for name, value in together.items():
            np.testing.assert_allclose(value, one[name], rtol=1e-5, atol=1e-6, err_msg=name)
        for _, numbers in ranks:
            np.testing.assert_allclose(numbers, shown, rtol=1e-5)


def offloaded(offload_states: bool) -> list[np.ndarray]:
    paddle.seed(0)
    model = paddle.nn.Linear(4, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    offload = Offload(optimizer)
    for step in range(4):
        model(paddle.full([2, 4], step + 1.0)).square().sum().backward()
        if offload_states:
            offload.to_device()
        optimizer.step()
        if offload_states:
            offload.to_host()
            offload.to_host()  # a second time does nothing
            assert size(states(optimizer)) == 0
        optimizer.clear_grad()
    offload.to_device()
    # Two moments, and two powers a parameter.
    assert size(states(optimizer)) == 2 * 4 * (4 * 3 + 3) + 2 * 2 * 4
    return [p.numpy() for p in model.parameters()] + [t.numpy() for t in states(optimizer)]


def test_an_update_is_bitwise_the_same() -> None:
    for here, offload_states in zip(offloaded(False), offloaded(True), strict=True):
        np.testing.assert_array_equal(here, offload_states)
