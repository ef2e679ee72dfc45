"""The exam can be failed: by a wrong constant, by a bar that is not the exam's, by a file that is not vTrain's."""

from __future__ import annotations

import hashlib
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.plan import error_bars, step_time
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.kernel_time import SHEET
from paddle_dp.plan.workload import Workload, device_columns
from tools import planner_exam
from tools.planner import fitted_rates, published_rows
from tools.planner.fitted_rates import ONE_CARD, errors, fitted
from tools.planner.judge import bar, pairs, regret, stage3_pairs, stage3_ratios, tie, within
from tools.planner.published_rows import Runs, published
from tools.planner.scaling import series

HEADER = (
    "# GPUs,global batch,micro batch,hidden size,heads,# layers,sequence length,t,d,p,iteration time (ms)\n"
)


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refused)


def runs(seconds: list[float], width: float = 1024) -> Runs:
    row = {"depth": 4, "width": width, "heads": 8, "vocab": 512, "length": 128, "micro": 1, "micros": 1}
    load = Workload.stack([row | device_columns(DEVICES["a100-80"])] * len(seconds))
    same = np.ones(len(seconds))
    return Runs(load=load, seconds=np.array(seconds), batch=same, memory=0 * same)


def test_the_exam_is_passed_and_says_what_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner_exam.examine(tmp_path, quick=True) == 0
    screen = capsys.readouterr().out
    assert "vTrain's 1549 iterations are not here and cannot be fetched" in screen
    assert "ok     24 published A100 runs, mean: 4.04, at most 5" in screen
    assert screen.endswith("0 thresholds missed\n")


SLOW = replace(SHEET, gemm=0.6)


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (planner_exam, "errors", lambda runs, rates=SLOW: errors(runs, rates),
         ["MISSED 24 published A100 runs, mean"]),
        (error_bars, "BARS", {**error_bars.BARS, "h100": 1.10},
         ["error_bars.py: h100 is 1.1, and the exam's is 1.27"]),
        (planner_exam, "is_foretold", lambda choice: True,
         ["MISSED layouts of stage 3 that the product ranks: 1",
          "ok     stage 3 against tensor × pipeline, right choices of 5: 5, at least 4",
          "by the arithmetic alone: 0 of 5", "by the whole bar: 0 of 5"]),
    ],
    ids=["another constant", "another bar", "a rank for stage 3"],
)  # fmt: skip
def test_it_is_failed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    owner: Any, name: str, value: Any, said: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(owner, name, value)
    assert planner_exam.examine(tmp_path, quick=True) == 1
    screen = capsys.readouterr().out
    assert all(line in screen for line in said), screen


def test_pairs_with_stage_3_have_the_same_model_cards_and_batch() -> None:
    there = published()
    table = stage3_pairs(there["SC21 table 2, ZeRO-3"], there["SC21 table 2"], np.array([1.0, 2.0]))
    assert len(table) == 5  # 640 cards are on one side, 560 on the other
    assert table[:, 2:] == pytest.approx(np.outer(table[:, 1], [1.1, 1.9]))
    assert table[0, 0] == pytest.approx(81.58 / 76.78) and (table[:, 0] > 1).all()
    ratios = stage3_ratios(there)
    assert {name: len(each) for name, each in ratios.items()} == {
        "SC21 table 2, ZeRO-3": 6, "torchtitan": 6, "Megatron-Bridge": 1
    }  # fmt: skip


def test_regret_is_of_the_layout_that_was_chosen() -> None:
    four = runs([4.0, 1.0, 2.0, 3.0])
    assert regret(four, np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx([3.0])
    assert regret(four, np.array([9.0, 2.0, 3.0, 4.0])) == pytest.approx([0.0])


def test_a_tie_is_where_pairs_begin_to_be_right() -> None:
    ratios, right = pairs(runs([1.0, 1.01, 2.0]), np.array([1.1, 1.0, 2.2]))
    assert sorted(zip(np.round(ratios, 6), right, strict=True)) == [(1.1, False), (2.0, True), (2.2, True)]
    assert tie(ratios, right) == 2.0
    assert tie(np.array([1.01, 1.02]), np.array([True, True])) == 1.0


def test_a_bar_holds_8_of_10() -> None:
    ratios = np.exp(np.linspace(-0.1, 0.1, 101))
    assert bar(ratios) == pytest.approx(np.exp(0.08), rel=1e-3)
    assert within(ratios, bar(ratios)) == pytest.approx(0.8, abs=0.01)


def test_constants_are_fitted_to_the_runs_that_are_named() -> None:
    load = published()["SC21 table 1"].load
    truth = replace(SHEET, gemm=0.6)
    made = replace(published()["SC21 table 1"], seconds=step_time.step_time(load, truth).seconds)
    assert fitted([made], ONE_CARD, 150).gemm == pytest.approx(0.6, rel=0.03)
    assert fitted_rates.SHEET == SHEET


def test_vtrain_is_read_where_it_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEADER + "8,32,4,1024,16,24,1024,2,2,2,219.7\n"
    (tmp_path / "ground_truth_single.csv").write_text(text)
    with pytest.raises(ValueError, match=r"has the digest .* delete it"):
        published_rows.vtrain("single", tmp_path)
    monkeypatch.setitem(published_rows.VTRAIN_SHA256, "single", hashlib.sha256(text.encode()).hexdigest())
    read = published_rows.vtrain("single", tmp_path)
    assert read is not None and (read.load.tensor, read.load.data, read.load.pipeline) == (2, 2, 2)
    assert read.seconds == pytest.approx(0.2197) and read.load.micros == 4
    assert published_rows.vtrain("multi", tmp_path) is None


def test_the_rows_are_all_there() -> None:
    rows = published_rows.published_rows()
    assert len(rows) == 153 and all(row["source"] for row in rows)
    assert sum(len(each) for each in published().values()) == 58
    assert sum(len(list(each.points())) for each in series(rows)) == 42
