"""Jobs start on the device, time after time: `paddle-dp train` through Paddle's launcher, for two updates.

`python -m tests.sim.test_starts TIMES [FIRST STOP]` counts starts of each layout (or of some of them), prints a row for
each, and each failure, and goes on after it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.house.programs import run_python
from tests.house.runs import events
from tests.sim.build import built
from tests.sim.recipes import gpt

TIMES = 10
LAYOUTS = {
    "data_parallel, 2 ranks": (2, "{use: data_parallel}"),
    "tensor 2": (2, "{use: hybrid, tensor: 2}"),
    "tensor 2, sequence_parallel": (2, "{use: hybrid, tensor: 2, sequence_parallel: true}"),
    "sequence 2": (2, "{use: hybrid, sequence: 2}"),
    "pipeline 2": (2, "{use: hybrid, pipeline: 2}"),
    "pipeline 2, interleaved": (2, "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved}"),
    "sharding 2, stage 3": (2, "{use: hybrid, sharding: 2, sharding_stage: 3}"),
    "data 3": (3, "{use: hybrid, data: 3}"),
    "tensor 2 × pipeline 2": (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
    "data 2 × sharding 2, stage 2": (4, "{use: hybrid, data: 2, sharding: 2, sharding_stage: 2}"),
}


def start(layout: str, folder: Path) -> tuple[list[float], float]:
    """Starts a job; its losses, and how many seconds it took. AssertionError with what it said, if it failed."""
    ranks, strategy = LAYOUTS[layout]
    words = [f"strategy={strategy}", f"output_dir={folder / 'run'}", "train.length=2 steps"]
    words += ["callbacks=[{use: metrics, every: 1 step}]"]
    begun = time.perf_counter()
    command = ("-m", "paddle_dp", "train", gpt(folder), "--ranks", str(ranks))
    done = run_python(*command, *words, timeout=300)
    seconds = time.perf_counter() - begun
    losses = [line["loss"] for line in events(folder / "run") if "loss" in line]
    assert len(losses) == 2, f"{layout} trained {len(losses)} of 2 steps:\n{done.stdout}\n{done.stderr}"
    return losses, seconds


def started(layout: str, times: int, stop: bool = True) -> tuple[int, list[float]]:
    """How many of so many starts failed, and the seconds of the others; with `stop`, the first failure is raised.

    A start whose losses are not those of the first one, bit for bit, has failed.
    """
    failures, seconds, first = 0, [], None
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="start-") as folder:
            try:
                losses, took = start(layout, Path(folder))
                first = first or losses
                assert losses == first, f"{layout}: losses {losses}, and {first} in the first start"
                seconds.append(took)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                if stop:
                    raise
                failures += 1
                print(f"{layout} failed: {error}", flush=True)
    return failures, seconds


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_starts_ten_times(layout: str) -> None:
    started(layout, TIMES)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("layout", ["data_parallel, 2 ranks", "pipeline 2", "tensor 2 × pipeline 2"])
def test_on_a_slow_link_no_rank_leaves_with_what_it_was_sending(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training ends with exchanges that every rank reads. A rank that left before would end the others' last one."""
    monkeypatch.setenv("SIM_LATENCY", "0.03")
    monkeypatch.setenv("SIM_BANDWIDTH", "3e6")
    start(layout, tmp_path)


def main(times: int, names: list[str]) -> int:
    os.environ["CUSTOM_DEVICE_ROOT"] = str(built())
    print(
        "| layout | ranks | starts | failed | seconds, median | seconds, slowest |\n|---|---|---|---|---|---|"
    )
    failed = 0
    for layout in names:
        failures, seconds = started(layout, times, stop=False)
        failed += failures
        middle, most = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
        ranks = LAYOUTS[layout][0]
        print(f"| {layout} | {ranks} | {times} | {failures} | {middle:.1f} | {most:.1f} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    begin, end = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 3 else (0, len(LAYOUTS))
    sys.exit(main(int(sys.argv[1]), list(LAYOUTS)[begin:end]))
