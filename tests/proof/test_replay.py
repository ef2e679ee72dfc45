"""Updates beside what one process makes of the ranks' gradients: sharp for every optimizer, however it bends them."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.optimizer.lr import StepDecay

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.learner import Task, full_model_learner
from paddle_dp.losses.mean_squared_error import MeanSquaredError
from paddle_dp.mesh import Mesh
from paddle_dp.proof.compare import TraceComparison
from paddle_dp.proof.record import ProofRecorder
from paddle_dp.proof.replay import replay
from paddle_dp.proof.tolerance import is_same
from paddle_dp.proof.trace_files import SheetWriter, Trace
from tests.proof.sheets import write_sheet

CLIP = nn.ClipGradByGlobalNorm(0.5)
OPTIMIZERS = {
    "sgd": lambda rate, mine: paddle.optimizer.SGD(rate, mine, grad_clip=CLIP),
    "momentum": lambda rate, mine: paddle.optimizer.Momentum(rate, 0.9, mine, weight_decay=0.01),
    "adamw": lambda rate, mine: paddle.optimizer.AdamW(rate, parameters=mine, grad_clip=CLIP),
    "lamb": lambda rate, mine: paddle.optimizer.Lamb(rate, parameters=mine, grad_clip=CLIP),
    "adagrad": lambda rate, mine: paddle.optimizer.Adagrad(rate, parameters=mine),
}
STEPS = 2


def learner(optimizer):
    paddle.seed(0)
    task = Task(
        model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        loss=MeanSquaredError(),
        optimizer=lambda rate, named: OPTIMIZERS[optimizer](rate, [p for _, p in named]),
        schedule=StepDecay(0.1, step_size=1, gamma=0.5),
    )
    return full_model_learner(task, Mesh.alone())


def batch(step):
    draw = np.random.RandomState(step)
    inputs, targets = (paddle.to_tensor(draw.randn(5, n).astype("float32")) for n in (3, 2))
    return Batch((MicroBatch(inputs, targets, 5),), 5, 0, 0)


def learned(folder, ours, hook=None):
    """A run of `ours`, as a side leaves it; `hook` is laid on the gradients of the first matrix."""
    shards, rows = {}, []
    recorder = ProofRecorder(ours, shards.__setitem__)
    recorder.initial()
    if hook is not None:
        ours.model[0].weight.register_hook(hook)
    for step in range(1, STEPS + 1):
        recorder.watch(step)
        ours.train_batch(batch(step))
        rows.append({})
    recorder.states(STEPS)
    return written(folder, shards, rows)


def written(folder, shards, rows=()):
    recorded = list(range(1, len(rows) + 1))
    facts = {"dtype": "float32", "rows": list(rows), "recorded": recorded, "order": [], "divergence": None}
    write_sheet(folder, "own", 0, shards, facts)
    return Trace.read(folder, "own", 1)


def compared(tmp_path, optimizer, many, replayed=True):
    """r by kind of a side beside one process, whose updates are made again from the side's gradients, or are not."""
    one = learned(tmp_path / "one", learner(optimizer))
    again = replayed_in(tmp_path / "replay", learner(optimizer), many) if replayed else None
    return {row.kind: row.worst.r for row in TraceComparison(one, many, replayed=again).summaries}


def replayed_in(folder, ours, many):
    with SheetWriter(folder, "own", 0) as sheet:
        replay(ours, many, sheet.put)
        sheet.finish({})
    return Trace.read(folder, "own", 1)


def turned(gradient):
    """The sign of what is least in a gradient is the other one: as rounding does it where noise is as large."""
    least = gradient.abs() <= gradient.abs().min()
    return paddle.where(least, -gradient, gradient)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_gradient_does_to_its_update_is_not_held_against_the_update(tmp_path, optimizer):
    many = learned(tmp_path / "many", learner(optimizer), turned)
    found = compared(tmp_path, optimizer, many)
    assert not is_same(found["gradient"])  # it is judged by itself
    assert found["update"] <= 1
    assert found.get("state", 0.0) <= 1
    assert not is_same(compared(tmp_path, optimizer, many, replayed=False)["update"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_rate_of_one_parameter_shows(tmp_path, optimizer):
    ours = learner(optimizer)
    ours.model[2].weight.optimize_attr["learning_rate"] = 1.0001
    found = compared(tmp_path, optimizer, learned(tmp_path / "many", ours))
    assert not is_same(found["update"])
    assert found["gradient"] > 0  # of the second step


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "lamb", "adagrad"])
def test_a_state_that_is_forgotten_shows_in_the_second_update(tmp_path, optimizer):
    ours = learner(optimizer)
    step = ours.update

    def forgetting():
        for table in ours.optimizer._accumulators.values():
            for tensor in table.values():
                tensor.set_value(tensor if tensor.size == 1 else tensor * 0)
        step()

    ours.update = forgetting
    found = compared(tmp_path, optimizer, learned(tmp_path / "many", ours))
    assert not is_same(found["update"])
    assert not is_same(found["state"])


def test_an_update_that_is_left_out_moves_the_schedule_only(tmp_path):
    """As float16 does at an overflow: what follows is the schedule's second rate."""
    ours = learner("sgd")
    shards = {}
    recorder = ProofRecorder(ours, shards.__setitem__)
    recorder.initial()
    ours.rate.step()
    recorder.watch(2)
    ours.train_batch(batch(2))
    facts = {"dtype": "float32", "rows": [{}, {}], "recorded": [2], "order": [], "divergence": None}
    write_sheet(tmp_path / "many", "own", 0, shards, facts)
    many = Trace.read(tmp_path / "many", "own", 1)
    again = replayed_in(tmp_path / "replay", learner("sgd"), many)
    assert again.keys == {number for number in many.keys if number.startswith("update|2|")}
    assert all(np.array_equal(again.array(number), many.array(number)) for number in again.keys)


def test_a_last_batch_in_which_nothing_counts_leaves_states_to_compare(tmp_path):
    """It makes no update: the states after it are those after the last one that did."""
    ours = learner("adamw")
    shards = {}
    recorder = ProofRecorder(ours, shards.__setitem__)
    recorder.initial()
    recorder.watch(1)
    ours.train_batch(batch(1))
    ours.skip_update()
    recorder.states(2)
    facts = {"dtype": "float32", "rows": [{}, {}], "recorded": [1], "order": [], "divergence": None}
    write_sheet(tmp_path / "many", "own", 0, shards, facts)
    many = Trace.read(tmp_path / "many", "own", 1)
    again = replayed_in(tmp_path / "replay", learner("adamw"), many)
    states = {number for number in many.keys if number.startswith("state|2|")}
    assert states and states <= again.keys
    assert compared(tmp_path, "adamw", many)["state"] == 0
