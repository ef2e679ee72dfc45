"""Starts the jobs of an examination, few for many cases, and marks each case: who said what, at which step."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.launch.command import Job
from paddle_dp.proof import Side, compare_sides
from paddle_dp.proof.rehearsed import RehearsalComparison
from paddle_dp.proof.verdict import SAME
from tests.jobs import run_in_forks
from tests.proof.zoo.case import RECIPES, Fault, Honest
from tests.proof.zoo.cases import CASES
from tests.proof.zoo.exam import slug

ROOT = Path(__file__).resolve().parents[3]
GUARDS = {"check_gradients": "gradients", "check_equal": "weights"}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What became of a case: which guard said something first, at which step (0: before the first), and what."""

    case: Fault | Honest
    guard: str | None
    step: int | None
    said: str
    seconds: float

    @property
    def passed(self) -> bool:
        """A fault must be caught, by whom it says; an honest model must not be blamed."""
        if isinstance(self.case, Honest):
            return self.guard is None if self.case.told is None else self.case.told in self.said
        return self.guard == self.case.guard and all(word in self.said for word in self.case.where)


# Each case leaves the threads of its gloo groups behind, two a group, and each of them wakes 100 times a second as long
# as its process lives: those of a hundred cases took a whole core.
CASES_PER_JOB = 12


def examine(names: Sequence[str], scratch: Path) -> list[Mark]:
    """Runs every named case on its ranks and on one process, and marks it. A job takes some cases with as many ranks.

    One process goes last: it makes the ranks' updates again. A case is marked then, and its traces, up to 20 GB, are
    removed. Prints its progress on stderr.
    """
    cases = [CASES[name] for name in names]
    answers: dict[int, dict[str, Any]] = {}
    for ranks in sorted({case.setting.ranks for case in cases} - {1}, reverse=True):
        mine = [case.name for case in cases if case.setting.ranks == ranks]
        answers[ranks] = _sit(mine, ranks, scratch / str(ranks))
    marks: dict[str, Mark] = {}

    def mark(name: str, answer: Any) -> None:
        case, kept = CASES[name], scratch / "1" / slug(name) / "mark.json"
        if kept.exists():  # of an interrupted run
            marks[name] = Mark(case=case, **json.loads(kept.read_text()))
            return
        marks[name] = _mark(case, {**answers, 1: {name: answer}}, scratch)
        fields = {key: value for key, value in vars(marks[name]).items() if key != "case"}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(fields))
        for ranks in (1, case.setting.ranks):
            shutil.rmtree(scratch / str(ranks) / slug(name) / "trace", ignore_errors=True)

    _sit(names, 1, scratch / "1", mark)
    return [marks[name] for name in names]


def _sit(
    names: Sequence[str], ranks: int, folder: Path, answered: Callable[[str, Any], None] = lambda *_: None
) -> dict[str, Any]:
    """Jobs of some cases each, and another for what is left when a case has ended its job. Calls `answered` with each
    case's name and answer as it comes.

    Cases that an interrupted run has answered in the same folder are not asked again.
    """
    read = {name: _read(folder / slug(name), ranks) for name in names}
    answers = {name: answer for name, answer in read.items() if answer is not None}
    for name, answer in answers.items():
        answered(name, answer)
    left, jobs = [name for name in names if name not in answers], 0
    while left:
        jobs += 1
        cases = left[:CASES_PER_JOB]
        said = _job(cases, ranks, folder, jobs)
        first = left[0]
        for name in cases:
            found = _read(folder / slug(name), ranks)
            if found is None and name == first:
                found = {"raised": "JobError", "message": " ".join(said.split())[-300:] or "the job ended"}
            if found is None:
                break
            answers[name] = found
            left.remove(name)
            answered(name, found)
        print(f"{ranks} ranks: {len(answers)} of {len(names)} cases", file=sys.stderr, flush=True)
    return answers


def _job(names: Sequence[str], ranks: int, folder: Path, number: int) -> str:
    options = {"cases": list(names), "folder": str(folder), "ranks": ranks, "claimed": True}
    job = Job(
        entry_point="tests.proof.zoo.exam:sit", recipe=RECIPES / "mlp.yaml", ranks=ranks,
        output_dir=folder / f"job{number}", extra=options, quiet=True,
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        try:
            run_in_forks(job, timeout=300 * len(names))
        except TimeoutError as error:  # of the first case without an answer
            print(error)
    return said.getvalue()


def _read(folder: Path, ranks: int) -> dict[str, Any] | None:
    """The answers of all ranks as one: what a rank raised, if any did. None when not all of them answered."""
    found = [folder / f"answer.{rank}.json" for rank in range(ranks)]
    found.sort(key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)  # the first cause first
    there = [json.loads(path.read_text()) for path in found if path.exists()]
    for answer in there:
        if "raised" in answer:
            return answer
    return there[0] if len(there) == ranks else None


def _mark(case: Fault | Honest, answers: dict[int, dict[str, Any]], scratch: Path) -> Mark:
    ranks = case.setting.ranks
    one, many = answers[1][case.name], answers[ranks][case.name]
    seconds = one.get("seconds", 0.0) + many.get("seconds", 0.0)
    if "raised" in one and one["raised"] != many.get("raised"):
        said = f"ONE PROCESS: {one['raised']}: {one['message']}"
        return Mark(case=case, guard="one process", step=None, said=said, seconds=seconds)
    if "raised" in many:
        kind = many["raised"]
        guard = {"DivergenceError": "weights", "DataError": "evaluation"}.get(kind, "door")
        if "got no gradient" in many["message"]:
            guard = "gradients"
        guard = "door" if kind == "DivergenceError" and "checkpoint of step" in many["message"] else guard
        guard = "crash" if many.get("alone") or kind == "JobError" else guard
        return Mark(case=case, guard=guard, step=None, said=f"{kind}: {many['message']}", seconds=seconds)
    by, step, said = _compare(case, scratch)
    return Mark(case=case, guard=by, step=step, said=said, seconds=seconds)


def _compare(case: Fault | Honest, scratch: Path) -> tuple[str | None, int | None, str]:
    ranks = case.setting.ranks
    if case.exam == "rehearsal":
        alone, many = (scratch / str(n) / slug(case.name) / "trace" for n in (1, ranks))
        found = RehearsalComparison.read(alone, many, ranks).first_difference()
        kinds = {"samples": "rehearsal", "loss": "rehearsal"}
        return (
            (None, None, "")
            if found is None
            else (kinds.get(found.kind, found.kind), found.step, found.sentence)
        )
    one, other = (Side(scratch / str(n) / slug(case.name) / "trace", n) for n in (1, ranks))
    one.candidates = (other,)
    verdict = compare_sides(one, other)
    if verdict.status == SAME:
        return None, None, " ".join(verdict.sentences)
    where = verdict.first_difference
    said = " ".join(verdict.sentences) if where is None else where.sentence
    amiss = any(comparison.divergence for comparison in verdict.comparisons)
    return "weights" if amiss else "verify", where.step if where else None, said


os.environ.setdefault("OMP_NUM_THREADS", "1")
