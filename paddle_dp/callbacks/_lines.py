"""What the screen says, as text: pure functions of what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paddle_dp.mesh import Mesh
from paddle_dp.train import Evaluation, Progress, Run

# Numbers of a step that have a place of their own in the line, or none: they are in metrics.jsonl and the dashboard.
_PLACED = {
    "loss",
    "lr",
    "gradient_norm",
    "loss_scale",
    "memory",
    "samples_per_second",
    "seconds_per_step",
    "tokens_per_second",
    "waiting",
}
_WAITING = 0.1  # of the time: from here on it is worth a word


def start(run: Run, progress: Progress, total_steps: int) -> str:
    """What is about to happen."""
    mesh, sampler = run.mesh, run.train_loader.sampler
    epochs = total_steps / max(run.steps_per_epoch, 1)
    so_long = f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    length = f"{total_steps} step{'s' * (total_steps != 1)} of {sampler.batch} samples ({so_long})"
    text = f"{run.name}: {length} on {ranks(mesh)}, {mesh.device}"
    text += f", going on from step {progress.step}" if progress.step else ""
    more = [f"and {len(run.changes) - 3} things more are otherwise"] if len(run.changes) > 3 else []
    return "; ".join([text, *run.changes[:3], *more])


def ranks(mesh: Mesh) -> str:
    """«1 process», «4 ranks», or «4 ranks (data 2 × tensor 2)» where they do not all read samples of their own."""
    if mesh.ranks == 1:
        return "1 process"
    return f"{mesh.ranks} ranks" + (f" ({mesh.axes})" if mesh.axes.data < mesh.ranks else "")


def numbers(found: Mapping[str, float]) -> list[str]:
    """["loss 1.2345", "acc1 0.5312"]: the loss and the scores."""
    return [f"{name} {value:.4f}" for name, value in found.items() if name == "loss" or name not in _PLACED]


def step(progress: Progress, found: Mapping[str, float]) -> str:
    """[epoch 0, step 5] loss 1.2345  acc1 0.5312  lr 3.0e-03  1234 samples/s"""
    return f"[epoch {progress.epoch}, step {progress.step}] " + "  ".join([*numbers(found), *speed(found)])


def speed(found: Mapping[str, float]) -> list[str]:
    """["lr 3.0e-03", "1234 samples/s"], for texts tokens/s, and the share of time waiting for data if it matters."""
    parts = [f"lr {found['lr']:.1e}", f"{found['samples_per_second']:.0f} samples/s"]
    parts += [f"{found['tokens_per_second']:.0f} tokens/s"] if "tokens_per_second" in found else []
    waiting = found.get("waiting", 0.0)
    return [*parts, f"{waiting:.0%} waiting for data"] if waiting >= _WAITING else parts


def short(found: Mapping[str, float]) -> str:
    """loss 1.2345  acc1 0.5312  lr 3.0e-03  1234/s: what fits beside a bar on 80 columns, so one score only.

    Of texts, the tokens are counted: 5678 tok/s.
    """
    tokens = found.get("tokens_per_second")
    pace = f"{tokens:.0f} tok/s" if tokens is not None else f"{found['samples_per_second']:.0f}/s"
    return "  ".join([*numbers(found)[:2], f"lr {found['lr']:.1e}", pace])


def evaluated(progress: Progress, found: Evaluation) -> str:
    """[epoch 1, step 23] held-out: loss 0.5310  acc1 0.8917"""
    return f"[epoch {progress.epoch}, step {progress.step}] held-out: " + "  ".join(numbers(found.numbers))


def duration(seconds: float) -> str:
    """12.3 s, 4:05, 1:02:03."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary(
    run: Run,
    steps: int,
    seconds: float,
    found: Evaluation | None,
    saved: Path | None,
    differences: Sequence[str] = (),
) -> Iterable[str]:
    """What a person wants to know at the end, and what can be done next. `differences` are from one process."""
    if found is not None:  # its numbers are on the screen already
        yield f"  each of the {found.samples} held-out samples counted once"
    if run.mesh.ranks > 1 and steps:  # the training has just compared the weights, and would have failed
        if differences:
            yield "  weights that ranks share are equal bit by bit; they are not those of one process:"
            yield from (f"  - {difference}" for difference in differences)
        else:
            same = "same global batches and gradients, shared weights bit-equal"
            yield f"  as on one process, to the rounding of {_precision(run)}: {same}"
    yield f"{steps} step{'s' * (steps != 1)} in {duration(seconds)}. The run is in {run.folder}"
    if saved is not None:
        yield f"  checkpoint   {saved}"
    yield f"  dashboard    paddle-dp dashboard {run.folder.parent}"
    if run.recipe is not None:
        many = max(run.mesh.ranks, 2)
        yield f"  the proof    paddle-dp verify {run.folder / 'recipe.yaml'} --ranks {many}"


def _precision(run: Run) -> str:
    return run.recipe.train.precision.dtype if run.recipe is not None else "its precision"
