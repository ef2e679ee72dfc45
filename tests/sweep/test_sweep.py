"""A sweep draws equal settings from equal seeds, trains no setting twice, ends losers, and goes on after a kill.

The trainings are played here: an executor writes the metrics that one would write. The last tests run real ones.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.errors import RecipeError, UsageError
from tests.house.programs import ROOT, run_python, until

pytest.importorskip("optuna")
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.processes import Signals
from paddle_dp.sweep import sweep as sweeps
from paddle_dp.sweep.request import SweepPlan, SweepRequest, open_folder, planned
from paddle_dp.sweep.results import chance, further, ranked
from paddle_dp.sweep.search import STUDY, SweepSearch, TrialRecord
from paddle_dp.sweep.sweep import Sweep
from paddle_dp.sweep.trial import Evaluations, resume_point

RECIPE = """
model: {use: mlp, inputs: 64, hidden: [16], classes: 10}
dataset: {use: digits}
loss: {use: cross_entropy}
optimizer: {use: adamw}
train: {length: 4 epochs, batch: 64}
callbacks:
  - {use: metrics}
  - {use: evaluate, every: 1 epoch}
  - {use: checkpoint, every: 1 epoch, best: acc1}
"""
RATE, DECAY = "schedule.learning_rate=loguniform(1e-4, 1e-1)", "optimizer.weight_decay=[0, 0.05]"
EPOCHS, STEPS = 4, 23


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweeps, "_POLL", 0.0)
    path = tmp_path / "digits.yaml"
    path.write_text(RECIPE)
    return path


def accuracy(arguments: Sequence[str], epoch: int) -> float:
    """The accuracy that a played training has after an epoch: the best rate is 0.01."""
    rate = next(float(a.partition("=")[2]) for a in arguments if a.startswith("schedule.learning_rate="))
    return round(0.9 - 0.1 * abs(math.log10(rate) + 2) + 0.02 * epoch, 6)


@dataclass
class PlayedTrial:
    """A training of four epochs that makes one each time it is reason for its end."""

    arguments: list[str]
    status: int = 0
    epoch: int = 0
    stopped: bool = False

    @property
    def run(self) -> Path:
        return Path(self.arguments[self.arguments.index("--output-dir") + 1])

    def begin(self) -> None:
        self.run.mkdir(exist_ok=True)
        lines = (self.run / "metrics.jsonl").read_text() if self.arguments[-1].startswith("--resume=") else ""
        self.epoch = lines.count('"evaluated"')
        self.write(lines or json.dumps({"event": "start", "step": 0, "total_steps": STEPS * EPOCHS}) + "\n")

    def write(self, text: str) -> None:
        """Replaces the file, as a resumed training does."""
        partial = self.run / "partial"
        partial.write_text(text)
        partial.rename(self.run / "metrics.jsonl")

    def poll(self) -> int | None:
        if self.status:
            return self.status
        if self.stopped:
            return 75
        if self.epoch == EPOCHS:
            return 0
        self.epoch += 1
        line = {"event": "evaluated", "step": STEPS * self.epoch, "samples": 1437 * self.epoch}
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | {"acc1": accuracy(self.arguments, self.epoch)}) + "\n")
        (self.run / f"checkpoints/step-{line['step']:08d}").mkdir(parents=True, exist_ok=True)
        return None

    def stop(self) -> None:
        self.stopped = True

    kill = stop


class KilledError(Exception):
    """The sweep's process is gone."""


@dataclass
class Player:
    """Plays trials. `status`: how a trial ends, by its number; `killed_at`: polls until the sweep is killed."""

    status: Callable[[int], int] = lambda number: 0
    killed_at: float = math.inf
    started: list[list[str]] = field(default_factory=list)

    def start(self, arguments: Sequence[str], slot: int, screen: Path) -> Any:
        self.started.append([*arguments])
        trial = PlayedTrial([*arguments], self.status(int(screen.stem.partition("-")[2])))
        trial.begin()
        player, poll = self, trial.poll

        def watched() -> int | None:
            player.killed_at -= 1
            if player.killed_at < 0:
                raise KilledError
            return poll()

        trial.poll = watched  # type: ignore[method-assign]
        return trial


def search_of(plan: SweepPlan) -> SweepSearch:
    request = plan.request
    return SweepSearch(
        plan.folder, plan.axes, smaller=plan.smaller, seed=request.seed, method=request.search, pruner=request.prune
    )  # fmt: skip


planned_once = cache(planned)  # it reads the recipe with each setting


def played(recipe: Path, *words: str, player: Player | None = None, **options: Any) -> list[TrialRecord]:
    """Runs a sweep, or goes on with it, and returns its trials."""
    folder = options.pop("folder", recipe.parent / "sweep")
    plan = planned_once(SweepRequest(recipe=recipe, texts=words or (RATE, DECAY), folder=folder, **options))
    folder.mkdir(exist_ok=True)
    search = search_of(plan)
    Sweep(plan, search, player or Player()).run(Signals())
    return search.records()


def outcome(records: Sequence[TrialRecord]) -> list[tuple[Any, ...]]:
    return [(r.number, r.settings, r.state, r.score, dict(r.curve)) for r in records]


def test_a_sweep_finds_the_best_and_ends_losers(recipe: Path) -> None:
    records = played(recipe, trials=12)
    assert [record.number for record in records] == [*range(12)]
    states = [record.state for record in records]
    assert set(states) == {"done", "pruned"} and states[:3] == ["done"] * 3
    best = max(records, key=lambda record: record.score or 0)
    assert best.state == "done" and abs(math.log10(float(best.settings[0])) + 2) < 0.5
    loser = records[states.index("pruned")]
    assert (
        list(loser.curve) == [1437 * (n + 1) for n in range(len(loser.curve))] and len(loser.curve) < EPOCHS
    )
    assert loser.score == max(loser.curve.values())
    assert {
        record.state for record in played(recipe, trials=12, prune="none", folder=recipe.parent / "all")
    } == {"done"}


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_a_killed_sweep_goes_on_as_if_nothing_had_happened(recipe: Path, search: str) -> None:
    """Killed four times: the same settings, scores and losers, and each kill costs one start, so no finished trial is
    trained twice."""
    undisturbed = played(recipe, trials=9, search=search)
    folder, runs = recipe.parent / "killed", list[list[str]]()
    for killed_at in (1, 7, 12, 4, math.inf):
        player = Player(killed_at=killed_at)
        try:
            records = played(recipe, trials=9, search=search, folder=folder, player=player)
        except KilledError:
            assert killed_at < math.inf
        runs += player.started
    assert outcome(records) == outcome(undisturbed)
    assert len(runs) == 9 + 4 and sum(words[-1].startswith("--resume=") for words in runs) >= 2
    assert played(recipe, trials=9, search=search, folder=folder, player=(idle := Player())) == records
    assert not idle.started


def test_other_seeds_draw_other_settings(recipe: Path) -> None:
    first, second = (
        [record.settings for record in played(recipe, trials=3, seed=seed, folder=recipe.parent / str(seed))]
        for seed in (0, 1)
    )
    assert first[0] != second[0] and len({*first}) == 3


def test_few_settings_are_each_trained_once(recipe: Path) -> None:
    words = ("schedule.learning_rate=[0.1, 0.01]", "optimizer.weight_decay=[0, 0.05]")
    records = played(recipe, *words, trials=20)
    assert [record.settings for record in records] == [*product(("0.1", "0.01"), ("0", "0.05"))]
    drawn = played(recipe, *words, "train.batch=int(32, 34)", trials=11, folder=recipe.parent / "drawn")
    assert len({record.settings for record in drawn}) == 11


def test_a_line_that_a_crash_has_cut_off_is_dropped(recipe: Path) -> None:
    records = played(recipe, trials=2)
    journal = recipe.parent / "sweep" / STUDY
    journal.write_bytes(journal.read_bytes()[:-5])
    again = played(recipe, trials=2)
    assert outcome(again) == outcome(records)


def test_two_jobs_run_at_once(recipe: Path) -> None:
    records = played(recipe, trials=6, jobs=2)
    assert len(records) == 6 and all(record.state in ("done", "pruned") for record in records)


def test_a_failed_trial_is_named_and_the_sweep_goes_on(recipe: Path) -> None:
    player = Player(status=lambda number: int(number == 1))
    records = played(recipe, trials=4, player=player)
    assert [record.state for record in records] == ["done", "failed", "done", "done"]
    assert records[1].score is None and records[1].facts["status"] == 1


@pytest.mark.parametrize(("status", "trials"), [(1, 3), (2, 1)])
def test_nothing_but_failures_ends_a_sweep(recipe: Path, status: int, trials: int) -> None:
    """A usage error would meet each trial; three failures and no success are enough, too."""
    assert len(played(recipe, trials=9, player=Player(status=lambda number: status))) == trials


def test_a_request_to_stop_leaves_trials_open(recipe: Path) -> None:
    plan = planned(SweepRequest(recipe=recipe, texts=(RATE,), folder=recipe.parent / "sweep", trials=4))
    plan.folder.mkdir()
    player, signals = Player(), Signals()
    search = search_of(plan)
    start = player.start

    def started(arguments: Sequence[str], slot: int, screen: Path) -> Any:
        if len(player.started) == 1:
            signals.record(signal.SIGTERM, None)
        return start(arguments, slot, screen)

    player.start = started  # type: ignore[method-assign]
    Sweep(plan, search, player).run(signals)
    assert [record.state for record in search.records()] == ["done", "open"]


def refused(recipe: Path, *words: str, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        planned(SweepRequest(recipe=recipe, texts=words, **options))
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optimzer.weight_decay=[0, 1]", "no setting 'optimzer'. Did you mean 'optimizer'?"),
        ("optimizer.weight_decay=uniform(-1, 1)", "-1.0 is less than 0.0"),
        ("train.batch=uniform(16.5, 64)", "train.batch=int(16, 64) draws whole numbers"),
        ("model.hidden=[16, 32]", "[[16, 32]] has one value, a list"),
        ("train.micro_batches=[1, 80]", "a batch of 64 cannot be cut into 80"),
        ("callbacks.checkpoint.best=[acc1, loss]", "it is --score NAME"),
        ("output_dir=[a, b]", "each trial has a folder"),
        ("strategy.tensor=[2, 4]", "strategy"),
    ],
)
def test_settings_that_the_recipe_refuses_are_refused_before_the_first_trial(
    recipe: Path, word: str, sentence: str
) -> None:
    assert sentence in refused(recipe, word)


def test_a_batch_per_rank_and_an_amount_of_memory_are_taken_as_train_takes_them(recipe: Path) -> None:
    plan = planned(
        SweepRequest(recipe=recipe, texts=(RATE, "train.batch=[8 per rank, 16 per rank]"), ranks=2)
    )
    trial = TrialRecord(number=0, settings=("0.1", "8 per rank"))
    assert "train.batch=8 per rank" in plan.arguments(trial)
    assert planned(SweepRequest(recipe=recipe, texts=(RATE, "train.micro_batches=auto 1 GB"), ranks=2))
    for more in ({"jobs": 2}, {"elsewhere": True}):
        assert "'auto 16 GB'" in refused(recipe, RATE, "train.micro_batches=auto", **more)
    assert "a batch of 6 cannot be cut into 7" in refused(
        recipe, RATE, "train.batch=3 per rank", "train.micro_batches=7", ranks=2
    )


def test_checkpoints_in_memory_are_refused_for_no_trial_restarts(recipe: Path) -> None:
    recipe.write_text(RECIPE + "  - {use: memory_checkpoint}\n")
    assert refused(recipe, RATE).endswith("Leave it out: the trials of a sweep do not restart.")


def test_trials_on_other_machines_need_no_device_of_this_one(recipe: Path) -> None:
    """A sweep on a Ray cluster was refused where its first machine has fewer GPUs than a trial."""
    words = (RATE, "train.device=npu")
    assert "train.device is npu, but the installed paddle" in refused(recipe, *words)
    plan = planned(SweepRequest(recipe=recipe, texts=words, elsewhere=True))
    assert plan.device == "npu" and not plan.devices


FOUR = Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("strategy", "ranks", "devices"),
    [
        ("{use: data_parallel}", 2, (("0", "1"), ("2", "3"))),
        ("{use: parameter_server}", 2, (("0",), ("1",))),  # a server takes no card
        ("{use: parameter_server, servers: 2}", 4, (("0", "1"), ("2", "3"))),
        ("{use: replicas}", 1, (("0", "1"), ("2", "3"))),  # one rank on two cards
    ],
)
def test_a_trial_gets_the_cards_that_its_strategy_takes(
    recipe: Path, strategy: str, ranks: int, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind: FOUR))
    words = (RATE, f"strategy={strategy}")
    plan = planned(SweepRequest(recipe=recipe, texts=words, ranks=ranks, jobs=2))
    assert (plan.devices, plan.accelerators) == (devices, len(devices[0]))
    assert "--jobs 5 × " in refused(recipe, *words, ranks=ranks, jobs=5)


def test_trials_that_take_different_numbers_of_cards_are_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind: FOUR))
    words = "strategy.use=[data_parallel, parameter_server]"
    assert "take different numbers of GPUs (1, 2)" in refused(recipe, words, ranks=2)


def test_a_combination_of_settings_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="a batch of 4 cannot be cut into 8"):
        planned(SweepRequest(recipe=recipe, texts=("train.batch=[4, 16]", "train.micro_batches=[1, 8]")))


def test_a_sweep_needs_a_score_and_callbacks(recipe: Path) -> None:
    bare = RECIPE.replace(", best: acc1", "")
    recipe.write_text(bare)
    assert "--score acc1" in refused(recipe, RATE)
    plan = planned(SweepRequest(recipe=recipe, texts=(RATE,), score="loss"))
    assert plan.smaller and plan.settings == ('callbacks.checkpoint.best="loss"',)
    recipe.write_text(bare.replace("  - {use: metrics}\n", ""))
    assert "needs the callback metrics" in refused(recipe, RATE, score="loss")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 0}, "--trials 0: give 1 or more"),
        ({"search": "grid"}, "--search grid"),
        ({"prune": "medain"}, "Did you mean 'median'?"),
    ],
)
def test_options_are_checked(recipe: Path, options: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(recipe, RATE, **options)


def test_a_folder_keeps_to_its_sweep(recipe: Path) -> None:
    folder = recipe.parent / "sweep"

    def opened(word: str = RATE, **options: Any) -> None:
        open_folder(planned(SweepRequest(recipe=recipe, texts=(word,), folder=folder, **options)))

    with pytest.raises(UsageError, match="holds no sweep to resume"):
        opened(resume=True)
    opened()
    with pytest.raises(UsageError, match="with --resume goes on"):
        opened()
    opened(resume=True, trials=40)
    with pytest.raises(UsageError, match=r"seed was 0 and is 1"):
        opened(resume=True, seed=1)
    recipe.write_text(RECIPE.replace("4 epochs", "5 epochs"))
    with pytest.raises(UsageError, match="digest of the recipe was"):
        opened(resume=True)


def test_evaluations_are_read_as_they_are_written_and_not_those_that_will_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{"event": "evaluated", "step": %d, "samples": %d, "acc1": %s}\n'
    path.write_text(line % (1, 10, "0.5") + line % (2, 20, "NaN"))
    evaluations = Evaluations(tmp_path, "acc1")
    evaluations.read(is_over=False)
    assert evaluations.points == []
    (tmp_path / "new").write_text(
        '{"event": "start", "step": 1, "total_steps": 8}\n' + line % (1, 10, "0.25")
    )
    (tmp_path / "new").rename(path)
    evaluations.read(is_over=False)
    with path.open("a") as file:
        file.write(line % (3, 30, "0.75") + '{"event": "evaluated", "st')
    evaluations.read(is_over=True)
    assert evaluations.points == [(10, 1, 0.25), (30, 3, 0.75)] and evaluations.total_steps == 8


@pytest.mark.parametrize(
    ("steps", "events", "point"),
    [
        ([], [("evaluated", 23)], None),
        ([23, 46], [("evaluated", 23), ("step", 40), ("saved", 46)], "23"),
        ([23, 46], [("evaluated", 23), ("saved", 46), ("evaluated", 46)], "46"),
        ([23], [("step", 20), ("saved", 23)], None),
        ([23], [("step", 30)], "23"),
        ([23, 30], [("evaluated", 23), ("step", 30), ("saved", 30), ("failed StoppedError", 30)], "30"),
        ([30], [("step", 30), ("saved", 30), ("failed ValueError", 30)], None),
    ],
)
def test_a_checkpoint_whose_evaluation_was_not_written_is_none_to_go_on_from(
    tmp_path: Path, steps: list[int], events: list[tuple[str, int]], point: str | None
) -> None:
    for step in steps:
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    lines = [
        json.dumps({"event": event, "step": step, "kind": "".join(kind)})
        for (event, *kind), step in ((words.split(), step) for words, step in events)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "eva']))
    assert resume_point(tmp_path) == point


def scored(*scores: float | None) -> list[TrialRecord]:
    return [TrialRecord(number=n, settings=("1",), state="done", score=s) for n, s in enumerate(scores)]


def test_the_best_is_the_first_of_equal_ones(recipe: Path) -> None:
    plan = planned(SweepRequest(recipe=recipe, texts=(RATE,)))
    assert [record.number for record in ranked(plan, scored(0.5, 0.7, None, 0.7))] == [1, 3, 0]


def test_the_last_line_trains_on_as_many_ranks(recipe: Path) -> None:
    """It left them out, so that all visible GPUs trained, and the shell took a folder's name for several words."""
    plan = planned(SweepRequest(recipe=recipe, texts=(RATE,), ranks=2))
    best = SimpleNamespace(folder=Path("a sweep"), recipe={"train": {"length": "1 epoch"}}, ending=("done",))
    words = ["paddle-dp", "train", "a sweep/recipe.yaml", "--ranks", "2", "--resume"]
    assert shlex.split(further(plan, best)) == [*words, "train.length=2 epochs", "--accept", "train.length"]  # type: ignore[arg-type]
    best.ending = ("stopped",)
    assert shlex.split(further(plan, best)) == words  # type: ignore[arg-type]


def test_chance_is_named(recipe: Path) -> None:
    class Record:
        def bounds(self, name: str, share: float) -> tuple[float, float]:
            return 0.6, 0.8

    plan = planned(SweepRequest(recipe=recipe, texts=(RATE,)))
    records = scored(0.7, 0.65, 0.5)
    assert "trial 1 may be as good" in chance(plan, records, Record())  # type: ignore[arg-type]
    assert chance(plan, [records[0], records[2]], Record()) == ""  # type: ignore[arg-type]


WORDS = (RATE, DECAY, "--trials", "4", "--out")
COMMAND = ("-m", "paddle_dp", "sweep")


def trainings(folder: Path) -> list[str]:
    """Processes whose command line names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if str(folder) in words and int(process.name) != os.getpid():
            found.append(words)
    return found


@pytest.mark.long
def test_a_real_sweep_is_killed_and_goes_on(recipe: Path) -> None:
    whole, killed = recipe.parent / "whole", recipe.parent / "killed"
    run_python(*COMMAND, recipe, *WORDS, whole, timeout=250)
    process = subprocess.Popen([sys.executable, *COMMAND, recipe, *WORDS, killed], cwd=ROOT)
    until(lambda: any((killed / "trial-001/checkpoints").glob("step-*")), 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not trainings(killed), 20)
    shown = run_python(*COMMAND, recipe, *WORDS, killed, "--resume", timeout=250)
    assert "trial 1 goes on from its checkpoint" in shown.stderr
    plan = planned(SweepRequest(recipe=recipe, texts=(RATE, DECAY), trials=4))
    first, second = (
        outcome(SweepSearch(f, plan.axes, smaller=False, seed=0, method="tpe", pruner="median").records())
        for f in (whole, killed)
    )
    assert first == second
    for name in ("sweep.png", "compare.html", "trial-003/report.html"):
        assert (killed / name).is_file()
    assert not (killed / "trial-000.1").exists()


@pytest.mark.long
def test_ctrl_c_ends_a_real_sweep_in_good_order(recipe: Path) -> None:
    folder = recipe.parent / "stopped"
    recipe.write_text(RECIPE.replace("4 epochs", "4000 epochs"))
    words = [sys.executable, *COMMAND, recipe, *WORDS, folder, "--jobs", "2"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for number in (0, 1):
        until(lambda n=number: any((folder / f"trial-00{n}/checkpoints").glob("step-*")), 120)  # type: ignore[misc]
    process.send_signal(signal.SIGINT)
    _, screen = process.communicate(timeout=100)
    assert process.returncode == 75 and "--resume goes on with it" in screen, screen
    assert not trainings(folder)
