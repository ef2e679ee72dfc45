"""What a model remembers: saving never changes what is learned, and what cannot be one process's is said."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.callbacks import _gallery
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.extra_forwards import extra_forwards
from paddle_dp.data import Loader
from paddle_dp.learner import Task
from paddle_dp.learner.task import full_model_learner
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from paddle_dp.strategies.data_parallel import Config
from paddle_dp.text import CAN_DIFFER
from paddle_dp.train.evaluate import evaluate, names_of_numbers
from tests.house.learners import task_of
from tests.ranks import run_ranks

FEATURES, CLASSES = 6, 4


class Centred(nn.Layer):
    """Subtracts a moving centre, which it updates from its samples and reads: another one on each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", paddle.zeros([8]))
        self.register_buffer("seen", paddle.zeros([1], "int64"))
        self.register_buffer("scale", paddle.full([1], 0.3))

    def forward(self, x):
        if self.training:
            with paddle.no_grad():
                self.centre.set_value(0.8 * self.centre + 0.2 * x.mean(0))
                self.seen.set_value(self.seen + 1)
        return (x - self.centre) * self.scale


class Carried(nn.Layer):
    """Adds what it has seen before, which it writes in each forward, also in an evaluation's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", paddle.zeros([8]))
        self.register_buffer("calls", paddle.zeros([1], "int64"))

    def forward(self, x):
        y = x + self.state
        self.state = (0.5 * self.state + 0.1 * x.mean(0)).detach()  # another tensor
        self.calls.add_(paddle.ones([1], "int64"))  # the same tensor
        return y


class Ready(nn.Layer):
    """Fills a buffer from the samples of its first forward, as ActNorm does, and says so in a plain flag."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", paddle.zeros([8]))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.scale.set_value((1 / (1 + x.abs().mean(0))).detach())
            self.ready = True
        return x * self.scale


class Late(nn.Layer):
    """Registers its hidden state, and counts its forwards, from the first one on."""

    def forward(self, x):
        if not hasattr(self, "state"):
            self.calls = 0
            self.register_buffer("state", paddle.zeros([8]))
        self.calls += 1
        y = x + self.state / self.calls
        self.state = (0.5 * self.state + 0.1 * x.mean(0)).detach()
        return y


class Keyed(nn.Layer):
    """Keeps what it computes for a number of samples in a tuple, beside a buffer, under a plain key."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", paddle.full([8], 2.0))
        self.length, self.cache, self.projection = 0, (), None

    def forward(self, x):
        if self.projection is None:
            self.projection = nn.Linear(8, 8)
        if len(x) != self.length:
            self.length, self.cache = len(x), (self.scale * len(x),)
        return x * self.cache[0]


class Grown(nn.Layer):
    """Registers a longer buffer, of the length in its plain attribute, when it meets more samples."""

    def __init__(self):
        super().__init__()
        self.grow(1)

    def grow(self, length):
        self.length = length
        self.register_buffer("scale", paddle.ones([length, 1]), persistable=False)

    def forward(self, x):
        if len(x) > self.length:
            self.grow(len(x))
        return x * self.scale[: len(x)]


def frozen(norm):
    norm.eval()
    return norm


MODELS = {
    "buffer": lambda: [nn.Linear(FEATURES, 8), Centred(), nn.Linear(8, CLASSES)],
    "carried": lambda: [nn.Linear(FEATURES, 8), Carried(), nn.Linear(8, CLASSES)],
    "spectral": lambda: [nn.utils.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)],
    "weight_norm": lambda: [nn.utils.weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)],
    "legacy": lambda: [nn.Linear(FEATURES, 8), nn.BatchNorm(8, act="tanh"), nn.Linear(8, CLASSES)],
    "global": lambda: [nn.Linear(FEATURES, 8), nn.BatchNorm1D(8, use_global_stats=True), nn.Linear(8, CLASSES)],
    "frozen": lambda: [nn.Linear(FEATURES, 8), frozen(nn.BatchNorm1D(8)), nn.Linear(8, CLASSES)],
}  # fmt: skip


def point(i):
    random = np.random.RandomState(i)
    return random.randn(FEATURES).astype("float32"), np.int64(random.randint(CLASSES))


POINTS = [point(i) for i in range(17)]


def learn(mesh, kind, interrupted=False, sync=False, updates=6):
    """Losses, weights, buffers and differences after some updates in float64.

    17 samples in batches of 4: in the last batch, of one sample, all ranks but one compute on a dummy.
    """
    paddle.seed(5)
    task = task_of(nn.Sequential(*MODELS[kind]()), optimizer="Momentum", rate=0.2, dtype="float64")
    learner = Config(sync_batch_norm=sync).build(mesh).place(task)
    train, test = Loader.plain(POINTS, 4, mesh, seed=1), Loader.plain(POINTS, 4, mesh, shuffle=False)
    losses = []
    for epoch in range(3):
        for batch in train.read(epoch):
            if len(losses) == updates:
                break
            losses.append(learner.train_batch(batch, collect_metrics=True)["loss"])
            if interrupted:
                learner.statistics.sync()
                evaluate(learner, test, mesh)
    learner.check("test")
    state = {name: tensor.numpy() for name, tensor in learner.placed.state().items()}
    return [losses, state, learner.differences()]


def together():
    """All cases in one job."""
    mesh, found = join(), {}
    for kind in MODELS:
        found[kind] = [learn(mesh, kind, interrupted, sync=kind == "legacy") for interrupted in (False, True)]
    found["local"] = [learn(mesh, "legacy")]
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(together, 3)


def same(one, other, bound=1e-12):
    np.testing.assert_allclose(other[0], one[0], rtol=bound)
    for name, value in one[1].items():
        np.testing.assert_allclose(other[1][name], value, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_evaluating_and_saving_change_nothing(ranks, kind):
    for rank in ranks:
        plain, interrupted = rank[kind]
        assert plain[0] == interrupted[0]
        assert plain[1] == interrupted[1]


@pytest.mark.parametrize("kind", MODELS)
def test_evaluating_changes_nothing_on_one_process(kind):
    plain, interrupted = (learn(Mesh.alone(), kind, interrupted) for interrupted in (False, True))
    assert plain[0] == interrupted[0]
    same(plain, interrupted, 0)


def test_an_evaluations_first_batch_and_samples_on_the_screen_leave_buffers_as_they_were():
    model = nn.Sequential(*MODELS["carried"]())
    learner = full_model_learner(task_of(model), Mesh.alone())
    x = paddle.to_tensor(np.stack([x for x, _ in POINTS[:3]]))
    model(x)
    before = {name: tensor.numpy() for name, tensor in model.named_buffers()}
    assert before["1.calls"] == 1 and before["1.state"].any()
    names_of_numbers(learner, Loader.plain(POINTS, 4, Mesh.alone(), shuffle=False), Mesh.alone())
    with _gallery._unchanged(learner):
        assert not model.training
        learner.runner.predict(x)
    assert model.training
    for name, tensor in model.named_buffers():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)


@pytest.mark.parametrize("kind", [Ready, Late])
def test_an_evaluation_before_the_training_changes_nothing(kind):
    """A buffer was put back to zeros, and the flag beside it still said that it was filled: a scale of 0, silently."""
    losses = []
    for evaluates in (False, True):
        paddle.seed(5)
        model = nn.Sequential(nn.Linear(FEATURES, 8), kind(), nn.Linear(8, CLASSES))
        learner = full_model_learner(task_of(model, rate=0.2), Mesh.alone())
        loader = Loader.plain(POINTS, 4, Mesh.alone(), shuffle=False)
        if evaluates:
            evaluate(learner, loader, Mesh.alone())
            assert not vars(model[1]).get("ready") and "state" not in model[1]._buffers
        losses.append([learner.train_batch(x, collect_metrics=True)["loss"] for x in loader.read(0)])
    assert losses[0] == losses[1]


def test_a_buffer_that_evaluations_grow_can_grow_in_each_of_them():
    """The second one ended with "Broadcast dimension mismatch"."""
    learner = full_model_learner(task_of(nn.Sequential(Grown(), nn.Linear(FEATURES, CLASSES))), Mesh.alone())
    for size in (4, 4, 6):
        evaluate(learner, Loader.plain(POINTS, size, Mesh.alone(), shuffle=False), Mesh.alone())
    assert learner.model[0].length == len(learner.model[0].scale) == 1


def test_a_key_and_what_is_kept_under_it_are_put_back_together():
    layer, few, many = Keyed(), paddle.ones([2, 8]), paddle.ones([3, 8])
    with extra_forwards(layer):
        layer(many)
    made = layer.projection
    assert made is not None and layer(few)[0, 0].item() == 4.0  # it keeps the weights that it made
    with extra_forwards(layer):
        layer(many)
    assert layer.length == 2 and layer(few)[0, 0].item() == 4.0 and layer.projection is made


@pytest.mark.parametrize("kind", ["spectral", "weight_norm", "legacy", "global", "frozen"])
def test_one_process_learns_the_same(ranks, kind):
    one = learn(Mesh.alone(), kind, sync=kind == "legacy")
    for rank in ranks:
        same(one, rank[kind][0])
        assert rank[kind][0][2] == []


def test_a_buffer_that_goes_apart_is_the_first_ranks_and_is_named(ranks):
    first = ranks[0]["buffer"][0]
    one = learn(Mesh.alone(), "buffer")
    assert one[2] == []
    assert abs(one[0][-1] - first[0][-1]) > 1e-6, "the case shows nothing"
    for rank in ranks:
        same(first, rank["buffer"][0], 0)
        (said,) = rank["buffer"][0][2]
        assert said.startswith("buffer 1.centre is updated by forward from each rank's own samples")


def test_a_local_batch_norm_is_named_with_what_helps(ranks):
    for rank in ranks:
        (said,) = rank["local"][0][2]
        assert said.startswith(
            "1 BatchNorm layer normalizes over one rank's samples (1): strategy.sync_batch_norm=true"
        )


def test_looking_moves_at_powers_of_two_only():
    """One rank alone never looks: there is nobody to differ from."""
    asked = []
    buffers = Buffers(lambda: asked.append(1) or [], Mesh.alone())
    for _ in range(8):
        buffers.sync()
    assert not asked


def late() -> list[str]:
    """What is said of a buffer that forward changes in the seventh update, where the fourth was the last look."""
    mesh = join()
    paddle.seed(1)
    model = nn.Linear(FEATURES, CLASSES)
    model.register_buffer("late", paddle.zeros([FEATURES]))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    task = Task(model=model, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=optimizer)
    learner = Config().build(mesh).place(task)
    x = paddle.full([2, FEATURES], 1.0 + mesh.rank)
    for index in range(7):
        learner.train_batch(
            Batch((MicroBatch(x, paddle.zeros([2], "int64"), 2, 2 * mesh.rank),), 4, index, 0)
        )
    model.late.set_value(x.mean(0))
    return learner.differences()


def test_a_buffer_that_comes_apart_late_is_named():
    for (said,) in run_ranks(late, 2):
        assert said.startswith(
            "buffer late is updated by forward from each rank's own samples; one process updates from all samples"
        )


def unlike_shapes() -> list:
    """Buffers with another shape on each rank, and one with other values, after two updates."""
    mesh = join()
    cache, count = paddle.full([4 if mesh.rank else 500, 5], 1.0), paddle.full([1], 1.0 + mesh.rank)
    buffers = Buffers(lambda: [("cache", cache), ("count", count)], mesh)
    sentences = [buffers.sync(), buffers.sync(), buffers.differences()]
    return [cache.shape, count.item(), sentences]


def test_a_buffer_with_another_shape_on_each_rank_is_not_exchanged_and_can_differ():
    """A broadcast of 500 rows to a rank with 4 would end its process."""
    ranks = run_ranks(unlike_shapes, 2)
    assert [shape for shape, _, _ in ranks] == [[500, 5], [4, 5]]
    for _, count, (first, second, (certain, possible)) in ranks:
        assert count == 1.0
        assert first == [certain] and second == []  # as soon as it is known, and once
        assert certain.startswith(
            "buffer count is updated by forward from each rank's own samples, and all ranks go"
        )
        assert "belongs in a plain Python list" in certain
        assert possible.startswith("buffer cache has another shape on each rank") and possible.endswith(
            CAN_DIFFER
        )


def resized_later() -> list:
    """The shapes of a buffer that differed in values alone at first, and its values, after two more updates."""
    mesh = join()
    values = [paddle.full([2], 1.0 + mesh.rank)]
    buffers = Buffers(lambda: [("last", values[0])], mesh)
    buffers.sync()
    shapes = [values[0].tolist()]
    for length in (3 - mesh.rank, 4):
        values[0] = paddle.full([length], 1.0 + mesh.rank)
        buffers.sync()
        shapes.append(values[0].tolist())
    return shapes


def test_a_diverging_buffer_is_not_exchanged_while_its_shapes_differ():
    """As after an epoch's last batch, whose shares are uneven. The broadcast would end a rank by SIGABRT."""
    first, second = run_ranks(resized_later, 2)
    assert first == [[1, 1], [1, 1, 1], [1] * 4]
    assert second == [[1, 1], [2, 2], [1] * 4]


def served() -> list:
    """Buffers of a server and two workers, which have replaced them by longer ones, after an update and a `sync`."""
    mesh = join(seed=1, servers=1)
    model = nn.Linear(FEATURES, CLASSES)
    for name in ("rows", "seen", "cache"):
        model.register_buffer(name, paddle.zeros([1]))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    task = Task(model=model, loss=CrossEntropy().build(), optimizer=optimizer)
    learner = read_part("strategies", {"use": "parameter_server"}).build(mesh).place(task)
    if mesh.reads:
        model.rows, model.seen = paddle.full([3], 7.0), paddle.full([2], float(mesh.rank))
        model.cache = paddle.full([1 + mesh.rank], 1.0)
    sentences = learner.buffers.sync()
    seen = model.seen.tolist()
    learner.statistics.sync()
    return [sentences, seen, *(buffer.tolist() for buffer in model.buffers())]


def test_a_server_takes_the_first_worker_s_buffers_in_their_shape():
    """A rank ended: "cannot reshape array of size 16 into shape (24,)"; workers with one shape kept other values."""
    server, *workers = run_ranks(served, 3)
    for sentences, seen, rows, *_ in (server, *workers):
        assert sentences[0].startswith("buffer seen is updated") and "more" not in sentences[0]
        assert seen == [1, 1] and rows == [7, 7, 7]
    assert [rank[-1] for rank in (server, *workers)] == [[1, 1], [1, 1], [1, 1, 1]]


class CarriedAlone(nn.Layer):
    """Adds what it has seen of each of its samples, in a plain list, which evaluations do not write."""

    def __init__(self):
        super().__init__()
        self.states = [paddle.zeros([1])]

    def forward(self, x):
        y = x + self.states[0]
        if self.training:
            self.states = [(0.5 * y).detach()]
        return y


def carry(batch):
    """Losses of updates whose batches continue the samples of those before, each with an evaluation after it."""
    mesh = join()
    paddle.seed(5)
    model = nn.Sequential(nn.Linear(FEATURES, 8), CarriedAlone(), nn.Linear(8, CLASSES))
    learner = Config().build(mesh).place(task_of(model, optimizer="Momentum", rate=0.2, dtype="float64"))
    order = Loader.plain(POINTS[:16], batch, mesh, shuffle=False)
    losses = []
    for each in order.read(0):
        losses.append(learner.train_batch(each, collect_metrics=True)["loss"])
        evaluate(learner, order, mesh)
    return losses


def test_state_of_single_samples_in_a_list_is_one_processs_as_the_page_says():
    (one,), two = run_ranks(carry, 1, 4), run_ranks(carry, 2, 4)
    for losses in two:
        np.testing.assert_allclose(losses, one, rtol=1e-12)


KINDS = [
    "float32", "float64", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64", "uint8",
    "complex64",
]  # fmt: skip
PLACED_BY = [
    {"use": "data_parallel"},
    {"use": "data_parallel", "exchange": "bucketed"},
    {"use": "local_sgd"},
    {"use": "async_average"},
]


class OfAllKinds(nn.Layer):
    """Buffers of every kind of numbers, one without a dim, an empty one, an empty weight, and one that is transposed;
    other numbers on each rank."""

    def __init__(self, rank):
        super().__init__()
        for kind in KINDS:
            self.register_buffer(f"of_{kind}", paddle.full([3], rank == 0).astype(kind))
        self.register_buffer("alone", paddle.to_tensor(float(rank)))
        self.register_buffer("empty", paddle.zeros([0, 3]))
        self.nothing = self.create_parameter([0, 2])
        turned = paddle.full([2, 4], float(rank)).transpose([1, 0])
        self.turned = paddle.base.framework.EagerParamBase.from_tensor(turned)

    def forward(self, x):
        return x @ self.turned + self.nothing.sum(0)


def placed():
    """What each strategy has made of this rank's buffers, as texts, and of the transposed weight."""
    mesh, found = join(), []
    for words in PLACED_BY:
        model = OfAllKinds(mesh.rank)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        task = Task(model=model, loss=CrossEntropy().build(), optimizer=optimizer)
        read_part("strategies", words).build(mesh).place(task)
        found.append([*(str(buffer.tolist()) for buffer in model.buffers()), str(model.turned.tolist())])
    return found


@pytest.mark.long
def test_every_kind_of_buffer_is_the_first_rank_s_everywhere():
    """Over gloo a broadcast of int16, complex or 16-bit numbers ended the process."""
    first, second = run_ranks(placed, 2)
    wanted = [str(b.tolist()) for b in OfAllKinds(0).buffers()]
    assert first == second and all(row[:-1] == wanted for row in first)
