"""The page of a run: whole for every kind of run, self-contained, and safe with hostile content."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.report import report
from paddle_dp.report.facts import timespan
from paddle_dp.report.report import report_page, write_report
from paddle_dp.report.run_record import read_run
from paddle_dp.text import CAN_DIFFER
from tests.report import runs

VOID = {"meta", "br"}
EVIL = "<script>alert(1)</script>\"'&"


class Balanced(HTMLParser):
    """Collects tags, and the text that a reader sees; raises AssertionError at a tag that closes another one."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.text = ""
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def seen(folder: Path) -> str:
    """The text of the report, which is checked to be whole and to fetch nothing."""
    page = write_report(folder).read_text()
    assert not re.search(r"<script|<link|src=|https?://|@import|url\(", page)
    text = Balanced(page).text
    assert "could not be made" not in text
    return text


def good_run(folder: Path, **attempt: Any) -> Path:
    events = [
        runs.start(),
        *runs.steps(1, 40, acc1=0.9),
        runs.line("evaluated", 20, loss=0.4, acc1=0.95, held_out=20),
    ]
    events += [
        runs.line("evaluated", 40, loss=0.5, acc1=0.9, held_out=20),
        runs.line("end", 40, stopped=None),
    ]
    facts = runs.certificate(runs.attempt(**attempt))
    return runs.write(folder, *events, certificate=facts, evaluation=runs.evaluation([[9, 1], [1, 9]]))


def test_the_page_of_a_run_that_went_well(tmp_path: Path) -> None:
    text = seen(good_run(tmp_path, proof="none yet: paddle-dp verify x"))
    assert (
        "The model mlp was trained on the data set digits (1,437 samples): 40 updates of 64 samples" in text
    )
    assert "finished" in text and "not proven" in text and "none yet: paddle-dp verify x" in text
    assert "best 0.95 at step 20" in text and "0.9 (95 %: 0.699 to 0.972)" in text and "± 0.067" in text
    assert "18 of 20 held-out samples are right" in text and "class 1" in text
    assert "rank 1" in text and "data 2: ranks read different samples" in text
    assert f"paddle-dp train {tmp_path}/recipe.yaml --ranks 2" in text
    assert "width: 64" in text and "3.3.1" in text


def test_an_evaluation_of_averaged_weights_is_named(tmp_path: Path) -> None:
    averaged = {**runs.evaluation([[9, 1], [1, 9]]), "weights": "ema"}
    (good_run(tmp_path) / "evaluation.json").write_text(json.dumps(averaged))
    assert "After step 40, with averaged weights (ema): 18 of 20 held-out samples are right" in seen(tmp_path)


def test_a_proof_is_told(tmp_path: Path) -> None:
    text = seen(good_run(tmp_path, verdict="abc", proof="verified on 2 ranks"))
    assert "Proven: verified on 2 ranks" in text and "not proven" not in text


def test_a_strategy_that_promises_nothing_and_its_differences_are_told(tmp_path: Path) -> None:
    text = seen(good_run(tmp_path, differences=["gradients are rounded", f"buffer x{CAN_DIFFER}"]))
    assert "learns something else than one process, on purpose" in text
    assert "Not as on one process: gradients are rounded" in text
    assert "Can differ from one process: buffer x" in text and CAN_DIFFER not in text


def test_scores_over_a_part_of_the_held_out_samples_say_so(tmp_path: Path) -> None:
    assert "Scores are over 20 of the 360 held-out samples" in seen(good_run(tmp_path))
    runs.write(tmp_path, runs.start(), runs.line("evaluated", 9, acc1=0.5, held_out=360))
    assert "Scores are over all 360 held-out samples" in seen(tmp_path)


def test_a_failed_run_names_the_cause_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    facts = runs.certificate(runs.attempt(why="NotFiniteError: the loss is nan at step 3", to=3))
    text = seen(runs.write(tmp_path, runs.start(), *runs.steps(1, 3), certificate=facts))
    assert "failed" in text and "the loss is nan at step 3" in text and "3 of 40" in text
    assert "--ranks 2 --resume" in text


def test_a_run_that_a_callback_ended_is_no_failure(tmp_path: Path) -> None:
    """Its badge was that of a run to look after, and a command resumed it, which would have ended at once."""
    (tmp_path / "checkpoints").mkdir()
    page = write_report(good_run(tmp_path, why="done: acc1 did not improve in 3 evaluations")).read_text()
    assert '<span class="state quiet">stopped early</span>' in page and "--resume" not in page
    assert "It stopped early: acc1 did not improve in 3 evaluations." in page


def test_a_run_that_a_callback_of_the_users_ended_can_go_on(tmp_path: Path) -> None:
    """No command resumed a run that its budget of an hour had ended."""
    (tmp_path / "checkpoints").mkdir()
    text = seen(good_run(tmp_path, why="done: its hour is over"))
    assert "It stopped early: its hour is over." in text and "--ranks 2 --resume" in text


@pytest.mark.parametrize(("servers", "rank"), [(0, "rank 0"), (1, "a rank")])
def test_memory_has_the_name_of_its_rank(tmp_path: Path, servers: int, rank: str) -> None:
    facts = runs.certificate(runs.attempt(layout={"data": 2, "servers": servers}))
    runs.write(tmp_path, runs.start(), *runs.steps(1, 3, memory=3 * 2.0**30), certificate=facts)
    assert re.search(f"memory of {rank}, at most\\s*3.00 GB", seen(tmp_path))


def test_commands_of_several_nodes_count_the_ranks_of_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    runs.write(tmp_path, runs.start(ranks=16, nodes=2), *runs.steps(1, 3))
    text = seen(tmp_path)
    assert "--ranks 8 --nodes 2 --resume" in text and text.count("--ranks 8 --nodes 2") == 2
    assert "on each of the 2 nodes" in text and "--ranks 16" not in text


def test_a_resumed_run_lists_its_attempts(tmp_path: Path) -> None:
    attempts = [
        runs.attempt(why=None, to=10),
        runs.attempt(begun="1970-01-01T00:20:00Z", ranks=3, **{"from": 10}),
    ]
    again, steps = runs.start(10, time=1200.0), runs.steps(1, 10, seconds_per_step=1.0)
    text = seen(runs.write(tmp_path, runs.start(), *steps, again, certificate=runs.certificate(*attempts)))
    assert "Restarts: goodput 5%: of 200 s in 2 attempts" in text
    assert "10 to 40" in text and "its end was not recorded" in text
    assert "resumed at step 10" in text  # the title of the mark in the curves


def test_axes_are_frames_within_frames(tmp_path: Path) -> None:
    layout = {"data": 2, "pipeline": 1, "sharding": 1, "sequence": 1, "tensor": 2}
    page = write_report(good_run(tmp_path, ranks=4, layout=layout)).read_text()
    picture = page[page.index("<h2>Layout") :]
    names = re.findall(r"(?:data|tensor) \d(?=</span>)|rank \d", picture[: picture.index("legend")])
    assert names == ["data 0", "tensor 0", "rank 0", "tensor 1", "rank 1", "data 1", "tensor 0", "rank 2", "tensor 1",
                     "rank 3"]  # fmt: skip


def test_servers_are_in_a_frame_before_the_axes_and_last_in_the_legend(tmp_path: Path) -> None:
    page = write_report(good_run(tmp_path, ranks=3, layout=Degrees(data=2, servers=1).as_dict())).read_text()
    picture, legend = page[page.index("<h2>Layout") :].split("legend")[:2]
    names = re.findall(r"(?:data \d|servers)(?=</span>)|rank \d(?: \(server\))?", picture)
    assert names == ["servers", "rank 0 (server)", "data 0", "rank 1", "data 1", "rank 2"]
    assert "1 server, 2 workers" in picture
    assert legend.index("data 2: ranks") < legend.index("servers 1: ranks")


def test_a_run_without_metrics_or_recipe_says_so(tmp_path: Path) -> None:
    runs.write(tmp_path, recipe="", certificate=runs.certificate(runs.attempt(layout=None, versions=None)))
    (tmp_path / "metrics.jsonl").unlink()
    text = seen(tmp_path)
    assert "no callback `metrics`" in text and "described in Python" in text


def test_everything_is_escaped(tmp_path: Path) -> None:
    facts = runs.certificate(
        runs.attempt(why=EVIL, host=EVIL, device=EVIL, versions={EVIL: EVIL}, proof=EVIL, differences=[EVIL],
                     variables={EVIL: EVIL}, changes=[EVIL])
    )  # fmt: skip
    matrix = runs.evaluation([[9, 1], [1, 9]])
    matrix["per_class"][0]["class"] = EVIL
    events = [
        runs.start(name=EVIL),
        runs.line("refused", 2, why=EVIL, action=EVIL),
        runs.line("step", 2, **{EVIL: 1.0}),
    ]
    events += [runs.line("save_failed", 3, message=EVIL), runs.line("evaluated", 4, **{EVIL: 0.5})]
    runs.write(
        tmp_path, *events, recipe=f"model: {{use: '{EVIL[:25]}'}}\n", certificate=facts, evaluation=matrix
    )
    page = write_report(tmp_path).read_text()
    assert "<script" not in page and "alert(1)" in page
    Balanced(page)


def test_a_section_that_fails_is_a_sentence(tmp_path: Path) -> None:
    facts = runs.certificate(runs.attempt(versions="no table"))
    text = Balanced(write_report(runs.write(tmp_path, runs.start(), certificate=facts)).read_text()).text
    assert "The section «environment» could not be made" in text and "Recipe, and how to repeat this" in text


def test_a_file_that_cannot_be_replaced_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(good_run(tmp_path))
    before = path.read_text()
    monkeypatch.setattr(report, "report_page", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path)
    assert path.read_text() == before and [p.name for p in tmp_path.glob(".report*")] == []


def test_a_training_of_200000_recorded_steps_is_drawn_in_seconds(tmp_path: Path) -> None:
    folder = good_run(tmp_path)
    line = (
        '{"event": "step", "epoch": 0, "step": %d, "samples": 64, "seconds": 1.0, "loss": 0.5, "lr": 0.1}\n'
    )
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line % step for step in range(200_000))
    before = time.process_time()
    page = report_page(read_run(folder))
    assert time.process_time() - before < 5 and len(page) < 300_000


def test_time_is_told_in_units_that_people_use() -> None:
    assert [timespan(s) for s in (12.5, 200, 7500)] == ["12.5 s", "3 min 20 s", "2 h 5 min"]


def test_held_out_samples_stand_on_the_page_and_nothing_of_them_is_run(tmp_path: Path) -> None:
    row = {"index": 3, "name": EVIL, "true": "5", "predicted": EVIL, "probability": 0.461, "loss": 2.452}
    content = {
        "step": 40,
        "sentence": "The 2 worst of 360 held-out samples, by their loss.",
        "samples": [
            {**row, "picture": "iVBORw0KGgo="},
            {**row, "predicted": "5", "loss": None, "picture": EVIL},
        ],
        "texts": [{"prompt": "to be", "continuation": EVIL, "reference": " or not"}],
    }
    page = report_page(read_run(runs.write(tmp_path, runs.start(), *runs.steps(1, 40), samples=content)))
    assert page.count("data:image/png;base64,iVBORw0KGgo=") == page.count("<img") == 1 and EVIL not in page
    text = re.sub(r"<[^>]+>", " ", page)
    assert "The 2 worst of 360" in text and "at 46%, loss 2.45" in text and "loss not finite" in text
    assert "the text itself:  or not" in text


def test_a_page_with_the_largest_pictures_has_less_than_two_megabytes(tmp_path: Path) -> None:
    row = {"name": "sample 3", "true": "5", "predicted": "6", "picture": "A" * 69_999}
    content = {"step": 40, "samples": [row] * 100}
    page = report_page(read_run(runs.write(tmp_path, runs.start(), *runs.steps(1, 40), samples=content)))
    assert page.count("<img") == 24 and 1_600_000 < len(page) < 2_000_000
