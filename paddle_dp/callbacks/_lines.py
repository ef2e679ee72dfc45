"""The lines on the screen, as pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.plan.goodput import read_goodput
from paddle_dp.text import CAN_DIFFER, FIRST_SAMPLES, plural
from paddle_dp.train import Evaluation, Progress, Run, Training

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

# Numbers of a step that are not scores: the line shows them elsewhere, or only metrics.jsonl has them.
_NO_SCORES = {
    "lr", "gradient_norm", "loss_scale", "memory", "samples_per_second", "sent", "seconds_per_step", "slowest_rank",
    "slowest_times_others", "tokens_per_second", "waiting",
}  # fmt: skip
_WAITING = 0.1  # share of time spent waiting for data from which on the line shows it


def start(run: Run, progress: Progress, total_steps: int) -> str:
    """The first line: the run's name, length, ranks and device, and changes."""
    mesh, sampler = run.mesh, run.train_loader.sampler
    epochs = sampler.epochs(total_steps)
    in_epochs = f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    batches = f"{sampler.ramp.start} to {sampler.batch}" if sampler.ramp else str(sampler.batch)
    length = f"{plural(total_steps, 'step')} of {batches} samples ({in_epochs})"
    text = f"{run.name}: {length} on {ranks(run)}, {mesh.displayed_device}"
    text += f", going on from step {progress.step}" if progress.step else ""
    if mesh.ranks == 1 and run.recipe is not None and run.recipe.strategy.config.not_promised(run.recipe):
        text += f"; strategy {run.recipe.strategy.name} is for several ranks: --ranks 2"
    idle = mesh.dp_size - -(-sampler.batch // sampler.micro_batches)
    if idle > 0:
        text += f"; {idle} of {mesh.axes.readers} will always be without a sample, for train.batch is {sampler.batch}"
        text += f" in {sampler.micro_batches} micro-batches" if sampler.micro_batches > 1 else ""
    left = len(run.changes) - 3
    more = [f"and {plural(left, 'more change')}"] if left > 0 else []
    return "; ".join([text, *run.changes[:3], *more])


def ranks(run: Run) -> str:
    """ "1 process", "4 ranks", or "4 ranks (data 2 × tensor 2)" if some ranks read the same samples."""
    mesh = run.mesh
    if mesh.ranks == 1:
        return "1 process"
    return f"{mesh.ranks} ranks" + (f" ({run.layout})" if mesh.axes.data < mesh.ranks else "")


def numbers(metrics: Mapping[str, float]) -> list[str]:
    """["loss 1.2345", "acc1 0.5312"]: the loss and the scores."""
    return [f"{name} {value:.4f}" for name, value in metrics.items() if name not in _NO_SCORES]


def step(progress: Progress, metrics: Mapping[str, float]) -> str:
    """[epoch 1, step 5] loss 1.2345  acc1 0.5312  lr 3.0e-03  1234 samples/s"""
    return at(progress) + "  ".join([*numbers(metrics), *speed(metrics)])


def at(progress: Progress) -> str:
    """ "[epoch 1, step 5] ": the epoch of the last update, counted from 1 as the bar does."""
    return f"[epoch {progress.epoch + bool(progress.batch)}, step {progress.step}] "


def speed(metrics: Mapping[str, float]) -> list[str]:
    """["lr 3.0e-03", "1234 samples/s"]; also tokens/s for texts, and the share of time waiting for data if large."""
    fields = [f"lr {metrics['lr']:.1e}", f"{metrics['samples_per_second']:.0f} samples/s"]
    fields += [f"{metrics['tokens_per_second']:.0f} tokens/s"] if "tokens_per_second" in metrics else []
    waiting = metrics.get("waiting", 0.0)
    return [*fields, f"{waiting:.0%} waiting for data"] if waiting >= _WAITING else fields


def short(metrics: Mapping[str, float], room: int) -> str:
    """loss 1.2345  acc1 0.5312  lr 3.0e-03  1234/s: at most `room` columns if possible. The learning rate is dropped
    first, then the score. For texts the speed is in tokens: 5678 tok/s.
    """
    tokens = metrics.get("tokens_per_second")
    pace = f"{tokens:.0f} tok/s" if tokens is not None else f"{metrics['samples_per_second']:.0f}/s"
    scores = numbers(metrics)[:2]
    rows = ([*scores, f"lr {metrics['lr']:.1e}", pace], [*scores, pace], [*scores[:1], pace], scores[:1])
    lines = ["  ".join(fields) for fields in rows]
    return next((line for line in lines if len(line) <= room), lines[-1])


def evaluated(progress: Progress, evaluation: Evaluation) -> str:
    """[epoch 1, step 23] held-out: loss 0.5310  acc1 0.8917"""
    return at(progress) + "held-out: " + "  ".join(numbers(evaluation.numbers))


def duration(seconds: float) -> str:
    """12.3 s, 4:05, 1:02:03."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def left_out(count: int, steps: int) -> str:
    """The line on the updates that the guard left out."""
    return f"{count} of {plural(steps, 'update')} {'was' if count == 1 else 'were'} left out by the guard"


@dataclass(frozen=True)
class Took:
    """A training's cost: `seconds` for its `steps` after step `first`; `sent`: bytes that `sender` sent per step."""

    steps: int
    seconds: float
    sent: float | None = None
    sender: str = "each rank"
    first: int = 0

    def __str__(self) -> str:
        """ "460 steps in 6.4 s, 0.34 MB a step sent by each rank"; here 1 MB is a million bytes, as for links."""
        sent = "" if self.sent is None else f", {self.sent / 1e6:.3g} MB a step sent by {self.sender}"
        return f"{plural(self.steps, 'step')} in {duration(self.seconds)}{sent}"


def nothing_recorded(callback: str, first: int) -> str:
    """The line of a callback whose window of steps begins after step `first`, at which the training had ended."""
    return f"{callback}: nothing was recorded, the training ended before its step {first + 1}."


def mean(counted_numbers: Sequence[tuple[int, float]]) -> float | None:
    """The mean over steps, from pairs (number of steps, value of each of them); None without steps."""
    steps = sum(count for count, _ in counted_numbers)
    return sum(count * number for count, number in counted_numbers) / steps if steps else None


def known(run: Run, training: Training, first: int) -> Iterable[str]:
    """Yields the training's facts at its start, at step `first`, and the proof that it equals one process, or the
    command for a proof. Yields nothing for one process without copies."""
    if _is_alone(run):
        return
    yield f"  {'; '.join(training.facts)}"
    failed = [*failed_trials(run, training)]
    yield from (line for line in _caveats(run, training) if line not in failed)
    yield from _proof(run, first)


def failed_trials(run: Run, training: Training) -> Iterable[str]:
    """Yields the lines on trials that failed with the first samples. They are printed with the first numbers of a step:
    if the first update fails likewise, its error is enough."""
    if not _is_alone(run):
        yield from (_UNKNOWN.format(doubt) for doubt in training.unknown if FIRST_SAMPLES in doubt)


def summary(
    run: Run, took: Took, evaluation: Evaluation | None, saved: Path | None, training: Training
) -> Iterable[str]:
    """Yields the last lines: results, and commands for the next steps."""
    if evaluation is not None:  # its numbers are on the screen already
        yield f"  {evaluation.counted}"
    if took.steps and not _is_alone(run):
        is_distributed = run.mesh.ranks > 1  # their weights were compared, and a difference is an error
        equal = [f"shared weights bit-equal after step {took.first + took.steps}"] if is_distributed else []
        yield f"  {'; '.join([*equal, *training.facts])}"
        yield from _caveats(run, training)
    is_over = not took.steps and took.first >= training.total_steps > 0
    done = f"nothing left to do: all {plural(took.first, 'step')} were done before" if is_over else took
    yield f"{done}. The run is in {run.folder}"
    if goodput := read_goodput(run.folder):  # of a run that was restarted
        yield f"  {goodput}"
    if saved is not None:
        yield f"  checkpoint   {saved}"
        if run.recipe is None and training.learner.placed.is_split:
            merge = shlex.join(["paddle-dp", "merge", str(run.folder), "--out", "model.safetensors"])
            yield f"  weights      each rank's model has a part of them; the checkpoint has all: {merge}"
    if run.identity is not None and run.folder.is_dir():  # the callback `report` writes it after this line
        yield f"  report       {run.folder / 'report.html'}"
    yield f"  dashboard    {shlex.join(['paddle-dp', 'dashboard', str(run.folder.parent)])}"
    yield from _proof(run, took.first)


def _is_alone(run: Run) -> bool:
    copies = run.recipe is not None and run.recipe.strategy.config.batch_chunks > 1
    return run.mesh.ranks == 1 and not copies


def _caveats(run: Run, training: Training) -> Iterable[str]:
    """Yields the differences from one process, certain and possible ones, and the doubts that could not be checked."""
    possible = [each for each in training.differences if each.endswith(CAN_DIFFER)]
    if certain := [each for each in training.differences if each not in possible]:
        copies = run.mesh.ranks == 1
        yield f"  not as {'one process without copies' if copies else 'one process'} computes it:"
        yield from (f"  - {difference}" for difference in certain)
    yield from (f"  can differ: {difference.removesuffix(CAN_DIFFER)}" for difference in possible)
    yield from map(_UNKNOWN.format, training.unknown)


_UNKNOWN = "  not known: {}"


def _proof(run: Run, first: int) -> Iterable[str]:
    """Yields the verdict of `paddle-dp verify` on this training, or the command that gives one."""
    if run.proof is not None:
        proof = run.proof()
        since = f"; these are the updates since step {first}" if first and proof.verdict_key else ""
        yield f"  the proof    {proof.sentence}{since}"
    elif run.recipe is None:
        if run.mesh.ranks > 1:
            yield f"  the proof    {_PROOF_FOR_SCRIPT}"
    elif _is_alone(run) and not run.recipe.strategy.config.not_promised(run.recipe):
        arguments = ["paddle-dp", "verify", str(run.folder / "recipe.yaml"), *_two_ranks(run, run.recipe)]
        yield f"  the proof    {shlex.join(arguments)}"


_PROOF_FOR_SCRIPT = (
    "none that this is one process's result. `paddle-dp audit SCRIPT` watches a script, and "
    "`paddle-dp verify` proves a recipe that names its model (docs/proof.md)"
)


def _two_ranks(run: Run, recipe: Recipe) -> list[str]:
    """["--ranks", "2"], with strategy data_parallel if the run's strategy refuses two ranks."""
    try:
        recipe.strategy.refuse(recipe, 2, run.mesh.computes_on)
    except UsageError:
        return ["--ranks", "2", "strategy.use=data_parallel"]
    return ["--ranks", "2"]
