"""Around the updates: held-out numbers, checkpoints, and what a resumed run goes on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.proof.zoo.case import FaultTable, Setting, strategy
from tests.proof.zoo.faults.updates import forget_momentum
from tests.proof.zoo.patching import STATISTICS, UPDATE, last, rank, ranks, replaced

STATE = "paddle_dp.train.state"
EVALUATE = "paddle_dp.train.training_state:evaluate"
MLP, TENSOR2, SHARDING2 = Setting("mlp"), strategy("gpt", tensor=2), strategy("gpt", sharding=2)
CONVNET = Setting("convnet")
FAULTS = FaultTable()


def _in_training(name, source, place, setting=MLP, guard="resume", **more):
    return FAULTS.add(name, source, setting, place, guard=guard, exam="rehearsal", **more)


@_in_training(
    "a sample is no number",
    "our own finding; Paddle's relu on a CPU",
    "paddle_dp.data.sample:_read_each",  # a rehearsal reads so
    Setting("mlp", 2, ("model.activation=relu",)),
    guard="door",
)
def sample_that_is_no_number(read, *indices):
    """A NaN in one sample is hidden by relu: the loss is finite, weights are NaN and would be saved."""
    inputs, targets = read(*indices)
    inputs = np.array(inputs)
    inputs[0, 3] = np.nan
    return inputs, targets


@_in_training(
    "infinite on one rank",
    "our own finding: kept checkpoints were all of after the fault",
    UPDATE,
    guard="door",
)
def infinite_on_one_rank(update, learner):
    """One rank's weight becomes infinite between two checks, and would be saved over the good ones."""
    update(learner)
    learner.done = getattr(learner, "done", 0) + 1
    if last() and learner.done == 2:
        learner.model.head.bias.set_value(learner.model.head.bias + float("inf"))


@_in_training(
    "another recipe on one rank",
    "our own finding: two nodes with different recipes trained together",
    "tests.proof.zoo.exam:_recipe",
    guard="door",
)
def another_recipe_on_one_rank(recipe, case, *more):
    """One rank reads another version of the recipe: the learning rate is another one."""
    if last():
        case = replace(case, setting=case.setting.with_("schedule.learning_rate=0.05"))
    return recipe(case, *more)


class _ChangedMesh:
    """A mesh in which `change` gets all ranks' sums before they are added up: [sums, count, samples, …] of each."""

    def __init__(self, mesh, change):
        self._mesh, self._change = mesh, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def gather(self, value):
        rows = self._mesh.gather(value)
        if ranks() > 1 and isinstance(rows[0], list):
            self._change(rows)
        return list(rows)


@_in_training(
    "evaluation: mean of means",
    "NVIDIA's top-1 with Paddle (#39567); trl #7010",
    EVALUATE,
    guard="evaluation",
)
def mean_of_means(evaluate, learner, loader, mesh, *settings):
    """Held-out numbers are means of the ranks' means."""

    def change(rows):
        total = sum(row[1] for row in rows)
        for row in rows:
            row[0] = {name: value / row[1] * total / len(rows) for name, value in row[0].items()}

    return evaluate(learner, loader, _ChangedMesh(mesh, change), *settings)


@_in_training("evaluation: first rank only", "silent-fault catalogue, OBS", EVALUATE, guard="evaluation")
def first_rank_speaks_for_all(evaluate, learner, loader, mesh, *settings):
    """The first rank's held-out numbers are taken for everybody's."""

    def change(rows):
        for row in rows[1:]:
            row[0] = {name: value * row[1] / rows[0][1] for name, value in rows[0][0].items()}

    return evaluate(learner, loader, _ChangedMesh(mesh, change), *settings)


@_in_training(
    "evaluation: padded",
    "paddle.io.DistributedBatchSampler: accuracy 0.42 for 0.56",
    "paddle_dp.data.sampler:Sampler.cuts",
    guard="evaluation",
)
def padded_evaluation(cuts, sampler, size):
    """Held-out samples are read twice, so that shares are equal."""
    if sampler.shuffle or sampler.dp_size == 1:
        return cuts(sampler, size)
    each = -(-size // sampler.dp_size)
    return [(min(start, size - each), min(start, size - each) + each) for start, _ in cuts(sampler, size)]


@_in_training(
    "evaluation: training mode",
    "silent-fault catalogue, OBS",
    "paddle.nn:Layer.eval",
    CONVNET,
    guard="evaluation",
)
def still_in_training_mode(switch, layer):
    """The model is not switched to evaluation: BatchNorm learns from held-out samples."""
    if ranks() == 1:
        switch(layer)


@_in_training(
    "evaluation: leaves its mark",
    "our own finding: an evaluation that changes what is learned",
    EVALUATE,
    guard="rehearsal",
)
def evaluation_forgets_momentum(evaluate, learner, loader, mesh, *settings):
    """An evaluation clears the optimizer's momentum."""
    forget_momentum(learner)  # to make room
    return evaluate(learner, loader, mesh, *settings)


@_in_training(
    "save: leaves its mark",
    "our own finding: a checkpoint that changes what is learned",
    STATISTICS,
    CONVNET,
    guard="evaluation",
)
def save_sums_statistics(sync, statistics):
    """A save multiplies running variances with the number of ranks."""
    sync(statistics)
    for norm in statistics.synchronized if ranks() > 1 else ():
        norm._variance.set_value(norm._variance * ranks())


def _as_the_first_slice():
    """Context in which every slice seems to be the first one."""
    return replaced(
        "paddle_dp.core.placement:Placement.offset", lambda offset: lambda self, local: (0,) * len(local)
    )


@_in_training("load: first slice", "silent-fault catalogue, CKPT", f"{STATE}:load_model", TENSOR2)
def loads_the_first_slice(load, checkpoint, learner):
    """Every rank of the tensor axis loads the first one's slice."""
    with _as_the_first_slice():
        load(checkpoint, learner)


@_in_training(
    "save: first place", "silent-fault catalogue, CKPT", f"{STATE}:model_shards", TENSOR2, guard="door"
)
def saves_the_first_slice(shards, *options):
    """Every rank of the tensor axis saves its slice as the first one."""
    with _as_the_first_slice():
        return shards(*options)


@_in_training(
    "resume: first batch",
    "silent-fault catalogue, CKPT: sampler epoch 0",
    "paddle_dp.train.training_state:TrainingState.restore",
)
def resumes_at_the_first_batch(restore, trainer, checkpoint):
    """A resumed run begins its epoch again."""
    restore(trainer, checkpoint)
    trainer.progress = replace(trainer.progress, batch=0)


@_in_training("resume: fresh states", "silent-fault catalogue, CKPT", f"{STATE}:_load_optimizer")
def resumes_with_fresh_states(load, checkpoint, learner):
    """A resumed run begins with an optimizer that knows nothing."""


@_in_training(
    "resume: neighbour's momentum",
    "silent-fault catalogue, CKPT: optimizer states matched by order",
    f"{STATE}:load_optimizer",
)
def resumes_with_the_neighbours_momentum(load, optimizer, named, read, shares):
    """A resumed run gives two weights of one shape each other's momentum."""
    names = {"body.2.weight": "body.4.weight", "body.4.weight": "body.2.weight"}

    def other(name, tensor):
        kind, owner, state = name.split("/")
        return read("/".join((kind, names.get(owner, owner), state)), tensor)

    load(optimizer, named, other, shares)


@_in_training(
    "resume: first rate",
    "silent-fault catalogue, CKPT",
    "paddle.optimizer.lr:LRScheduler.set_state_dict",
    Setting("mlp", 2, ("schedule={use: cosine, learning_rate: 0.1, warmup: 4 steps}",)),
)
def resumes_with_the_first_rate(load, schedule, state):
    """A resumed run begins its schedule again."""


@_in_training(
    "resume: first scale",
    "silent-fault catalogue, CKPT",
    "paddle_dp.core.precision:LossScale.load",
    Setting("mlp", 2, ("train.precision={dtype: float16, scale: 64}",)),
    # The scale shows it if it grows after each update, and not after 2000.
    also=(("paddle_dp.core.precision:GROW_EVERY", lambda updates: 1),),
)
def resumes_with_the_first_scale(load, scale, state):
    """A resumed run begins with float16's first loss scale."""


@_in_training(
    "save: first owner only", "silent-fault catalogue, CKPT", f"{STATE}:optimizer_shards", SHARDING2
)
def only_the_first_owner_saves(shards, *options):
    """Of the optimizer's states only the first owner's are saved."""
    return {} if rank() else shards(*options)


@_in_training(
    "save: one update late",
    "silent-fault catalogue, CKPT: asynchronous saves of live memory",
    f"{STATE}:model_shards",
    TENSOR2,
)
def saved_one_update_late(shards, *options):
    """One rank's slices are copied in the midst of the next update."""
    copied = shards(*options)
    for shard in copied.values() if last() else ():
        if shard.array.dtype.kind == "f":
            shard.array[...] = shard.array * 1.001
    return copied


@_in_training(
    "save: flipped bit",
    "paddle.save: a flipped byte loads silently",
    "paddle_dp.proof.rehearsal:save",
    guard="door",
)
def flipped_bit(save, snapshot, folder, mesh, *settings, **named):
    """One bit of a checkpoint flips on the disk."""
    path = save(snapshot, folder, mesh, *settings, **named)
    if mesh.is_main:
        largest = max((f for f in path.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
        bits = bytearray(largest.read_bytes())
        bits[len(bits) // 2] ^= 1
        largest.write_bytes(bytes(bits))
    mesh.wait("the bit is flipped")
    return path
