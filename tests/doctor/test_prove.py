"""The proof on a machine's cards: its file, its rows, its layouts; and real short runs on two CPU ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.doctor import prove_steps
from paddle_dp.doctor.bench import Bench, ChildResult, end
from paddle_dp.doctor.proof_file import MAX_CHARS, ProofFile, ProofRow, Scrubber
from paddle_dp.doctor.prove import ProveStep, failed_row, prove, run_steps, summary
from paddle_dp.doctor.prove_steps import STEPS, layouts_for, verified_row
from paddle_dp.errors import EndedError, UsageError
from paddle_dp.launch.processes import alive
from paddle_dp.recipe import read_recipe
from tests.house.forked_commands import run_command

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"
SCRUBBER = Scrubber(
    hosts=("trainbox.lab.example", "trainbox"),
    users=("Jo Smith", "josmith"),
    folders=("/home/Jo Smith/work",),
)
SECRETS = (
    "/home/Jo Smith/work/a b/recipe.yaml", "/home/josmith/run", "~josmith/x", "runs/private/x.yaml", "../up/x.py",
    "'/mnt/My Disk/file'", "trainbox.lab.example", "trainbox", "TRAINBOX", "josmith", "Jo Smith", "10.1.2.3:29500",
    "192.168.0.7", "fe80::1ff:fe23:4567:890a%eth0", "00:1a:2b:3c:4d:5e", "josmith@trainbox", "https://lab.example/x",
)  # fmt: skip
LEAKS = re.compile(
    r"/|~|trainbox|josmith|smith|private|my disk|10\.1\.2|192\.168|fe80|1a:2b|lab\.example", re.I
)
VERDICT: dict[str, Any] = {
    "verdict": "same", "allowed": 8.0, "where": None, "weights": {"r": 0.2}, "steps": [{"r": 0.5}],
    "float64": {"dtype": "float64", "visible": 1e-14, "rows": {"gradient": {"r": 1.25}}}, "own": None,
    "sentences": ["SAME: 2 ranks learn what one process learns, to rounding."],
}  # fmt: skip


def test_no_path_address_host_or_user_gets_into_the_file(tmp_path: Path) -> None:
    """In any text of a row, in any order and between any words."""
    random, file = np.random.default_rng(0), ProofFile(tmp_path / "proof.json", SCRUBBER, 2, 1.0)
    words = ("error", "in", "rank 1 of 2 on", "at:", "File", "(pid 7)", "loss", "«", "line 3,", "")
    for number in range(30):
        texts = []
        for _ in range(30):
            chosen = [str(random.choice(SECRETS)), *random.choice(words, 4), str(random.choice(SECRETS))]
            texts.append(" ".join(random.permutation(chosen)))
        values = {"output": texts, "nested": {"first": [texts[1]]}}
        file.add(ProofRow(step="layouts", name=texts[2], sentence=texts[0], values=values))
        assert number + 1 == len(json.loads(file.path.read_text())["rows"])
    leak = LEAKS.search(file.path.read_text())
    assert leak is None, leak


def test_scrubbing_leaves_the_facts() -> None:
    plain = "data 2 × tensor 2, sequence_parallel: same, largest r 1.4, 10.1 s; NVIDIA H100 80GB HBM3; 12:34"
    assert SCRUBBER.text(plain) == plain
    assert SCRUBBER.text("ValueError: blocks.1.qkv.bias of 'gpt' differs in step 3") == (
        "ValueError: blocks.1.qkv.bias of 'gpt' differs in step 3"
    )
    assert SCRUBBER.text("mesh of rank 1 on trainbox (10.0.0.1)") == "mesh of rank 1 on <host> (<address>)"
    assert SCRUBBER.value({"versions": {"cudnn": "9.5.1.17"}}) == {"versions": {"cudnn": "9.5.1.17"}}
    assert len(SCRUBBER.text("x" * 10_000)) < MAX_CHARS + 5


def test_the_scrubber_of_this_machine_knows_its_folders() -> None:
    here = Scrubber.here(Path("/some/where"))
    text = here.text(
        f"in {Path.cwd()}/a, {Path.home()} and /some/where: by {os.environ.get('USER', 'nobody')}"
    )
    assert str(Path.home()) not in text and "where" not in text


def bench(folder: Path, ranks: int = 2, seconds: float = 60.0) -> Bench:
    return Bench(ranks, "cpu", folder, time.monotonic() + seconds, dict(os.environ))


def good(bench: Bench) -> Iterator[ProofRow]:
    yield ProofRow(step="layouts", name="first", sentence="same", agrees=True)


def failing(bench: Bench) -> Iterator[ProofRow]:
    yield ProofRow(step="layouts", name="first", sentence="same", agrees=True)
    raise RuntimeError("no such card")


def interrupted(bench: Bench) -> Iterator[ProofRow]:
    yield ProofRow(step="speed", name="first", sentence="fast")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
    yield ProofRow(step="speed", name="second", sentence="never")


def late(bench: Bench) -> Iterator[ProofRow]:
    bench.deadline = time.monotonic()
    bench.verb("parts")
    yield ProofRow(step="memory", name="never", sentence="never")


def test_a_failing_step_and_one_without_time_are_rows_and_not_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"layouts": ProveStep(failing, 2), "memory": ProveStep(late, 1), "precision": ProveStep(good, 1)}
    file = tmp_path / "proof.json"
    assert prove(steps, ranks=2, minutes=1, file=file) == 1
    content = json.loads(file.read_text())
    assert (content["format"], content["ended"], content["agree"], content["compared"]) == (1, "done", 2, 2)
    states = [(row["step"], row["name"], row["state"]) for row in content["rows"]]
    assert states == [
        ("layouts", "first", "ok"), ("layouts", "layouts", "mend"), ("memory", "memory", "look"),
        ("layouts", "first", "ok"),
    ]  # fmt: skip
    assert content["rows"][1]["sentence"] == "RuntimeError: no such card"
    assert "--minutes" in content["rows"][2]["sentence"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"2 of 2 comparisons agree; to mend: layouts. The results are in {file}."
    assert [entry.name for entry in tmp_path.iterdir()] == ["proof.json"]


def test_without_a_difference_the_status_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proof.json"
    assert prove({"layouts": ProveStep(good, 1)}, ranks=2, minutes=1, file=file, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_an_interrupted_proof_keeps_its_rows(tmp_path: Path) -> None:
    steps = {"layouts": ProveStep(good, 1), "speed": ProveStep(interrupted, 1), "memory": ProveStep(good, 1)}
    file = tmp_path / "proof.json"
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's job in the background ignores it
    try:
        with pytest.raises(EndedError) as ended:
            prove(steps, ranks=2, minutes=1, file=file)
    finally:
        signal.signal(signal.SIGINT, before)
    content = json.loads(file.read_text())
    assert ended.value.exit_status == 130 and content["ended"] == "SIGINT"
    assert [row["step"] for row in content["rows"]] == ["layouts", "speed"]


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none" / "proof.json"):
        with pytest.raises(UsageError, match="--out"):
            prove({"layouts": ProveStep(good, 1)}, file=file)
    with pytest.raises(UsageError, match="--minutes 0"):
        prove({"layouts": ProveStep(good, 1)}, minutes=0, file=tmp_path / "proof.json")


def test_a_step_gives_its_unused_time_to_those_after_it(tmp_path: Path) -> None:
    left: list[float] = []

    def measured(bench: Bench) -> Iterator[ProofRow]:
        left.append(bench.deadline - time.monotonic())
        yield from ()

    steps = {name: step._replace(rows=measured) for name, step in STEPS.items()}
    list(run_steps(steps, bench(tmp_path), 1000.0))
    assert left[0] == pytest.approx(20, abs=1) and left[-1] == pytest.approx(1000, abs=5)
    assert sum(step.share for step in STEPS.values()) == 100


@pytest.mark.processes
def test_a_child_that_crashes_or_stands_still_is_a_row_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os; print('begun', flush=True); os.abort()")
    (tmp_path / "stand.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked to end', flush=True) or sys.exit(3))\n"
        "child = subprocess.Popen(['sleep', '100'])\nprint(child.pid, flush=True)\ntime.sleep(100)\n"
    )
    crashed = failed_row("layouts", "data 2", bench(tmp_path).child("crash"))
    assert (crashed.state, crashed.agrees, crashed.values["output"]) == ("mend", None, ["begun"])
    assert crashed.sentence == "ended with SIGABRT: begun"
    result = bench(tmp_path, seconds=3.0).child("stand")
    assert result.late and result.is_cut and "asked to end" in result.stdout
    assert not alive(int(result.stdout.split()[0]))
    assert failed_row("layouts", "data 2", result).state == "look"


@pytest.mark.processes
def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dp.doctor.bench.PATIENCE", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    end(child)
    assert child.returncode == -signal.SIGKILL


def result(status: int, verdict: dict[str, Any] | None = None, stderr: str = "") -> ChildResult:
    return ChildResult(status, json.dumps(verdict) if verdict else "", stderr, 4.0)


def test_the_rows_of_verdicts() -> None:
    same = verified_row("layouts", "data 2", ["a=1"], result(0, VERDICT))
    assert (same.state, same.agrees, same.sentence) == ("ok", True, "same, largest r 1.2, 4.0 s")
    assert same.values["sensitivity"] == {"float64": 1e-14} and same.values["largest_r"] == 1.25
    other = {**VERDICT, "verdict": "different", "weights": {"r": "inf"}, "where": {"sentence": "In step 1 …"}}
    different = verified_row("layouts", "data 2", [], result(1, other))
    assert (different.state, different.agrees) == ("mend", False)
    assert different.sentence.endswith(": In step 1 …") and different.values["largest_r"] == "inf"
    proven = verified_row("layouts", "data 2", [], result(3, {**VERDICT, "sentences": ["PROVES NOTHING: …"]}))
    assert (proven.state, proven.agrees) == ("look", None) and "PROVES NOTHING" in proven.sentence
    refused = verified_row("layouts", "data 2", [], result(2, stderr="tensor does not divide heads"))
    assert (refused.state, refused.sentence) == ("look", "refused: tensor does not divide heads")
    stopped = verified_row("layouts", "data 2", [], result(4, stderr="ValueError: wrong\nsee above."))
    assert (stopped.state, stopped.agrees) == ("mend", False)
    assert stopped.sentence == "ended with exit status 4: ValueError: wrong"


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        (1, 0),
        (2, 11),
        (3, 3),
        (4, 13),
        pytest.param(6, 11, marks=pytest.mark.long),
        (8, 13),
    ],
)
def test_the_layouts_of_so_many_ranks(ranks: int, count: int) -> None:
    """All of them are legal on exactly so many ranks."""
    layouts = layouts_for(ranks)
    assert len(layouts) == count == len({name for name, _ in layouts})
    for _, settings in layouts:
        recipe = read_recipe(RECIPE, settings)
        recipe.strategy.refuse(recipe, ranks, "cpu")
        assert recipe.strategy.config.layout(ranks).degrees.ranks == ranks
    names = [name for name, _ in layouts]
    assert (ranks < 4) or any("pipeline" in name for name in names)
    if ranks == 4:
        assert (
            "tensor 2 × pipeline 2" in names
            and "sharding 2 × tensor 2, sharding_stage 2, sequence_parallel" in names
        )


def test_the_last_line_counts_comparisons() -> None:
    rows = [
        ProofRow(step="machine", name="machine", sentence="2 ranks"),
        ProofRow(step="layouts", name="data 2", sentence="same", agrees=True),
        ProofRow(step="layouts", name="tensor 2", sentence="different", agrees=False, state="mend"),
    ]
    assert (
        summary(rows, Path("a.json"))
        == "1 of 2 comparisons agree; to mend: tensor 2. The results are in a.json."
    )


TINY = ("model.depth=1", "model.width=16")


def test_a_layout_is_verified_in_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verb(self: Bench, *words: str) -> ChildResult:
        monkeypatch.setenv("TMPDIR", str(self.folder))
        printed = run_command([words[0], str(RECIPE), *words[2:], *TINY], self.folder)
        return ChildResult(0, printed[printed.index("{\n") : printed.rindex("}\n") + 2], "", 1.0)

    monkeypatch.setattr(Bench, "verb", verb)
    monkeypatch.setattr(prove_steps, "layouts_for", lambda ranks: layouts_for(ranks)[:1])
    file = tmp_path / "proof.json"
    assert prove({"layouts": STEPS["layouts"]}, ranks=2, minutes=2, file=file) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["name"], row["state"], row["agrees"]) == ("data_parallel", "ok", True)
    assert row["values"]["largest_r"] < 8 and row["values"]["sensitivity"]["float64"] < 1e-10


@pytest.mark.long
@pytest.mark.processes
def test_the_whole_of_it_on_two_cpu_ranks(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "paddle_dp", "doctor", "--prove", "--ranks", "2", "--minutes", "20"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1300, cwd=tmp_path)
    content = json.loads((tmp_path / "paddle-dp-proof.json").read_text())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert content["ended"] == "done" and content["agree"] == content["compared"] == 17
    assert {row["step"] for row in content["rows"]} == set(STEPS)
    assert "proves nothing about GPUs" in content["rows"][0]["sentence"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["paddle-dp-proof.json"]
    assert str(Path.home()) not in json.dumps(content)
