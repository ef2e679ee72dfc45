"""Measures where the seconds from a command to its first updates go, process by process.

    python tools/benchmark/start.py                                # digits_mlp on 2 ranks
    python tools/benchmark/start.py gpt_single --ranks 1 --runs 3

Every Python process of the job loads a small module first, which notes the wall clock when a milestone is reached: the
process's start, the begin and the end of `import paddle`, and of functions that name themselves below. Nothing of
paddle_dp is changed. Told are medians over the runs, of rank 0 where a milestone is a rank's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.command_line import environment, paddle_dp, parser_of

# (milestone, module, its function), noted when it begins and when it ends
CALLS = (
    ("join", "paddle_dp.mesh.mesh", "join"),
    ("build", "paddle_dp.assembly.build", "build"),
    ("update", "paddle_dp.train.steps", "StepDriver.make_step"),
    ("launch", "paddle.distributed.launch.main", "launch"),
    ("batch", "paddle_dp.data.loader", "Loader.read"),
)
NOTES = """
import atexit, functools, importlib.abc, importlib.util, os, sys, time

FOLDER, CALLS = os.environ["PYTHON_START_NOTES"], __CALLS__
kind = os.environ.get("PADDLE_TRAINER_ID", "")
words = " ".join(open("/proc/self/cmdline").read().split("\\0"))
kinds = {"distributed.launch": "launcher", "waiting_rank": "waiting"}
who = f"rank {kind}" if kind else next((kinds[each] for each in kinds if each in words), "command")
counts = {}

def note(what, when=None):
    rank = os.environ.get("PADDLE_TRAINER_ID")
    name = f"rank {rank}" if rank else who
    with open(os.path.join(FOLDER, f"{name}-{os.getpid()}"), "a") as file:
        file.write(f"{when or time.time()} {what}\\n")

def noted(name, function):
    @functools.wraps(function)
    def call(*given, **named):
        number = counts[name] = counts.get(name, 0) + 1
        if number <= 3:
            note(f"{name} {number} begins")
        try:
            return function(*given, **named)
        finally:
            if number <= 3:
                note(f"{name} {number} ends")
    return call

class Watch(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.inside = set()

    def find_spec(self, name, path=None, target=None):
        wanted = [(call, member) for call, module, member in CALLS if module == name]
        if name in self.inside or not (wanted or name == "paddle"):
            return None
        self.inside.add(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            if name == "paddle":
                note("import paddle begins")
            run(module)
            if name == "paddle":
                note("import paddle ends")
            for call, member in wanted:
                owner, _, last = member.rpartition(".")
                owner = getattr(module, owner) if owner else module
                setattr(owner, last, noted(call, getattr(owner, last)))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Watch())
note("process begins")
"""
STAGES = (  # what, from, to; a milestone is "process: what"
    ("the command: Python, its own modules", "typed", "command: import paddle begins"),
    ("the command: import paddle", "command: import paddle begins", "command: import paddle ends"),
    (
        "the command: the recipe, what is to be refused",
        "command: import paddle ends",
        "launcher: launch 1 begins",
    ),
    ("Paddle's launcher, until a rank begins", "launcher: launch 1 begins", "rank 0: process begins"),
    ("rank: Python, until it imports Paddle", "rank 0: process begins", "rank 0: import paddle begins"),
    ("rank: import paddle", "rank 0: import paddle begins", "rank 0: import paddle ends"),
    ("rank: the recipe, until it joins", "rank 0: import paddle ends", "rank 0: join 1 begins"),
    ("rank: joining the others", "rank 0: join 1 begins", "rank 0: join 1 ends"),
    ("rank: data, model, learner", "rank 0: join 1 ends", "rank 0: batch 1 begins"),
    ("rank: comparing starts, the first batch", "rank 0: batch 1 begins", "rank 0: update 1 begins"),
    ("rank: the first update", "rank 0: update 1 begins", "rank 0: update 1 ends"),
)


def once(recipe: str, ranks: int, overrides: list[str]) -> dict[str, float]:
    """Seconds after the command of each milestone of one job."""
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        place = Path(folder)
        (place / "notes").mkdir()
        (place / "sitecustomize.py").write_text(NOTES.replace("__CALLS__", repr(CALLS)))
        variables = environment(PYTHON_START_NOTES=str(place / "notes"))
        variables["PYTHONPATH"] = os.pathsep.join([folder, variables["PYTHONPATH"]])
        command = paddle_dp(
            "train", recipe, "--ranks", ranks, "--out", f"{folder}/run", "train.length=4 steps"
        )
        began = time.time()
        done = subprocess.run(
            [*command, *overrides], env=variables, capture_output=True, text=True, timeout=300
        )
        ended = time.time()
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found = {"typed": 0.0, "ended": ended - began}
        for file in sorted((place / "notes").iterdir()):
            who = file.name.rpartition("-")[0]
            for line in file.read_text().splitlines():
                when, _, what = line.partition(" ")
                seconds = float(when) - began
                found.setdefault(f"{who}: {what}", seconds)
        return found


def told(rows: Sequence[Mapping[str, float]]) -> None:
    known = {
        name: statistics.median(row[name] for row in rows)
        for name in rows[0]
        if all(name in row for row in rows)
    }
    at = 0.0
    for what, since, until in STAGES:
        if until not in known:
            continue
        at = known.get(since, at)
        print(f"  {what:<46}{known[until] - at:6.2f} s   until {known[until]:5.2f}")
        at = known[until]
    if "launcher: import paddle ends" in known:
        end = known["launcher: import paddle ends"]
        took = end - known["launcher: import paddle begins"]
        print(f"  {'beside the command, the launcher: import paddle':<46}{took:6.2f} s   until {end:5.2f}")
    rest, end = "the other updates, evaluation, checkpoint, end", known["ended"]
    print(f"  {rest:<46}{end - at:6.2f} s   until {end:5.2f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", nargs="?", default="digits_mlp")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    rows = [once(given.recipe, given.ranks, given.overrides) for _ in range(given.runs)]
    print(f"{given.recipe} on {given.ranks} rank{'s' * (given.ranks > 1)}, medians of {given.runs} runs")
    told(rows)


if __name__ == "__main__":
    main()
