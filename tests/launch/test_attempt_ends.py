"""The launcher writes how an attempt ended, so that the report of a killed run names the first cause."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from paddle_dp.cli import main
from paddle_dp.report.run_record import read_run
from tests.house.recipes import small_recipe

RECIPE = small_recipe(
    "length: 100000 steps, batch: 64", model="mlp, inputs: 64, hidden: [16], classes: 10", optimizer="sgd",
    schedule="constant, learning_rate: 0.1", strategy="data_parallel",
    callbacks="[{use: metrics, every: 4 steps}]",
)  # fmt: skip


def kill_a_rank(run: Path) -> None:
    """Ends rank 1 by SIGKILL once the run has recorded steps."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or b'"event": "step"' not in metrics.read_bytes():
        time.sleep(0.05)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        logs = f"PADDLE_LOG_DIR={run}".encode()
        if b"PADDLE_TRAINER_ID=1" in variables and any(v.startswith(logs) for v in variables):
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.long
def test_the_report_of_a_killed_run_names_the_killed_rank(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    killer = threading.Thread(target=kill_a_rank, args=(run,))
    killer.start()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "--ranks", "2", "--out", str(run)])
    killer.join()
    assert ended.value.code == 137
    state, cause = read_run(run).ending
    assert state == "failed" and cause.startswith("rank 1 of 2 on ") and "SIGKILL" in cause
    page = (run / "report.html").read_text()
    assert "ended by SIGKILL" in page and "failed" in page
