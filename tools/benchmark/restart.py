"""Measures the seconds from a rank's death to the next update, without spares, with them, and from memory.

    python tools/benchmark/restart.py                            # digits_mlp on 2 ranks, 4 kills in each way
    python tools/benchmark/restart.py --ways spares memory --kills 8 --gap 5

Rank 1 gets SIGKILL; then the time of the first update in metrics.jsonl counts, and of the step that was reached. The
ways follow each other in one run: a loaded machine lengthens all of them, so read ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAVES = "{use: metrics, every: 1 step}, {use: checkpoint, every: 50 steps, keep: 2}"
WAYS = {
    "restarts": ([], SAVES),
    "spares": (["--spares"], SAVES),
    "memory": (["--spares"], f"{SAVES}, {{use: memory_checkpoint, every: 10 steps}}"),
}
LIMIT = 120.0  # seconds for an update to come


def updates(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl on the last updates."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()[-400:]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # it is being written
            continue
    return [line for line in found if line["event"] == "step"]


def first(job: subprocess.Popen[bytes], run: Path, after: float, step: int = 0) -> dict[str, Any]:
    """The first update made after a time, of `step` or a later one."""
    end = time.time() + LIMIT
    while time.time() < end and job.poll() is None:
        later = [line for line in updates(run) if line["time"] > after and line["step"] >= step]
        if later:
            return min(later, key=lambda line: line["time"])
        time.sleep(0.02)
    raise SystemExit(f"no update came: see {run / 'logs'}")


def rank_pid(run: Path, rank: int) -> int:
    """The process that writes the newest log of a rank."""
    log = max((run / "logs").glob(f"attempt-*/workerlog.{rank}")).resolve()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "fd" / "1")) == log:
                return int(process.name)
        except OSError:
            continue
    raise SystemExit(f"nobody writes {log}")


def measured(
    way: str, recipe: str, ranks: int, kills: int, gap: float, folder: Path
) -> list[tuple[float, float]]:
    """(seconds to the next update, to the step of the kill) of each kill, `gap` seconds after the update before."""
    options, callbacks = WAYS[way]
    run = folder / way
    words = [
        sys.executable,
        "-m",
        "paddle_dp",
        "train",
        recipe,
        "--ranks",
        str(ranks),
        "--restarts",
        "9",
        *options,
    ]
    words += [f"output_dir={run}", "train.length=10000000 steps", f"callbacks=[{callbacks}]"]
    rows = []
    with (folder / f"{way}.log").open("wb") as log:
        job = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            first(job, run, 0.0)
            for _ in range(kills):
                time.sleep(gap)
                step, pid = updates(run)[-1]["step"], rank_pid(run, 1)
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                # Rank 0 may still write an update that both have made.
                following = first(job, run, killed + 0.05)["time"] - killed
                rows.append((following, first(job, run, killed + 0.05, step)["time"] - killed))
        finally:
            job.terminate()
            job.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="configs/digits_mlp.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--gap", type=float, default=9.0, help="seconds of training before each kill")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paddle-dp-restart-") as name:
        for way in arguments.ways:
            rows = measured(
                way, arguments.recipe, arguments.ranks, arguments.kills, arguments.gap, Path(name)
            )
            following, again = zip(*rows, strict=True)
            print(
                f"{way}: {len(rows)} kills, next update after {statistics.median(following):.1f} s (slowest "
                f"{max(following):.1f} s), the step of the kill again after {statistics.median(again):.1f} s; load "
                f"{os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
