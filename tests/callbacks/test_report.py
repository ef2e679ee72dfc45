"""Every training leaves a report: finished or failed, written by one rank, and never the reason for an end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.callbacks.report import ReportWriter
from paddle_dp.report import report
from paddle_dp.train import Run
from tests.callbacks.moments import At, Capture
from tests.house.recipes import small_recipe
from tests.house.training import build_trainer
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 30 steps, batch: 64", model="mlp, inputs: 64, hidden: [16], classes: 10", optimizer="momentum",
    schedule="constant, learning_rate: 0.1", strategy="data_parallel", metrics="[{use: classification}]",
    callbacks="[{use: metrics, every: 4 steps}, {use: evaluate}, {use: checkpoint, every: 10 steps}]",
)  # fmt: skip


def text_of(folder: Path) -> str:
    return re.sub(r"<[^>]+>", " ", (folder / "report.html").read_text())


def fitted(folder: str, accident: bool, resume: bool = False) -> int:
    """In every rank: a training, with an accident at step 12 or not. Returns the rank that wrote the report, or -1."""
    trainer = build_trainer(RECIPE, folder, resume=resume)
    learn = trainer.learner.train_batch

    def broken(batch: Any, *how: Any) -> Any:
        if trainer.progress.step == 12 and accident:
            raise RuntimeError("an <accident>")
        return learn(batch, *how)

    trainer.learner.train_batch = broken
    writes: list[str] = []
    original = report.write_report

    def write(path: Path) -> Path:
        writes.append(str(path))
        return original(path)

    report.write_report = write
    try:
        trainer.fit("30 steps")
    except RuntimeError:
        assert accident
    finally:
        report.write_report = original
    return len(writes)


@pytest.mark.processes
def test_one_rank_writes_it_at_the_end_after_a_failure_and_after_a_resume(tmp_path: Path) -> None:
    assert run_ranks(fitted, 2, str(tmp_path), accident=True) == [1, 0]
    failed = text_of(tmp_path)
    assert "RuntimeError: an &lt;accident&gt;" in failed and "12 of 30" in failed and " failed " in failed
    assert run_ranks(fitted, 3, str(tmp_path), accident=False, resume=True) == [1, 0, 0]
    done = text_of(tmp_path)
    assert " finished " in done and "30 of 30" in done and "resumed at step 10" in done and "0 to 12" in done
    assert "held-out samples are right" in done and "f1" in done and "data 3" in done


def test_a_report_that_fails_is_a_sentence(
    run: Run, at: At, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.folder.mkdir()
    writer = ReportWriter(run)
    writer.start(at("start", 0))
    monkeypatch.setattr(report, "write_report", lambda folder: 1 / 0)
    writer.end(at("end", 4))
    assert capsys.readouterr().err == "The report was not written: division by zero.\n"


def test_nothing_is_written_before_the_start_and_without_a_folder(run: Run, at: At, capsys: Capture) -> None:
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')  # an older run's
    writer = ReportWriter(run)
    writer.failed(at("failed", 0), ValueError("refused"))
    assert not (run.folder / "report.html").exists()
    writer.start(at("start", 0))
    writer.failed(at("failed", 1), ValueError("refused"))
    assert (run.folder / "report.html").exists()
    for name in os.listdir(run.folder):
        (run.folder / name).unlink()
    run.folder.rmdir()
    writer.end(at("end", 4))
    assert not run.folder.exists() and capsys.readouterr().err == ""
