"""Measures the seconds from a rank's or a node's death to the next update: without spares, with them, from memory.

    python tools/benchmark/restart.py                            # digits_mlp on 2 ranks, 4 kills in each way
    python tools/benchmark/restart.py --ways spares memory --kills 8 --gap 5
    python tools/benchmark/restart.py --ways nodes nodes-memory  # two nodes here, with half of the ranks each

Rank 1 gets SIGKILL; with two nodes all processes of node 1 do, and it is started again at once, with an empty memory.
Then the time of the first update in metrics.jsonl counts, and of the step that was reached. The ways follow each other
in one run: a loaded machine lengthens all of them, so read ratios.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.network import free_port
from paddle_dp.launch.processes import alive, descendants, kill_all
from tools.command_line import ROOT, paddle_dp, parser_of

SAVES = "{use: metrics, every: 1 step}, {use: checkpoint, every: 50 steps, keep: 2}"
MEMORY = f"{SAVES}, {{use: memory_checkpoint, every: 10 steps}}"
WAYS: dict[str, tuple[list[str], str, int]] = {  # options, callbacks, nodes
    "restarts": ([], SAVES, 1),
    "spares": (["--spares"], SAVES, 1),
    "memory": (["--spares"], MEMORY, 1),
    "nodes": ([], SAVES, 2),
    "nodes-memory": ([], MEMORY, 2),
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
        with suppress(ValueError):  # it is being written
            found.append(json.loads(line))
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
    log = max((run / "logs").glob(f"attempt-*/workerlog.{rank}"), default=run / "logs").resolve()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "fd" / "1")) == log:
                return int(process.name)
        except OSError:
            continue
    raise RuntimeError(f"nobody writes {log}")


def lose(job: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a node at once."""
    family = [job.pid, *descendants(job.pid)]
    if job.poll() is None:
        kill_all(lambda: [pid for pid in family if alive(pid)])
    job.wait()


def measured(
    way: str, recipe: str, ranks: int, kills: int, gap: float, folder: Path
) -> list[tuple[float, float]]:
    """(seconds to the next update, to the step of the kill) of each kill, `gap` seconds after the update before."""
    options, callbacks, nodes = WAYS[way]
    run, master = folder / way, f"127.0.0.1:{free_port(61_600)}"
    overrides = [f"output_dir={run}", "train.length=10000000 steps", f"callbacks=[{callbacks}]"]
    words = paddle_dp("train", recipe, "--ranks", ranks // nodes, "--restarts", 9, *options, *overrides)
    rows = []
    with (folder / f"{way}.log").open("wb") as log:

        def begin(node: int) -> subprocess.Popen[bytes]:
            several = ["--nodes", str(nodes), "--master", master, "--node-rank", str(node)] * (nodes > 1)
            threads = {"OMP_NUM_THREADS": "1"} if nodes > 1 else {}  # as of two ranks of one machine
            return subprocess.Popen(
                [*words, *several], cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **threads}
            )

        jobs = [begin(node) for node in range(nodes)]
        try:
            first(jobs[0], run, 0.0)
            for _ in range(kills):
                time.sleep(gap)
                step = updates(run)[-1]["step"]
                pid = rank_pid(run, 1) if nodes == 1 else 0
                killed = time.time()
                if pid:
                    os.kill(pid, signal.SIGKILL)
                else:
                    lose(jobs[1])
                    jobs[1] = begin(1)
                # Rank 0 may still write an update that both have made.
                following = first(jobs[0], run, killed + 0.05)["time"] - killed
                rows.append((following, first(jobs[0], run, killed + 0.05, step)["time"] - killed))
        finally:
            for job in jobs:
                job.terminate()
            for job in jobs:
                job.wait()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="configs/digits_mlp.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--gap", type=float, default=9.0, help="seconds of training before each kill")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["restarts", "spares", "memory"])
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
