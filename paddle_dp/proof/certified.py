"""`paddle-dp certificate RUN`: shows a run's certificate, checks it against the folder, and trains intervals again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.certificate import certificate as certificates
from paddle_dp.certificate.certificate import Content
from paddle_dp.checkpoint import UnusableError, checkpoints, load, step_of
from paddle_dp.errors import CheckpointError, StoppedError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.proof.retrain import RESULT, drift_ratio
from paddle_dp.proof.sides import ending, job_error, run_alone
from paddle_dp.proof.tolerance import LARGEST_R, difference, is_same
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.write import yaml_text
from paddle_dp.text import plural

GOOD, BAD = 0, 1
ENTRY_POINT = "paddle_dp.proof.retrain:retrain"
DIGITS = 12  # hex digits of a digest on the screen; the file has all 32
ALONE = ("strategy.use=single", "callbacks=[]", "train.max_time=null")


def certificate(run: Path, replay: int = 0, step: int | None = None, steps: int | None = None) -> int:
    """Prints the certificate of a run and the checks of its folder; then trains `replay` intervals again, or the one
    that ends with update `step`. Returns 0, or 1 if anything differs from the certificate.

    `steps`: the most updates of an interval. Raises UsageError without a certificate, or if nothing can be trained
    again, JobError if the process that trains fails.
    """
    content = _read(run)
    print("\n".join(certificate_lines(content, run)))
    checks = [*folder_checks(content, run)]
    print("\n".join(f"  {'ok ' if good else 'NO '} {line}" for good, line in checks))
    good = all(good for good, _ in checks)
    selected: list[Interval] = []
    if step is not None:
        selected = [interval_to(content, run, step, steps)]
    elif replay:
        spans = intervals(content, run, steps)
        selected = evenly_spread([span for span in spans if not span.mixed], replay)
        left_out = [span.mixed for span in spans if span.mixed]
        if not selected:
            raise UsageError("\n".join(left_out))
        print("".join(f"{line}\n" for line in left_out), end="")
    for number, interval in enumerate(selected, start=1):
        same = retrain_interval(interval, content, run, f" ({number} of {len(selected)})")
        good = good and same
    if not selected and content["replay"]:
        print(f"any step again, on one process: {certificates.replay_command(run)}")
    return GOOD if good else BAD


def _read(run: Path) -> Content:
    try:
        return certificates.read(run)
    except FileNotFoundError:
        raise UsageError(
            f"{run} holds no {certificates.NAME}: name the folder of a run, such as runs/NAME."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{run / certificates.NAME} cannot be used: it {error}.") from None


def certificate_lines(content: Content, run: Path) -> Iterator[str]:
    """The certificate as lines for the screen."""
    yield f"{content['name']}: {content['steps']} updates, in {run}"
    for split, facts in content["data"].items():
        yield f"  {split} data: {facts['samples']} samples, digest {short(facts['digest'])}"
    for number, attempt in enumerate(content["attempts"], start=1):
        axes = " × ".join(f"{axis} {n}" for axis, n in attempt["layout"].items() if n > 1)
        ranks = f"{attempt['ranks']} ranks ({axes})" if attempt["ranks"] > 1 else "1 process"
        yield f"  attempt {number}: {attempt['begun']}, {ranks}, {attempt['device']} of {attempt['host']}"
        yield "    " + ", ".join(f"{name} {version}" for name, version in attempt["versions"].items())
        yield "; ".join([f"    recipe {short(attempt['recipe'])}", *attempt["changes"]])
        if attempt["resumed"]:
            yield f"    goes on from {attempt['resumed']}"
        yield f"    step {attempt['from']}: weights {short(attempt['weights'])}"
        for saved in attempt["saved"]:
            digests = f"weights {short(saved.get('model'))}, optimizer {short(saved.get('optimizer'))}"
            yield f"    step {saved['step']}: {digests}"
        last = f"to step {attempt['to']} at least" if attempt["why"] is None else f"to step {attempt['to']}"
        yield f"    {last}: {_end(attempt, next(iter(content['attempts'][number:]), None))}"
        yield from (f"    step {r['step']} refused ({r['action']}): {r['why']}" for r in attempt["refused"])
        yield from (f"    not as on one process: {difference}" for difference in attempt["differences"])
        if attempt.get("verdict"):
            yield f"    verified: verdict {short(attempt['verdict'])}"


def _end(attempt: Content, after: Content | None) -> str:
    """The reason for an attempt's end; `after`: the next one. The launcher stops ranks by SIGUSR1 to start others."""
    why = attempt["why"] or "its end was not written: it was killed, or is at work"
    stopped = why.removeprefix(f"{StoppedError.__name__}: ")
    if after is not None and stopped != why and stopped.startswith(f"stopped by {signal.SIGUSR1.name} "):
        return f"stopped on purpose, to go on with {plural(after['ranks'], 'rank')}"
    return str(stopped)


def short(digest: object) -> str:
    """The beginning of a digest."""
    return str(digest)[:DIGITS]


def folder_checks(content: Content, run: Path) -> Iterator[tuple[bool, str]]:
    """(as certified, sentence) for each checkpoint, of which all bytes are read, and each resume."""
    saves = certificates.saves(content)
    folder = run / "checkpoints"
    for path in checkpoints(folder):
        step = step_of(path)
        if step not in saves:
            yield False, f"{path}: the certificate does not know it"
            continue
        try:
            same = certificates.has_digests(load(path), saves[step])
        except CheckpointError as error:
            yield False, str(error)
            continue
        yield same, f"{path}: the bits are{'' if same else ' NOT'} those that were saved"
    known: dict[int, str] = {}
    for before, after in itertools.pairwise(content["attempts"]):
        known[before["from"]] = before["weights"]
        known |= {saved["step"]: saved["model"] for saved in before["saved"] if "model" in saved}
        if after["from"] in known:
            same = known[after["from"]] == after["weights"]
            stopped, resumed = (plural(attempt["ranks"], "rank") for attempt in (before, after))
            weights = f"with {'the same' if same else 'OTHER'} weights"
            yield same, f"step {after['from']}: {stopped} stopped, {resumed} went on {weights}"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Updates `start` + 1 to `to`; `begin`, `end`: the checkpoints before and after them, or None. `accepted`: keys of
    the recipe that were changed at the beginning (train --accept); `mixed`: why no single recipe made the updates."""

    start: int
    to: int
    begin: Path | None
    end: Path | None
    recipe: Mapping[str, Any] = field(repr=False)
    accepted: Sequence[str] = ()
    mixed: str = ""


def intervals(content: Content, run: Path, steps: int | None = None) -> list[Interval]:
    """The intervals between the beginning and the usable checkpoints, at most `steps` updates of each. Raises
    UsageError if there are none."""
    checkpoint_steps = _checkpoint_steps(content, run)
    pairs = itertools.pairwise(checkpoint_steps)
    spans = [_interval(checkpoint_steps, start, to, steps) for start, to in pairs]
    if not spans:
        raise UsageError(f"{run} cannot be trained again: there is no checkpoint to compare with.")
    return spans


def interval_to(content: Content, run: Path, step: int, steps: int | None = None) -> Interval:
    """The interval to update `step`, at most `steps` updates, from the newest checkpoint before it or the beginning."""
    checkpoint_steps = _checkpoint_steps(content, run)
    start = max((saved for saved in checkpoint_steps if saved < step), default=None)
    if start is None or not certificates.attempts_of(content, step, step):
        first = min(checkpoint_steps, default=0)
        raise UsageError(
            f"--step {step}: the run did its updates 1 to {content['attempts'][-1]['to']}"
            + (f", and the first checkpoint is of step {first}." if first else ".")
        )
    return _interval(checkpoint_steps, start, step, steps)


def _interval(
    checkpoint_steps: Mapping[int, Path | None], start: int, to: int, steps: int | None = None
) -> Interval:
    """Updates `start` + 1 to `to`, or the first `steps` of them, with the recipe of the first checkpoint after them, or
    of the one before them."""
    to = to if steps is None else min(to, start + steps)
    later = next((step for step in checkpoint_steps if step >= to), start)
    state = _recipe_state(checkpoint_steps[later])
    changes = [(int(each["step"]), each["key"]) for each in (state.get("identity") or {}).get("accepted", ())]
    first = min((step for step, _ in changes if start <= step < later), default=0)
    if first >= to and checkpoint_steps[start] is not None:  # these updates were done before the change
        state, changes = _recipe_state(checkpoint_steps[start]), []
    within = {key: step for step, key in changes if start < step < later}
    mixed = (
        f"steps {start + 1} to {later} cannot be trained again: {', '.join(within)} changed after step "
        f"{max(within.values())} (--accept), of which there is no checkpoint."
    ) if within else ""  # fmt: skip
    return Interval(
        start=start, to=to, begin=checkpoint_steps[start], end=checkpoint_steps.get(to), recipe=state["recipe"],
        accepted=[key for step, key in changes if step == start], mixed=mixed,
    )  # fmt: skip


def _checkpoint_steps(content: Content, run: Path) -> dict[int, Path | None]:
    """The steps from which training can begin, in order, with their checkpoints; 0 has none."""
    saves = certificates.saves(content)
    first = content["attempts"][0]
    checkpoint_steps: dict[int, Path | None] = {} if first["resumed"] else {0: None}
    for path in checkpoints(run / "checkpoints"):
        try:
            load(path)
        except UnusableError:
            continue
        if step_of(path) in saves:
            checkpoint_steps[step_of(path)] = path
    return dict(sorted(checkpoint_steps.items()))


def _recipe_state(checkpoint: Path | None) -> Mapping[str, Any]:
    """The state of a checkpoint with a recipe."""
    state = {} if checkpoint is None else load(checkpoint, verify=False).state
    if state.get("recipe") is None:
        raise UsageError(
            "nothing can be trained again: only a recipe can, from a checkpoint that keeps it. A training that a "
            "script describes is trained again by the script."
        )
    return state


def evenly_spread(spans: Sequence[Interval], count: int) -> list[Interval]:
    """`count` of the intervals, or all."""
    indices = np.linspace(0, len(spans) - 1, min(count, len(spans))).round().astype(int)
    return [spans[index] for index in indices]


def retrain_interval(interval: Interval, content: Content, run: Path, which: str = "") -> bool:
    """Trains an interval on one process, prints the comparison, and returns whether it is the same.

    `which`: " (1 of 3)", for the first line: nothing more is printed until the interval is done.
    """
    if interval.mixed:
        raise UsageError(interval.mixed)
    attempts = certificates.attempts_of(content, interval.start + 1, interval.to)
    digests = certificates.saves(content).get(interval.to, {})
    options = {
        "start": None if interval.begin is None else str(interval.begin), "accept": interval.accepted,
        "saved": None if interval.end is None else str(interval.end),
        "to": interval.to, "data": content["data"], "digest": digests.get("model"),
        "ranks": max(2, *(attempt["ranks"] for attempt in attempts)),
        "tensor": max(attempt["layout"].get("tensor", 1) for attempt in attempts),
        "losses": {step: loss for step, loss in losses(run).items() if interval.start < step <= interval.to},
    }  # fmt: skip
    if not options["losses"] and options["digest"] is None:
        raise UsageError(
            f"nothing is known of steps {interval.start + 1} to {interval.to}: metrics.jsonl has no loss of them, and "
            "no checkpoint was saved after them."
        )
    alone = all(attempt["ranks"] == 1 for attempt in attempts)
    # Within the run's folder: a recipe finds models in the folders above it.
    recipe = run / f".again-{os.getpid()}.yaml"
    with scratch_folder("paddle-dp-certificate-") as scratch:
        try:
            recipe.write_text(yaml_text(interval.recipe), "utf-8")
            interval_recipe = read_recipe(recipe)
            if reason := interval_recipe.strategy.config.not_promised(interval_recipe):
                raise UsageError(f"nothing was trained again: {reason}")
            steps = f"steps {interval.start + 1} to {interval.to}"
            print(f"training {steps} again on one process{which} …", flush=True)
            guard = interval.recipe.get("guard") or {}
            # A rewind needs a checkpoint to return to; a skip leaves out the same updates.
            skip = ("guard.non_finite=skip",) if guard.get("non_finite") == "rewind" else ()
            job = Job(
                entry_point=ENTRY_POINT, recipe=recipe, overrides=(*ALONE, *skip), ranks=1, output_dir=scratch / "run",
                quiet=True, extra={**options, "out": str(scratch)},
            )  # fmt: skip
            (scratch / "run").mkdir()
            if status := run_alone(job, attempts[-1]["variables"] if alone else None):
                message = f"{steps} were not trained again"
                raise job_error(status, f"{message}: {ending(status)}.", f"{message}: see above.")
            result = json.loads((scratch / RESULT).read_text())
            if result["bits"] is False and result["weights"] is None and not result["losses"]:
                raise UsageError(
                    f"{steps} cannot be judged: the weights are not bit-equal, as rounding may have it, the checkpoint "
                    "with their numbers is not there any more, and metrics.jsonl has no loss of these steps. Choose "
                    "others."
                )
        finally:
            recipe.unlink(missing_ok=True)
    here = all(attempt["host"] == socket.gethostname() for attempt in attempts)
    exact = alone and here and interval_recipe.strategy.config.batch_chunks == 1
    same, lines = judgement(result, exact, other_kernels(attempts, result["kernels"]) if exact else ())
    sizes = [count for count, _ in itertools.groupby(attempt["ranks"] for attempt in attempts)]
    ranks = ", then ".join(plural(count, "rank") for count in sizes)
    print(f"{steps}, done on {ranks}, again on one process: {'the same' if same else 'DIFFERENT'}")
    print("\n".join(f"  {line}" for line in lines), flush=True)
    if not same:
        told = dict.fromkeys(line for attempt in attempts for line in attempt["differences"])
        print("\n".join(f"  the run itself says: {line}" for line in told))
    return same


def losses(run: Path) -> dict[int, float]:
    """The losses in metrics.jsonl, by step."""
    path, loss_by_step = run / "metrics.jsonl", {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(text)
            if row["event"] == "step":
                loss = row["loss"] if row["loss"] is not None else row["not_finite"]["loss"]
                loss_by_step[int(row["step"])] = float(loss)
        except (ValueError, KeyError, TypeError):
            continue
    return loss_by_step


def other_kernels(attempts: Sequence[Content], now: Mapping[str, str]) -> list[str]:
    """Reasons why one process may compute other last bits than in the attempts; `now`: today's device and versions."""
    reasons = [] if now["device"] == "cpu" else ["an accelerator adds in any order"]
    for name, today in now.items():
        before = {str(attempt["versions"].get(name, attempt.get(name))) for attempt in attempts} - {today}
        reasons += [f"{name} was {each} and is {today}" for each in sorted(before)]
    return reasons


def judgement(result: Content, exact: bool = False, reasons: Sequence[str] = ()) -> tuple[bool, list[str]]:
    """Whether an interval is the same, and lines with the reasons. Distances are in units of the drift, as in a proof.

    `exact`: one process of this machine trained it before, so no bit may differ, unless there are `reasons`.
    """
    lines, same = [], True
    if result["bits"]:
        lines.append(f"the weights are bit-equal: {short(result['digest'])}")
    elif result["weights"] is not None:
        distance, drift, movement = result["weights"]
        r = drift_ratio(distance, drift, movement)
        same = r is None or is_same(r)
        lines.append(f"weights {distance:.2e} apart, {_phrase(r)}; they moved by {movement:.2e}")
    elif result["bits"] is False:
        lines.append(
            "the weights are not bit-equal, and the checkpoint with their numbers is not there any more"
        )
    distances = [difference(recorded, here) for _, recorded, here, _ in result["losses"]]
    if exact and (result["bits"] is False or any(distances)):
        same = same and bool(reasons)
        every_bit = "one process of this machine has done it before, so every bit should be the same"
        lines.append(f"bits may differ: {'; '.join(reasons)}" if reasons else every_bit)
    # A loss near 0 is no chaos: the drift is compared with the largest loss so far.
    finite = [abs(here) if isfinite(here) else 0.0 for *_, here, _ in result["losses"]]
    sizes = itertools.accumulate(finite, max)
    rows = [
        (step, recorded, drift_ratio(distance, drift, size))
        for (step, recorded, _, drift), distance, size in zip(result["losses"], distances, sizes, strict=True)
    ]
    if rows:
        step, recorded, r = max(rows, key=lambda row: -1.0 if row[2] is None else row[2])
        equal = distances.count(0.0)
        same = same and (r is None or is_same(r))
        lines.append(
            f"{len(rows)} losses, {equal} of them bit-equal; the furthest: step {step}, {recorded:.6g}, {_phrase(r)}"
        )
    return same, lines


def _phrase(r: float | None) -> str:
    """A distance of `r` drifts as a part of a sentence."""
    if r is None:
        return "which proves nothing: after a change in the last place one process strays as far from itself"
    return f"{r:.2g} times what rounding does (limit {LARGEST_R:g})"
