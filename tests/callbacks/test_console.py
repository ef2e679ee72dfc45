"""The screen: lines that can be read back, a bar on a real (pseudo) terminal, and a summary that says what to do."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.callbacks import _lines
from paddle_dp.callbacks.console import Config, terminal
from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh
from paddle_dp.plan.changes import Facts
from paddle_dp.plan.measured import Measured
from paddle_dp.plan.rank_times import RankTimes
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.text import CAN_DIFFER, FIRST_SAMPLES
from paddle_dp.train import Callback, Evaluation, Progress, Refusal, Run
from paddle_dp.train.run import Proof
from tests.callbacks.moments import At, Capture, Found

NUMBERS = {"loss": 1.23456, "acc1": 0.53125, "acc5": 0.9, "gradient_norm": 2.0, "lr": 3e-3, "memory": 1e9}
Screen = tuple[str, Callable[[], str]]
SPEED = {"samples_per_second": 1234.4, "seconds_per_step": 0.01, "waiting": 0.02}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADDLE_DP_TTY", raising=False)


def test_a_step_is_a_line_of_the_known_shape() -> None:
    line = _lines.step(Progress(epoch=0, batch=5, step=5, samples=10), NUMBERS | SPEED)
    assert line == "[epoch 1, step 5] loss 1.2346  acc1 0.5312  acc5 0.9000  lr 3.0e-03  1234 samples/s"


def test_the_last_step_of_an_epoch_is_still_in_it() -> None:
    assert _lines.at(Progress(epoch=2, batch=4, step=12)) == "[epoch 3, step 12] "
    # After it, the held-out line.
    assert _lines.at(Progress(epoch=3, batch=0, step=12)) == "[epoch 3, step 12] "


def test_commands_can_be_pasted_also_with_spaces_in_the_folder(run: Run, trainer: Any) -> None:
    spaced = dataclasses.replace(run, folder=Path("runs/my run"), recipe=recipe_with("data_parallel"))
    found = Evaluation(numbers={}, samples=1)
    assert list(_lines.summary(spaced, _lines.Took(1, 1.0), found, None, trainer)) == [
        "  the only held-out sample counted once",
        "1 step in 1.0 s. The run is in runs/my run",
        "  dashboard    paddle-dp dashboard runs",
        "  the proof    paddle-dp verify 'runs/my run/recipe.yaml' --ranks 2",
    ]


def test_what_a_rank_sends_stands_beside_the_seconds() -> None:
    assert str(_lines.Took(1, 1.0)) == "1 step in 1.0 s"
    assert _lines.mean([]) is None
    assert _lines.mean([(10, 6.0), (10, 0.0), (5, 0.0)]) == 2.4
    assert str(_lines.Took(460, 6.4, 340_000.0)) == "460 steps in 6.4 s, 0.34 MB a step sent by each rank"


def test_a_run_that_was_done_before_says_so(run: Run, trainer: Any) -> None:
    def last(steps: int, first: int) -> str:
        took = _lines.Took(steps, 2.4, first=first)
        return next(line for line in _lines.summary(run, took, None, None, trainer) if "The run is" in line)

    assert last(0, 20) == f"nothing left to do: all 20 steps were done before. The run is in {run.folder}"
    assert last(0, 7) == f"0 steps in 2.4 s. The run is in {run.folder}"  # a callback has stopped it


def recipe_with(strategy: str) -> Recipe:
    return read_recipe(Path("configs/digits_mlp.yaml"), [f"strategy={{use: {strategy}}}"])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("single", "--ranks 2 strategy.use=data_parallel"),
        ("hybrid, data: 1", "--ranks 2 strategy.use=data_parallel"),
        ("data_parallel", "--ranks 2"),
    ],
)
def test_the_proof_that_one_process_shows_is_one_that_the_strategy_takes(
    run: Run, trainer: Any, strategy: str, words: str
) -> None:
    alone = dataclasses.replace(run, recipe=recipe_with(strategy))
    last = list(_lines.summary(alone, _lines.Took(1, 1.0), None, None, trainer))[-1]
    assert last == f"  the proof    paddle-dp verify {run.folder}/recipe.yaml {words}"


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "told"),
    [
        (2, 1, ""),
        (3, 1, "; 1 of 3 ranks will always be without a sample, for train.batch is 2"),
        (2, 2, "; 1 of 2 ranks will always be without a sample, for train.batch is 2 in 2 micro-batches"),
    ],
)
def test_ranks_that_will_have_nothing_to_do_are_told(
    run: Run, ranks: int, micro_batches: int, told: str
) -> None:
    loader = Loader.plain([(0, 0)] * 8, batch=2, micro_batches=micro_batches)
    mesh = Mesh(ranks=ranks)
    several = dataclasses.replace(run, mesh=mesh, train_loader=loader)
    line = f"squares: 4 steps of 2 samples (1 epoch) on {ranks} ranks, cpu{told}"
    assert _lines.start(several, Progress(), 4) == line


def test_a_strategy_that_does_nothing_on_one_rank_says_so(run: Run) -> None:
    """Who forgets --ranks has one process, and nothing to compare."""
    for strategy, told in (
        ("local_sgd", "; strategy local_sgd is for several ranks: --ranks 2"),
        ("single", ""),
    ):
        line = _lines.start(dataclasses.replace(run, recipe=recipe_with(strategy)), Progress(), 4)
        assert line.endswith(f"on 1 process, cpu{told}")
    several = dataclasses.replace(run, mesh=Mesh(ranks=2), recipe=recipe_with("local_sgd"))
    assert "is for several" not in _lines.start(several, Progress(), 4)


def test_waiting_for_data_is_mentioned_when_it_matters() -> None:
    line = _lines.step(Progress(step=5), NUMBERS | SPEED | {"waiting": 0.42})
    assert line.endswith("1234 samples/s  42% waiting for data")


def test_of_texts_the_tokens_are_counted_too() -> None:
    found = NUMBERS | SPEED | {"tokens_per_second": 157987.2}
    assert _lines.step(Progress(step=5), found).endswith("lr 3.0e-03  1234 samples/s  157987 tokens/s")
    assert _lines.short(found, 60) == "loss 1.2346  acc1 0.5312  lr 3.0e-03  157987 tok/s"
    assert _lines.short(found, 40) == "loss 1.2346  acc1 0.5312  157987 tok/s"
    assert _lines.short(found, 30) == "loss 1.2346  157987 tok/s"
    assert _lines.short(found, 5) == "loss 1.2346"


def test_a_rank_that_knows_no_loss_yet_shows_none() -> None:
    """Under async_average, before any rank has reported: it was "loss nan", which looks like a broken training."""
    speed = {"lr": 3e-3, "samples_per_second": 1234.0}
    assert _lines.short(speed, 60) == "lr 3.0e-03  1234/s" and _lines.short(speed, 5) == ""
    assert _lines.step(Progress(), speed).endswith("] lr 3.0e-03  1234 samples/s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (99.94, "99.9 s"), (100.0, "1:40"), (3599.0, "59:59"), (3723.4, "1:02:03")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert _lines.duration(seconds) == text


def test_plain_lines_tell_the_whole_story(
    run: Run, at: At, found: Found, trainer: SimpleNamespace, capsys: Capture
) -> None:
    console = Config().build(dataclasses.replace(run, recipe=recipe_with("data_parallel")))
    tell(console, at, found)
    trainer.early_end = "it is enough"
    console.end(at("end", 8))
    folder = run.folder
    said = re.sub(r"in \d+\.\d s", "in 1.0 s", capsys.readouterr().out)
    assert said.splitlines() == [
        "squares: 20 steps of 2 samples (5 epochs) on 1 process, cpu, going on from step 4",
        "[epoch 2, step 5] loss 1.2346  acc1 0.5312  acc5 0.9000  lr 3.0e-03  1234 samples/s",
        "[epoch 2, step 8] held-out: loss 0.5000  acc1 0.8750",
        "stopped at step 8: it is enough",
        "  each of the 8 held-out samples counted once",
        f"4 steps in 1.0 s. The run is in {folder}",
        f"  checkpoint   {folder}/checkpoints/step-00000008",
        f"  dashboard    paddle-dp dashboard {folder.parent}",
        f"  the proof    paddle-dp verify {folder}/recipe.yaml --ranks 2",
    ]


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_loader_that_is_the_bottleneck_is_said_so_and_the_whole_measurement_where_it_is_shown(
    run: Run, at: At, capsys: Capture, is_shown: bool
) -> None:
    part = RankTimes(rank=0, host="a", step=0.1, data=0.082, forward=0.018, reading_on_core=0.0)
    facts = Facts(batch=8, degrees={}, cores=4)
    console = Config().build(run)
    console.start(at("start", 0))
    capsys.readouterr()
    console.measured(
        at("measured", 15), Measured(first=11, last=30, rank_times=[part], facts=facts, is_shown=is_shown)
    )
    told = capsys.readouterr().out
    if not is_shown:
        assert told == (
            "82% of the time waits for data: loader.num_workers=5 would do (0 now; 100 ms → 18 ms a step)\n"
        )
    else:
        assert told.startswith("Where a step of 100 ms goes") and "Change: loader.num_workers=5" in told


def tell(console: Callback, at: At, found: Found) -> None:
    console.start(at("start", 4))
    console.step(at("step", 5, **NUMBERS, **SPEED))
    console.evaluated(at("evaluated", 8), found(loss=0.5, acc1=0.875))
    console.saved(at("saved", 8), console.run.folder / "checkpoints/step-00000008")  # type: ignore[attr-defined]


def last_lines(run: Run, training: Any, first: int = 0) -> list[str]:
    return list(_lines.summary(run, _lines.Took(4, 1.0, first=first), None, None, training))


def test_a_run_made_in_python_has_no_recipe_to_verify(run: Run, trainer: Any) -> None:
    lines = "\n".join(last_lines(run, trainer))
    assert "verify" not in lines and "held-out" not in lines and "checkpoint" not in lines
    several = dataclasses.replace(run, mesh=Mesh(ranks=2))
    for lines in (last_lines(several, trainer), list(_lines.known(several, trainer, 0))):
        assert lines[-1].startswith("  the proof    none that this is one process's result. ")
        assert "paddle-dp audit" in lines[-1]


def test_one_process_s_result_is_said_with_its_proof_alone(run: Run, trainer: Any) -> None:
    """Whatever a training knows of itself, it claims nothing."""
    trainer.facts, mesh = ["same global batches", "unrounded gradients"], Mesh(ranks=2)
    proof = Proof("verified on 2 ranks, 23 Nov 2026", verdict_key="0123")
    for told, line in ((proof, "verified on 2 ranks, 23 Nov 2026"), (Proof("nobody has"), "nobody has")):
        proven = dataclasses.replace(
            run, mesh=mesh, recipe=recipe_with("data_parallel"), proof=lambda t=told: t
        )
        begun, ended = list(_lines.known(proven, trainer, 0)), last_lines(proven, trainer)
        facts = "same global batches; unrounded gradients"
        assert begun == [f"  {facts}", f"  the proof    {line}"]
        assert ended[0] == f"  shared weights bit-equal after step 4; {facts}" and ended[-1] == begun[-1]
    resumed = list(_lines.known(dataclasses.replace(proven, proof=lambda: proof), trainer, 92))
    assert resumed[-1].endswith("2026; these are the updates since step 92")


def test_what_differs_stands_in_the_first_lines_and_in_the_last(run: Run, trainer: Any) -> None:
    run = dataclasses.replace(run, mesh=Mesh(ranks=2))
    trainer.differences = [f"buffer seen has another shape{CAN_DIFFER}"]
    for lines in (list(_lines.known(run, trainer, 0)), last_lines(run, trainer)):
        assert lines[1] == "  can differ: buffer seen has another shape"
        assert not any("not as one process" in line for line in lines)
    trainer.differences.insert(0, "53 BatchNorm layers normalize over one rank's samples")
    trainer.unknown = ["whether huber treats each sample alone"]
    for lines in (list(_lines.known(run, trainer, 0)), last_lines(run, trainer)):
        assert lines[1:5] == [
            "  not as one process computes it:",
            "  - 53 BatchNorm layers normalize over one rank's samples",
            "  can differ: buffer seen has another shape",
            "  not known: whether huber treats each sample alone",
        ]


def test_a_trial_that_failed_with_the_first_samples_follows_the_first_update(
    run: Run, trainer: Any, at: At, capsys: Capture
) -> None:
    """If that fails likewise, its error is on the screen once."""
    run = dataclasses.replace(run, mesh=Mesh(ranks=2))
    trainer.unknown = [f"whether f treats each sample alone: {FIRST_SAMPLES} ValueError: x", "whether g does"]
    failed, other = [f"  not known: {doubt}" for doubt in trainer.unknown]
    assert [line for line in last_lines(run, trainer) if "not known" in line] == [failed, other]
    console = Config().build(run)
    console.start(at("start", 4))
    lines = capsys.readouterr().out.splitlines()
    assert other in lines and failed not in lines
    for step, printed in ((5, [failed]), (6, [])):
        console.step(at("step", step, **NUMBERS, **SPEED))
        lines = capsys.readouterr().out.splitlines()
        assert lines[:-1] == printed and lines[-1].endswith("samples/s")


def test_copies_in_one_process_are_judged_as_ranks_are(run: Run, trainer: Any) -> None:
    """One process, and yet its BatchNorms see a part of each batch."""
    trainer.differences = ["2 BatchNorm layers normalize over one copy's samples"]
    copies = dataclasses.replace(run, recipe=recipe_with("replicas"))
    assert "  not as one process without copies computes it:" in last_lines(copies, trainer)
    alone = dataclasses.replace(run, recipe=recipe_with("single"))
    assert not list(_lines.known(alone, trainer, 0))
    assert not any("as one process" in line for line in last_lines(alone, trainer))


def test_other_ranks_are_silent(run: Run, at: At, capsys: Capture) -> None:
    console = Config().build(dataclasses.replace(run, mesh=Mesh(rank=1, ranks=2)))
    console.start(at("start", 0))
    console.step(at("step", 10, **NUMBERS, **SPEED))
    console.end(at("end", 10))
    assert capsys.readouterr().out == ""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A terminal (pseudo) that the launcher names: its name, and what has been drawn on it since it was last asked."""
    monkeypatch.setenv("TERM", "xterm-256color")  # whatever terminal the tests themselves are run in
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()

    def drawn() -> str:
        text = b""
        while select.select([ours], [], [], 0.2)[0]:
            text += os.read(ours, 65536)
        return text.decode()

    monkeypatch.setenv("PADDLE_DP_TTY", os.ttyname(theirs))
    yield os.ttyname(theirs), drawn
    os.close(ours)
    os.close(theirs)


def test_on_a_terminal_that_the_launcher_names_a_bar_is_drawn_and_stdout_gets_the_lines(
    run: Run, at: At, found: Found, screen: Screen, capsys: Capture
) -> None:
    _, drawn = screen
    console = Config().build(run)
    tell(console, at, found)
    text = drawn()
    assert "━\x1b[0m\x1b[8m╺" in text  # what is not done is hidden, not of another colour
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(
        r"epoch 2/5 [━╸╺ ]+ loss 1\.2346  acc1 0\.5312  lr 3\.0e-03  1234/s +\d+\.\d s left", text
    )
    assert "[epoch 2, step 8] held-out" in text and "[epoch 2, step 5]" not in text
    console.end(at("end", 20))
    text = drawn()
    assert "held-out samples counted once" in text
    assert text.count("[epoch 2, step 5] loss 1.2346") == 1  # what the bar had shown last stays
    log = capsys.readouterr().out
    assert "[epoch 2, step 5] loss" in log and "held-out samples counted once" in log


def test_the_bar_is_drawn_a_few_times_a_second(run: Run, at: At, screen: Screen) -> None:
    _, drawn = screen
    console = Config().build(run)
    console.start(at("start", 0))
    for step in range(1, 20):
        console.step(at("step", step, **NUMBERS, **SPEED))
    assert drawn().count("1234/s") == 1
    console.step(at("step", 20, **NUMBERS, **SPEED))  # the last one always
    assert "1234/s" in drawn()
    console.failed(at("failed", 20), KeyboardInterrupt())


def test_the_bar_is_no_further_back_than_a_line_above_it(run: Run, at: At, screen: Screen) -> None:
    """It kept the numbers of up to a fifth of a second ago beside what was evaluated after them."""
    _, drawn = screen
    console = Config().build(run)
    console.start(at("start", 0))
    console.step(at("step", 1, **NUMBERS, **SPEED))
    console.step(at("step", 2, **{**NUMBERS, "loss": 0.25}, **SPEED))
    assert "loss 0.2500" not in drawn()
    console.evaluated(at("evaluated", 2), Evaluation(numbers={"loss": 7.0}, samples=1))
    assert "loss 0.2500" in drawn()


def test_a_narrow_terminal_keeps_one_line(run: Run, at: At, screen: Screen) -> None:
    name, drawn = screen
    with open(name) as terminal:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    console = Config().build(run)
    console.start(at("start", 0))
    drawn()
    console.step(at("step", 5, **NUMBERS, **SPEED))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn()).replace("\r", "").strip("\n").split("\n")
    assert len(lines) == 1 and len(lines[0]) <= 60 and "epoch 2/5" in lines[0]
    console.end(at("end", 20))


def test_a_terminal_that_is_gone_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADDLE_DP_TTY", str(tmp_path / "no/terminal"))
    assert terminal() is None
    for content in (None, "somebody's own"):  # left over from another job: neither made nor emptied
        file = tmp_path / "a-file"
        monkeypatch.setenv("PADDLE_DP_TTY", str(file))
        if content:
            file.write_text(content)
        assert terminal() is None and (file.read_text() if file.exists() else None) == content
    os.mkfifo(tmp_path / "a-pipe")
    monkeypatch.setenv("PADDLE_DP_TTY", str(tmp_path / "a-pipe"))
    assert terminal() is None
    monkeypatch.delenv("PADDLE_DP_TTY")
    assert (terminal() is sys.stdout) == sys.stdout.isatty()


def test_a_resume_says_what_is_otherwise(run):
    assert _lines.start(run, Progress(), 3).endswith("cpu")
    said = _lines.start(dataclasses.replace(run, changes=tuple("abcde")), Progress(step=2), 3)
    assert said.endswith("cpu, going on from step 2; a; b; c; and 2 more changes")


def test_what_the_guard_left_out_is_counted_once(run, at, found, capsys):
    """After a rewind steps come again, and the batch that was refused is then left out."""
    console = Config().build(run)
    tell(console, at, found)
    for step, action, now in (
        (5, "skip", 5),
        (7, "skip", 7),
        (8, "rewind", 6),
        (7, "skip", 7),
        (8, "skip", 8),
    ):
        refusal = Refusal(step=step, epoch=0, batch=step, samples=[], why="", action=action)
        console.refused(at("refused", now), refusal)
    console.end(at("end", 14))
    said = capsys.readouterr().out
    assert "\n3 of 10 updates were left out by the guard\n" in said
    console.start(at("start", 14))
    console.refused(at("refused", 16), refusal)
    console.end(at("end", 16))
    assert "\n1 of 2 updates was left out by the guard\n" in capsys.readouterr().out
    tell(console, at, found)
    console.end(at("end", 14))
    assert "left out" not in capsys.readouterr().out


def test_a_run_that_was_restarted_ends_with_its_goodput(run: Run, trainer: Any) -> None:
    def restarted() -> list[str]:
        summary = _lines.summary(run, _lines.Took(4, 1.0), None, None, trainer)
        return [line for line in summary if "goodput" in line]

    run.folder.mkdir()
    step = '"event": "step", "step": 10, "time": 1010, "seconds_per_step": 1'
    lines = ['{"event": "start", "step": 0, "time": 1000}\n', f"{{{step}}}\n"]
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    assert not restarted()
    again = [lines[0], lines[0], lines[1].replace("1010", "1020")]
    (run.folder / "metrics.jsonl").write_text("".join(again))
    [line] = restarted()
    assert line.startswith(
        "  goodput 50%: of 20 s in 2 attempts, 10 s went into the 10 updates that count, 0 s into"
    )
