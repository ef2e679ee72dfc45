"""`paddle-dp plan --try`: who was right follows from seconds; ranks that are not here are refused; nothing is left."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.doctor import layout_trial
from paddle_dp.doctor.layout_trial import Trial, TriedLayout, check_trial, trial, trial_fields, trial_lines
from paddle_dp.doctor.probe_rank import FIRST, TRIAL_STEPS, WINDOW, WINDOWS
from paddle_dp.errors import JobError, UsageError
from paddle_dp.launch.machine import Machine
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.candidates import Candidate
from paddle_dp.plan.devices import DEVICES, Device
from paddle_dp.plan.fullest_rank import RankBytes
from paddle_dp.plan.ranking import PlannedLayout
from paddle_dp.verbs.layout_plan import RecipePlan
from tests.plan.test_probe import probe as measured_probe

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"
HERE = replace(DEVICES["a100-80"], name="this CPU", family="", accelerator=False, bfloat16=False)


def planned(seconds: float, axis: str, rank: int = 1) -> PlannedLayout:
    return PlannedLayout(
        choice=Candidate(degrees=Degrees(**{"data": 1, axis: 2}), micro=1, micro_batches=1), seconds=seconds,
        low=0.8 * seconds, high=1.25 * seconds, memory=RankBytes(state=1.0, activations=1.0), peak_share=0.5,
        shares={"compute": 1.0}, rank=rank, tight=False,
    )  # fmt: skip


def tried(foretold: float, measured: float, axis: str) -> TriedLayout:
    return TriedLayout(
        planned=planned(foretold, axis), seconds=measured, low=0.99 * measured, high=1.01 * measured
    )


def sentences(*layouts: tuple[float, float], load: float = 0.0) -> list[str]:
    rows = [tried(*each, axis) for each, axis in zip(layouts, ("data", "tensor", "pipeline"), strict=False)]
    return [*Trial(tried=rows, load=load, cores=2).sentences()]


def test_the_order_is_judged_where_it_was_foretold() -> None:
    assert sentences((1.0, 1.1), (1.1, 0.9)) == [
        "2 of 2 within their bars, which should hold 8 of 10",
        "no order was foretold: they are within 15 % of each other",
        "the plan was wrong: tensor 2 took 18 % less than the plan's first, data 2",
    ]
    assert sentences((1.0, 1.1), (1.5, 2.0), (3.0, 3.0)) == [
        "2 of 3 within their bars, which should hold 8 of 10",
        "the order held in 3 pairs foretold apart",
        "the plan was right: its first layout was the fastest of these",
    ]
    assert sentences((1.0, 2.0), (2.0, 1.0))[1:] == [
        "the order did not hold: data 2 should take 0.50 times the seconds of tensor 2, and took 2.00 times",
        "the plan was wrong: tensor 2 took 50 % less than the plan's first, data 2",
    ]
    assert "no difference is certain: tensor 2 took 1 % less" in sentences((1.0, 1.0), (1.1, 0.99))[-1]


def test_one_layout_has_no_order_and_a_busy_machine_is_said() -> None:
    assert sentences((1.0, 1.0))[1:] == ["no order was foretold: there is one layout"]
    assert sentences((1.0, 1.0), load=0.4) == sentences((1.0, 1.0))
    assert sentences((1.0, 1.0), load=3.0)[-1].startswith(
        "not to be trusted: while 2 ranks trained, 3 other processes wanted"
    )


def test_the_screen_has_100_columns_and_the_object_the_same() -> None:
    both = Trial(tried=[tried(1.0, 1.1, "data"), tried(0.02, 0.03, "tensor")], load=0.0, cores=2)
    lines, fields = [*trial_lines(both)], trial_fields(both)
    assert max(map(len, lines)) <= 100
    assert "1.1 s" in lines[2] and "-9 %" in lines[2] and lines[2].endswith("data 2")
    assert "30 ms" in lines[3] and "29.7 … 30.3" in lines[3]
    assert json.loads(json.dumps(fields, allow_nan=False))["layouts"][0]["measured"]["seconds"] == 1.1
    assert [row["within"] for row in fields["layouts"]] == [True, False]


def plan_for(ranks: int, device: Device) -> RecipePlan:
    return RecipePlan.make(RECIPE, (), [ranks], device)


def test_ranks_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(kind="cpu", devices=(), cores=2))
    check_trial(plan_for(2, HERE))
    with pytest.raises(
        UsageError, match=r"--try: the probe is of EPYC, and this machine has .*: measure here"
    ):
        check_trial(plan_for(2, HERE), measured_probe())
    with pytest.raises(
        UsageError, match=r"--try runs 4 ranks on this CPU, and this machine has 2 processors: .*--ranks 2"
    ):
        check_trial(plan_for(4, HERE))
    with pytest.raises(
        UsageError, match=r"on a100-80, and this machine has no accelerator: .*--measured probe.json"
    ):
        check_trial(plan_for(2, DEVICES["a100-80"]))
    monkeypatch.setattr(Machine, "here", lambda: Machine(kind="gpu", devices=("0",), cores=8))
    with pytest.raises(UsageError, match="this machine has 1 accelerator"):
        check_trial(plan_for(2, DEVICES["a100-80"]))
    check_trial(plan_for(1, DEVICES["a100-80"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "1..2", "--try", "3"], "--try 3 runs one number of ranks"),
        (["--ranks", "2", "--try", "0"], "--try 0: give"),
    ],
)
def test_mistakes_are_met_at_the_door(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(RECIPE), *words])
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_rounds_go_through_the_first_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(kind="cpu", devices=(), cores=2))
    order: list[str] = []

    def measured(bench: Any, file: Path, settings: Any, row: PlannedLayout) -> list[float]:
        assert "callbacks=[]" in settings and "train.batch_ramp=null" in settings
        assert f"train.length={TRIAL_STEPS} steps" in settings
        assert "train.device=cpu" in settings and settings[0] == "train.batch=8"
        order.append(str(row.choice))
        return [float(len(order))] * WINDOWS

    monkeypatch.setattr(layout_trial, "_measured", measured)
    plan = plan_for(2, HERE)
    both = trial(plan, RECIPE, ["train.batch=8"], 2)
    assert order == [str(row.choice) for row in plan.rankings[0].ranked[:2]] * 2
    assert [(each.low, each.high) for each in both.tried] == [(1.0, 3.0), (2.0, 4.0)]


@pytest.mark.processes
@pytest.mark.long
def test_layouts_are_tried_here_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(layout_trial, "ROUNDS", 1)
    monkeypatch.chdir(tmp_path)
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two processors")
    both = trial(plan_for(2, HERE), RECIPE, (), 2)
    assert len(both.tried) == 2 and all(0 < each.low <= each.seconds <= each.high < 60 for each in both.tried)
    with pytest.raises(JobError, match="failed"):
        trial(plan_for(2, HERE), RECIPE, ["dataset.vocab=640"], 1)  # the model has 64 words
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_windows_begin_after_the_first_steps() -> None:
    assert TRIAL_STEPS == FIRST + WINDOW * WINDOWS + 1
