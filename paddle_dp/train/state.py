"""From a training to a checkpoint's snapshot and back."""

from __future__ import annotations

from typing import Any

from paddle_dp.checkpoint import Checkpoint, Snapshot
from paddle_dp.checkpoint.optimizer import load_optimizer, optimizer_tensors
from paddle_dp.checkpoint.rng import load_rng_state, rng_state
from paddle_dp.checkpoint.tensors import fill, piece
from paddle_dp.data import Loader
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh.seed import part_ways
from paddle_dp.parallel import Learner
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run

FORMAT = 1


def snapshot(learner: Learner, progress: Progress, run: Run, loader: Loader) -> Snapshot:
    """What this rank brings to a checkpoint: replicated weights are the first rank's to save. Collective."""
    learner.meet()
    tensors = {}
    if learner.mesh.is_first:
        named = {f"model/{name}": tensor for name, tensor in learner.model.state_dict().items()}
        named |= optimizer_tensors(learner.optimizer, learner.named_parameters())
        tensors = {name: piece(name, tensor) for name, tensor in named.items()}
    return Snapshot(tensors=tensors, state=_state(learner, progress, run, loader), own={"rng": rng_state()})


def _state(learner: Learner, progress: Progress, run: Run, loader: Loader) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "progress": progress.state(),
        "schedule": learner.schedule.state_dict() if learner.schedule else None,
        "loss_scale": learner.mixed.scale.state() if learner.mixed.scale else None,
        "data": {"samples": loader.share.samples, "batch": loader.share.batch, "seed": loader.share.seed},
        "ranks": learner.mesh.ranks,
        "recipe": run.recipe.model_dump(mode="json") if run.recipe else None,
    }


def restore(checkpoint: Checkpoint, learner: Learner) -> Progress:
    """Puts a checkpoint into a learner and returns where it was.

    On the number of ranks that saved it, every rank gets its own random stream back and the run goes on bitwise; on
    another number, ranks get fresh streams (dropout differs, the batches do not).
    Raises CheckpointError when the checkpoint does not fit the model.
    """
    load_model(checkpoint, learner)
    load_optimizer(learner.optimizer, learner.named_parameters(), checkpoint.read, checkpoint.names)
    state = checkpoint.state
    if learner.schedule is not None and state["schedule"] is not None:
        learner.schedule.set_state_dict(state["schedule"])
    if learner.mixed.scale is not None and state["loss_scale"] is not None:
        learner.mixed.scale.load(state["loss_scale"])
    progress = Progress(**state["progress"])
    own = checkpoint.own(learner.mesh.rank) if checkpoint.ranks == learner.mesh.ranks else None
    if own is not None:
        load_rng_state(own["rng"])
    else:
        part_ways(state["data"]["seed"] + progress.step, learner.mesh)
    return progress


def load_model(checkpoint: Checkpoint, learner: Learner) -> None:
    """Puts a checkpoint's weights and running statistics into the model.

    Raises CheckpointError that names the first tensor that is missing, left over or of another shape.
    """
    import paddle

    wanted = learner.model.state_dict()
    saved = {name.removeprefix("model/") for name in checkpoint.names if name.startswith("model/")}
    for missing, text in (
        (wanted.keys() - saved, "lacks"),
        (saved - wanted.keys(), "has, and this model has not,"),
    ):
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.folder} {text} '{min(missing)}'{more}: it is another model's."
            )
    with paddle.no_grad():
        for name, tensor in wanted.items():
            fill(tensor, checkpoint, f"model/{name}")
