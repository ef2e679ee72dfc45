"""Every held-out sample once, on any number of ranks, and the numbers are scikit-learn's."""

import random

import numpy as np
import pytest

from tests.house.training import untried
from tests.ranks import run_ranks

SAMPLES, CLASSES = 23, 6


class Points:
    classes = tuple("abcdef")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return np.random.RandomState(i).randn(4).astype("float32"), np.int64(i % CLASSES)


def evaluated(batch):
    import paddle
    from paddle import nn

    from paddle_dp.data import Loader
    from paddle_dp.mesh import join
    from paddle_dp.strategies.data_parallel import Config
    from paddle_dp.train.evaluate import evaluate, names_of_numbers
    from tests.house.learners import task_of

    mesh = join(seed=2)
    task = task_of(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.Linear(8, CLASSES)))
    learner = Config(sync_batch_norm=False).build(mesh).place(task)
    if mesh.ranks > 1:  # ranks whose statistics have drifted apart evaluate the same model all the same
        mean = learner.model[1]._mean
        mean.set_value(mean + (mesh.rank - (mesh.ranks - 1) / 2))
    names = names_of_numbers(learner, Loader.plain(Points(), batch, mesh, shuffle=False), mesh)
    found = evaluate(learner, Loader.plain(Points(), batch, mesh, shuffle=False), mesh)
    outputs = [
        learner.runner.predict(paddle.to_tensor(Points()[i][0][None])).numpy()[0] for i in range(SAMPLES)
    ]
    assert names == set(found.numbers), names
    return {**found.numbers, "samples": found.samples, "confusion": found.confusion, "outputs": np.array(outputs),
            "classes": found.classes, "table": found.per_class(), "training": learner.model.training}  # fmt: skip


def test_the_numbers_are_scikit_learns(alone):
    from sklearn import metrics

    truth = np.arange(SAMPLES) % CLASSES
    scores = np.array(alone["outputs"], "float64")
    said = scores.argmax(1)
    odds = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert alone["samples"] == SAMPLES
    assert alone["acc1"] == pytest.approx(metrics.accuracy_score(truth, said), abs=1e-7)
    assert alone["acc5"] == pytest.approx(metrics.top_k_accuracy_score(truth, scores, k=5), abs=1e-7)
    assert alone["loss"] == pytest.approx(metrics.log_loss(truth, odds), rel=1e-5)
    assert alone["confusion"] == metrics.confusion_matrix(truth, said).tolist()
    precision, recall, f1, support = metrics.precision_recall_fscore_support(truth, said, zero_division=0)
    for row, *wanted in zip(alone["table"], precision, recall, f1, support, strict=True):
        assert [row["precision"], row["recall"], row["f1"], row["support"]] == pytest.approx(wanted)
    assert [row["class"] for row in alone["table"]] == list("abcdef")
    assert alone["training"]


def test_ranks_count_every_sample_once(alone, four):
    """23 samples in batches of 10: a last batch of 3 leaves a rank of 4 without any."""
    for found, _ in four:
        assert found["samples"] == SAMPLES
        assert found["confusion"] == alone["confusion"]
        assert (found["acc1"], found["acc5"]) == (alone["acc1"], alone["acc5"])
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def evaluated_with_exchanges(folder):
    """The evaluation of 21 samples in batches of 10, by a model and a loss with collectives of their own."""
    import paddle
    import paddle.distributed as dist
    from paddle import nn

    from paddle_dp import Trainer

    untried()
    paddle.seed(3)

    def exchanged(x):
        if dist.get_world_size() > 1:
            dist.all_gather([], x.detach().mean(0))
        return x

    class Exchanging(nn.Linear):
        def forward(self, x):
            return exchanged(super().forward(x))

    def loss(outputs, targets):
        return nn.functional.cross_entropy(exchanged(outputs), targets, reduction="none")

    class Some(Points):
        def __len__(self):
            return 21

    trainer = Trainer.of(
        model=Exchanging(4, CLASSES), train=Points(), loss=loss, optimizer="sgd", batch=10, test=Some(), folder=folder,
        length="1 step", callbacks=["evaluate"],
    )  # fmt: skip
    return trainer.evaluate().numbers["loss"]


def test_ranks_without_a_sample_take_part_in_exchanges_of_the_model_and_the_loss(tmp_path):
    """The rank with the 21st sample waited for the other until patience ended."""
    expected = run_ranks(evaluated_with_exchanges, 1, str(tmp_path / "one"))[0]
    for loss in run_ranks(evaluated_with_exchanges, 2, str(tmp_path / "two"), timeout=60):
        assert loss == pytest.approx(expected, rel=1e-6)


EVERY_THIRD = {"samples": 8, "batch": 3}


def evaluated_in_part(folder, held_out):
    """A training of no step over Trainer.of, whose evaluation takes some held-out samples."""
    import paddle
    from paddle import nn

    from paddle_dp import Trainer

    paddle.seed(3)
    read = []

    class Noted(Points):
        def __getitem__(self, i):
            read.append(int(i))
            return super().__getitem__(i)

    trainer = Trainer.of(
        model=nn.Linear(4, CLASSES), train=Points(), loss="cross_entropy", optimizer="sgd", batch=10, test=Noted(),
        folder=folder, length="1 step", callbacks=["evaluate"], metrics=[row_numbers], evaluation=held_out,
    )  # fmt: skip
    read.clear()
    result = trainer.evaluate()
    return {
        **result.numbers, "samples": result.samples, "counted": result.counted, "read": sorted(read),
        "rows": result.confusion.sum(), "batch": trainer.run.test_loader.sampler.batch,
    }  # fmt: skip


class Lines:
    """A stream of points, in their order."""

    def __init__(self, split):
        self.split = split

    def __iter__(self):
        return iter([Points()[i] for i in range(SAMPLES)])


def row_numbers(outputs, targets):
    """A number that tells the order of the rows."""
    return float((np.arange(1, len(targets) + 1) * targets).sum() + outputs.shape[0])


def both(folder, *held_out):
    """In each rank: the evaluation of all samples, and of some."""
    untried()
    some = (evaluated_in_part(f"{folder}/{number}", each) for number, each in enumerate(held_out))
    return [evaluated(10), *some]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    return run_ranks(both, 1, folder, EVERY_THIRD, {"samples": 500, "batch": 100})[0]


@pytest.fixture(scope="module")
def alone(one_process):
    return one_process[0]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(both, 4, str(tmp_path_factory.mktemp("four")), EVERY_THIRD)


def test_a_part_of_the_held_out_samples_is_the_same_on_any_number_of_ranks(one_process, four):
    """Batches of 3 leave a rank of 4 without any."""
    chosen = [i * SAMPLES // 8 for i in range(8)]
    _, one, all_of_them = one_process
    assert one["read"] == chosen
    assert (one["samples"], one["rows"], one["batch"]) == (8, 8, 3)
    assert one["counted"] == "each of 8 of the 23 held-out samples counted once"
    assert one["row_numbers"] == sum((n + 1) * (i % CLASSES) for n, i in enumerate(chosen)) + 8
    rows = [row for _, row in four]
    assert sorted({*chosen} & {i for row in rows for i in row["read"]}) == chosen
    for row in rows:
        assert row["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for name in ("acc1", "samples", "rows", "row_numbers", "counted"):
            assert row[name] == one[name]
    assert (all_of_them["samples"], all_of_them["batch"]) == (SAMPLES, 100)
    assert all_of_them["counted"] == "each of the 23 held-out samples counted once"


def test_a_part_of_a_stream_is_refused(tmp_path):
    from paddle_dp.errors import UsageError
    from tests.house.training import build_trainer

    recipe = """
model: {use: mlp, inputs: 4, classes: 6}
dataset: {use: tests.train.test_evaluate.Lines}
loss: {use: cross_entropy}
optimizer: {use: sgd}
train: {length: 1 step, batch: 4}
evaluation: {samples: 5}
"""
    with pytest.raises(UsageError, match=r"evaluation.samples: the 5 samples are .* a stream"):
        build_trainer(recipe, tmp_path)


class Scored:
    """Samples whose scores are the input: class i % 100 of 400 is true, and predicted but for every seventh sample."""

    def __init__(self, dtype):
        self.true = np.arange(120) % 100
        self.predicted = self.true + (np.arange(120) % 7 == 0)
        self.dtype = dtype

    def __len__(self):
        return 120

    def __getitem__(self, i):
        return np.eye(400, dtype="float32")[self.predicted[i]], np.array(self.true[i], self.dtype)


def evaluated_scores(folder, dataset, loss):
    """The evaluation of a model that gives its inputs."""
    import paddle

    from paddle_dp import Trainer

    model = paddle.nn.Linear(400, 400, bias_attr=False)
    model.weight.set_value(paddle.eye(400))
    trainer = Trainer.of(
        model=model, train=dataset, loss=loss, optimizer="sgd", batch=60, test=dataset, folder=folder, length="1 step",
        callbacks=["evaluate"],
    )  # fmt: skip
    return trainer.evaluate()


def test_a_loss_that_writes_into_targets_changes_no_other_number(tmp_path):
    def loss(outputs, targets):
        targets[targets < 50] = 0
        return outputs.sum(1)

    data = Scored("int64")
    result = evaluated_scores(str(tmp_path), data, loss)
    assert result.numbers["acc1"] == pytest.approx((data.true == data.predicted).mean())
    assert result.confusion[0].sum() == 2


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_classes_of_a_small_dtype_are_counted_right(tmp_path, dtype):
    """The dtype holds each of the 400 classes' numbers that occur, but not a pair's."""
    data, expected = Scored(dtype), np.zeros((400, 400), "int64")
    np.add.at(expected, (data.true, data.predicted), 1)
    np.testing.assert_array_equal(evaluated_scores(str(tmp_path), data, "cross_entropy").confusion, expected)


def own_loss():
    from paddle import nn

    return nn.CrossEntropyLoss(ignore_index=0, reduction="none")


@pytest.mark.parametrize(
    "loss", [{"use": "cross_entropy", "ignore_index": 0}, own_loss], ids=["recipe", "own"]
)
def test_targets_that_the_loss_ignores_are_in_no_table(tmp_path, loss):
    """Class 0 is among the outputs, and is predicted wrong for one of its two samples."""
    data = Scored("int64")
    counted = data.true != 0
    found = evaluated_scores(str(tmp_path), data, loss() if callable(loss) else loss)
    assert found.confusion[0].sum() == 0 and found.confusion.sum() == counted.sum()
    assert found.numbers["acc1"] == pytest.approx((data.true == data.predicted)[counted].mean())
    assert found.per_class()[0]["support"] == 0


def test_the_held_out_loss_is_divided_by_the_count_that_training_divides_by(tmp_path):
    """By the 120 losses it was, of a loss that states another number and returns none."""

    def loss(outputs, targets):
        return outputs.sum(1) * 0 + 5.0

    loss.count = lambda targets: (targets < 40).sum()
    found = evaluated_scores(str(tmp_path), Scored("int64"), loss)
    assert found.numbers["loss"] == pytest.approx(5.0 * 120 / (Scored("int64").true < 40).sum())


def test_a_loss_is_evaluated_in_the_precision_of_training(tmp_path):
    """A loss that calls a layer computed in float32, and its number was another one than the training's."""
    import paddle

    from paddle_dp import Trainer
    from paddle_dp.train import Callback

    class OwnHead(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.body, self.head = paddle.nn.Linear(4, 16), paddle.nn.Linear(16, CLASSES)

        def forward(self, inputs):
            return self.body(inputs)

        def loss(self, outputs, targets):
            return paddle.nn.functional.cross_entropy(self.head(outputs), targets, reduction="none")

    numbers = []

    class Numbers(Callback):
        def step(self, moment):
            numbers.append(moment.numbers["loss"])

        def evaluated(self, moment, evaluation):
            numbers.append(evaluation.numbers["loss"])

    model = OwnHead()
    Trainer.of(
        model=model, loss=model.loss, optimizer="sgd", schedule={"use": "constant", "learning_rate": 1e-30},
        train=Points(), test=Points(), batch=SAMPLES, precision="bfloat16", folder=tmp_path,
        callbacks=[Numbers(), {"use": "evaluate", "every": "1 step"}],
    ).fit("1 step")  # fmt: skip
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


def drawing_weights(folder, callbacks):
    """The weights after four updates of a model that draws from all generators in its forwards, as a VAE does."""
    import paddle

    from paddle_dp import Trainer

    class Noisy(paddle.nn.Linear):
        def forward(self, x):
            noise = paddle.randn(x.shape) + random.random() + float(np.random.standard_normal())
            return super().forward(x + noise)

    for seed in (paddle.seed, random.seed, np.random.seed):
        seed(0)
    model = Noisy(4, CLASSES)
    Trainer.of(
        model=model, train=Points(), test=Points(), loss="cross_entropy", batch=8, optimizer="sgd", folder=folder,
        callbacks=callbacks,
    ).fit("4 steps")  # fmt: skip
    return model.weight.numpy().tolist()


def test_an_evaluation_changes_no_random_number_of_the_training(tmp_path):
    """A resumed run, which evaluates less (the step's checkpoint may precede it) and more, learned other weights."""
    often = [{"use": "evaluate", "every": "1 step"}, {"use": "early_stop", "watch": "acc1", "patience": 9}]
    assert drawing_weights(tmp_path / "often", often) == drawing_weights(tmp_path / "never", [])


DIFFERENTIATING = """
import paddle
from paddle import nn

class Net(nn.Layer):
    def __init__(self, how, enables):
        super().__init__()
        self.net, self.how, self.enables = nn.Linear(2, 1), how, enables

    def forward(self, x):
        if self.enables == "training" and not self.training:
            return self.net(x).expand([-1, 2])
        with paddle.set_grad_enabled(self.enables is True or paddle.is_grad_enabled()):
            x.stop_gradient = False
            u = self.net(x)
            if self.how == "grad":
                return paddle.grad(u, x, create_graph=True)[0]
            return paddle.autograd.jacobian(u, x, batch_axis=0)[:][:, 0]

def of_loss(outputs, targets):
    return (outputs - targets).square().sum(-1)
"""


class Slopes:
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.full(2, i, "float32"), np.zeros(2, "float32")


@pytest.fixture
def pinn(tmp_path):
    (tmp_path / "pinn_of_test.py").write_text(DIFFERENTIATING)
    space = {"__name__": "pinn_of_test"}
    exec(compile(DIFFERENTIATING, str(tmp_path / "pinn_of_test.py"), "exec"), space)
    return space


@pytest.mark.parametrize("how", ["grad", "jacobian"])
def test_a_derivative_without_gradients_is_refused_with_its_line_and_enabled_ones_are_right(
    pinn, how, tmp_path, capfd
):
    """jacobian gave zeros, silently; grad an error about a graph, after an epoch."""
    import paddle

    from paddle_dp import Trainer
    from paddle_dp.errors import UsageError

    def trainer(enables, callbacks=()):
        paddle.seed(3)
        model = pinn["Net"](how, enables)
        optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
        return Trainer.of(
            model=model, train=Slopes("train"), test=Slopes("test"), loss=pinn["of_loss"], optimizer=optimizer,
            batch=4, folder=str(tmp_path / f"run-{enables}"), length="2 steps", callbacks=list(callbacks),
        )  # fmt: skip

    enabled = trainer(True)
    slope = float((enabled.learner.model.net.weight.numpy() ** 2).sum())
    assert enabled.evaluate().numbers["loss"] == pytest.approx(slope, rel=1e-5) and slope > 0.01
    assert "enable_grad" not in capfd.readouterr().err
    line = rf"pinn_of_test\.py, line \d+, in forward: .*{how}(.|\n)*enable_grad"
    with pytest.raises(UsageError, match=line):
        trainer(False, ["evaluate"]).fit()
    assert "the first evaluation will end with this: " in capfd.readouterr().err
    trainer(False).fit()
    assert "an evaluation would end with this: " in capfd.readouterr().err
    of_training = trainer("training", ["evaluate"])  # as a gradient penalty is
    of_training.fit()
    assert of_training.evaluate().numbers["loss"] > 0
    assert "evaluation w" not in capfd.readouterr().err


def test_a_derivative_of_an_output_with_a_graph_beside_one_without_is_computed():
    """`paddle.grad([u, constant], x, allow_unused=True)` was refused, as if u had no graph either."""
    import paddle

    from paddle_dp.core.derivatives import DerivativeError, derivatives_need_gradients

    x = paddle.ones([4, 2])
    x.stop_gradient = False
    with paddle.no_grad(), derivatives_need_gradients():
        with paddle.enable_grad():
            u = x.square()
        assert paddle.grad([u, paddle.ones([4, 1])], x, allow_unused=True)[0].sum() == 16
        with pytest.raises(DerivativeError):
            paddle.grad([x.square(), paddle.ones([4, 1])], x, allow_unused=True)
