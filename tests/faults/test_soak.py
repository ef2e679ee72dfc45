"""One run, killed again and again at random moments, ends with the bits of the run that nobody disturbed.

`pytest -m long tests/faults/test_soak.py` kills 12 times; `SOAK_KILLS=100 SOAK_SEED=7 pytest …` so often, and with the
same draws as another run of that seed. What is killed: a rank, its data worker, Paddle's launcher, or `paddle-dp`
itself, which is then started again with `--resume`. When: at a random time of the start, after a random number of
updates, or in the midst of a checkpoint. One kill in eight also flips a byte of the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from paddle_dp.checkpoint import UnusableError, check, checkpoints
from paddle_dp.launch.processes import variable
from paddle_dp.mesh.heartbeat import VARIABLE, RankStatus, read
from paddle_dp.recipe.folder import has_run
from tests.faults.conftest import Started, is_rank
from tests.faults.lost import different, train

KILLS = int(os.environ.get("SOAK_KILLS", "12"))
SEED = int(os.environ.get("SOAK_SEED", str(time.time_ns() % 10**6)))
RECIPE = Path("tests/faults/soak.yaml")
TARGETS = {"rank 0": 3, "rank 1": 3, "data worker": 3, "Paddle's launcher": 2, "paddle-dp": 2}
MOMENTS = {"start": 1, "step": 4, "checkpoint": 3}
BRANCHES = (
    "model={use: tests.strategies.test_branches.Deep}",
    "strategy={use: branches, over: 2}",
)
NAMED = {  # how the screen is to name each as the first cause
    "rank 0": r"rank 0 of 2 on \S+: ended by SIGKILL",
    "rank 1": r"rank 1 of 2 on \S+: ended by SIGKILL",
    "data worker": r"rank [01] of 2 on \S+: DataError: data worker 0 .* was killed",
    "Paddle's launcher": r"Paddle's launcher \(process \d+\) was ended by SIGKILL",
}


class Soak:
    """One run in `out`, by as many jobs as it takes; `start` starts one."""

    def __init__(
        self, start: Callable[..., Started], out: Path, overrides: Sequence[str], draw: random.Random
    ):
        self._start, self.out, self.overrides, self.draw = start, out, overrides, draw
        self.counts: Counter[str] = Counter()
        self._expected: list[str] = []  # first causes that the job at work has yet to name
        self._begin()

    def kill(self) -> None:
        """Kills one process at one moment, both drawn."""
        target, moment = self._drawn(TARGETS), self._drawn(MOMENTS)
        attempt = self._attempts()
        if moment == "start":
            target = target if target in ("Paddle's launcher", "paddle-dp") else "Paddle's launcher"
            time.sleep(self.draw.uniform(0.0, 5.0))
        else:
            self._wait_for_step(self.draw.randint(1, 24) if moment == "step" else 10, attempt)
        if moment == "checkpoint":
            self._until(lambda: self._partial)
            time.sleep(self.draw.uniform(0.0, 0.05))
        pid = self._pid_of(target, attempt)
        if self.draw.random() < 1 / 8:
            self._damage()
        os.kill(pid, signal.SIGKILL)
        self.counts[target] += 1
        self.counts["in the midst of a checkpoint"] += self._partial
        if target == "paddle-dp":
            self._read(-signal.SIGKILL)
            self._begin()
        else:
            self._expected.append(NAMED[target])
            self._until(lambda: self._attempts() > attempt)

    def finish(self) -> None:
        """Waits for the run's own end."""
        self._read(0)

    def _begin(self) -> None:
        attempts = self._attempts()
        resume = "newest" if has_run(self.out) else None
        self.job = self._start(
            "train", recipe=str(RECIPE), overrides=self.overrides, resume=resume,
            output_dir=str(self.out), restarts=20,
        )  # fmt: skip
        self._until(lambda: self._attempts() > attempts)

    def _read(self, status: int) -> None:
        """What the job has said: the first causes that it named are those that were given to it, in their order."""
        ended, _, complained = self.job.finish(timeout=300)
        assert ended == status and self.job.gone_within(10.0), (ended, complained)
        causes = re.findall(r"^attempt-\d+ failed: (.*)$", complained, re.MULTILINE)
        assert len(causes) == len(self._expected), (causes, self._expected)
        for cause, words in zip(causes, self._expected, strict=True):
            assert re.match(words, cause), (cause, words)
        self._expected = []
        self.counts["restarts"] += complained.count("\nstarts again from ")
        self.counts["damaged checkpoints passed over"] += complained.count("passed over the checkpoint ")

    def _drawn(self, weights: dict[str, int]) -> str:
        return self.draw.choices(list(weights), list(weights.values()))[0]

    def _until(self, condition: Callable[[], object], timeout: float = 180.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if self.job.process.poll() is not None:
                pytest.fail(f"seed {SEED}: the job has ended: {self.job.process.communicate()[1]}")
            assert time.monotonic() < end, f"seed {SEED}: it did not come so far"
            time.sleep(0.01)

    def _attempts(self) -> int:
        return len(list(self.out.glob("logs/attempt-*")))

    @property
    def _partial(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.out.glob("checkpoints/.step-*.partial-*"))

    def _wait_for_step(self, more: int, attempt: int) -> None:
        """Until the attempt has done so many updates more than it began from."""

        def beat() -> RankStatus | None:
            if not hasattr(self, "_board") or self._board[0] != attempt:
                ranks = self._ranks(attempt)
                if len(ranks) < 2:
                    return None
                self._board = attempt, Path(str(variable(ranks[0], VARIABLE)))
            return read(self._board[1].read_bytes(), 0)

        self._until(lambda: (one := beat()) and one.phase != "start" and one.step >= one.first + more)

    def _ranks(self, attempt: int) -> dict[int, int]:
        """The ranks of an attempt that live, and their processes."""
        here = [pid for pid in self.job.left() if is_rank(pid)]
        mine = [
            pid for pid in here if str(variable(pid, "PADDLE_LOG_DIR")).endswith(f"attempt-{attempt:03d}")
        ]
        return {int(str(variable(pid, "PADDLE_TRAINER_ID"))): pid for pid in mine}

    def _pid_of(self, target: str, attempt: int) -> int:
        if target == "paddle-dp":
            return self.job.process.pid
        if target == "Paddle's launcher":
            supervisor = psutil.Process(self.job.process.pid)
            self._until(supervisor.children)
            return supervisor.children()[0].pid
        ranks = self._ranks(attempt)
        if target == "data worker":
            # Of scattered data rank 0 alone has workers.
            having = [rank for rank in ranks.values() if psutil.Process(rank).children()]
            return psutil.Process(self.draw.choice(having)).children()[0].pid
        return ranks[int(target[-1])]

    def _damage(self) -> None:
        """Flips a byte of the newest checkpoint, where two others are whole."""
        saved = checkpoints(self.out / "checkpoints")
        if len([path for path in saved if is_whole(path)]) > 2 and is_whole(saved[-1]):
            file = saved[-1] / "rank-00000.safetensors"
            with file.open("r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                last = stream.read(1)[0]
                stream.seek(-1, os.SEEK_END)
                stream.write(bytes([last ^ 1]))
            self.counts["checkpoints damaged"] += 1


def is_whole(checkpoint: Path) -> bool:
    try:
        check(checkpoint)
    except UnusableError:
        return False
    return True


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize(
    ("saves", "more"),
    [
        ("at once", ()),
        ("in the background", ()),
        ("at once", ("dataset.reading=scatter",)),
        ("at once", BRANCHES),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(start, tmp_path, capsys, saves, more):
    length, begun = 12 * KILLS + 60, time.monotonic()
    background = f"callbacks.checkpoint.async={saves == 'in the background'}"
    overrides = (f"train.length={length} steps", background, *more)
    soak = Soak(start, tmp_path / "run", overrides, random.Random(SEED))
    for _ in range(KILLS):
        soak.kill()
    soak.finish()
    minutes = (time.monotonic() - begun) / 60
    train(RECIPE, overrides, 2, str(tmp_path / "undisturbed"), None)
    ends = [checkpoints(folder / "checkpoints")[-1] for folder in (soak.out, tmp_path / "undisturbed")]
    apart = different(*ends)
    rows = map(json.loads, (soak.out / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if row["event"] == "step"]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items()))
    with capsys.disabled():
        print(
            f"\nsoak, seed {SEED}, saved {saves}: {KILLS} kills in {length} steps and {minutes:.1f} min: {counts}"
        )
        print(f"{apart} tensors of {ends[0].name} differ from those of the undisturbed run")
    assert apart == 0 and steps == list(range(1, length + 1))
