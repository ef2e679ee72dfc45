"""A job that starts again by itself: real ranks, real ends. The rule is tested in tests/launch/test_restarts.py."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from pathlib import Path

import pytest

from paddle_dp.certificate.certificate import read
from paddle_dp.proof.certified import folder_checks
from tests.house.programs import run_python
from tests.house.recipes import small_recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
RECIPE = "tests/faults/faulty.yaml"  # a checkpoint after every fourth of 16 steps
AGAIN = r"starts again from {} in \d+ s \(restart {} of {}; the count starts over after each new checkpoint\)"


def again(where: str, number: int, restarts: int) -> str:
    return AGAIN.format(where, number, restarts)


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        ("raise", 1, r"rank 1 of 2 on \S+: ValueError: the culprit's own words"),
        ("leave_0", 1, r"rank 1 of 2 on \S+: left with exit status 0 while the job was running"),
        ("exit_0", 1, r"rank 1 of 2 on \S+: JobError: sys.exit\(0\) at \S+parts.py"),
        ("abort", 134, r"rank 1 of 2 on \S+: ended by SIGABRT"),
        (
            "stand_still",
            124,
            r"no rank has made progress for 3 s .*: rank 1 has been in forward of step 7 for 3 s",
        ),
    ],
)
def test_a_failure_that_repeats_is_given_up_at_the_third_time(start, found, deed, status, words):
    job = start("train", recipe=RECIPE, restarts=9, env={"FAULT": f"forward 1 6 {deed}"})
    ended, _, complained = job.finish(timeout=230)
    causes = re.findall(rf"^attempt-00[12] failed: {words}", complained, re.MULTILINE)
    gave_up = "the same failure three times after step 6, with no new checkpoint in between." in complained
    fault = f"--restarts 9, rank 1 of 2: {deed} in three attempts"
    found(fault, job.seconds_from_fault(), gave_up, phase="forward", job=job)
    assert ended == status and len(causes) == 2 and gave_up and not job.left(), complained
    for number in (1, 2):
        assert re.search(again("step 4", number, 9), complained), complained
    assert [path.name for path in sorted(job.out.glob("logs/*"))] == [f"attempt-00{n}" for n in (1, 2, 3)]
    assert re.search(
        r"^go on from step 4: paddle-dp train .* --restarts 9 --resume$", complained, re.MULTILINE
    )


def test_the_only_rank_starts_again_until_the_budget_is_spent(start, found):
    """It has a process of its own, which paddle-dp outlives; a kill from outside may repeat."""
    job = start("train", recipe=RECIPE, ranks=1, restarts=3, env={"FAULT": "forward 0 6 kill"})
    ended, _, complained = job.finish(timeout=230)
    named = re.findall(r"rank 0 of 1 on \S+ failed: ended by SIGKILL", complained)
    found(
        "--restarts 3, the only rank: kill in four attempts",
        job.seconds_from_fault(),
        bool(named),
        phase="forward",
        job=job,
    )
    assert ended == 137 and named and not job.left(), complained
    assert "not started again: 3 restarts were spent without a new checkpoint." in complained
    assert complained.count("starts again from step 4 in") == 3


def test_an_interrupt_during_the_wait_ends_it_at_once(start, found):
    job = start("train", recipe=RECIPE, restarts=9, env={"FAULT": "import 1 0 leave_3"})
    second = job.out / "logs" / "attempt-002" / "workerlog.1"
    # Until no process but paddle-dp is left of the second attempt.
    while not second.exists() or len(job.left()) > 1:
        assert job.process.poll() is None, job.process.communicate()
        time.sleep(0.05)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    status, _, complained = job.finish(timeout=20)
    named = "ended by SIGINT: no process is left." in complained
    seconds = time.monotonic() - begun
    found("--restarts: Ctrl-C before the third attempt", seconds, named, phase="start", job=job)
    assert status == 130 and named and not job.left(), complained
    assert re.search(again("the beginning", 2, 9), complained) and seconds < 2, complained
    assert len(list(job.out.glob("logs/attempt-*"))) == 2


def test_a_mistake_and_a_request_to_stop_are_not_repeated(start):
    endless = ["train.length=100000 steps", "callbacks=[{use: checkpoint, every: null}]"]
    job = start("train", recipe=RECIPE, restarts=3, overrides=endless)
    mistaken = start("refuse", restarts=3)
    job.training_pids(2)
    job.process.send_signal(signal.SIGTERM)
    for each, status in ((job, 75), (mistaken, 2)):
        ended, _, complained = each.finish(timeout=60)
        assert ended == status and "again" not in complained, complained
        assert [path.name for path in each.out.glob("logs/*")] == ["attempt-001"]


def write(recipe: Path, folder: Path, step: int = 1) -> Path:
    """Writes a recipe with a run in `folder`, of which a rank is killed once, in `step`."""
    killer = f"{{use: tests.faults.killer.KillsRank1Once, step: {step}, note: {folder}.note}}"
    recipe.write_text(small_recipe(
        "length: 12 steps, batch: 32, seed: 0", model="mlp, inputs: 64, hidden: [8], classes: 10",
        strategy="data_parallel", output_dir=str(folder),
        callbacks=f"[{{use: checkpoint, every: 4 steps}}, {killer}]",
    ))  # fmt: skip
    return recipe


def trained(folder: Path, *options: str, step: int = 6, line: str = "") -> dict[str, str]:
    recipe = write(folder.with_suffix(".yaml"), folder, step)
    done = run_python("-m", "paddle_dp", "train", recipe, "--ranks", "2", *options)
    assert line in done.stderr, done.stderr
    (last,) = folder.glob("checkpoints/*12")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in last.glob("*.safetensors")}


def test_spares_take_the_ranks_places_and_learn_the_same(tmp_path: Path) -> None:
    """The second attempt's ranks are forks, so that Paddle's launcher writes nothing; none is left."""
    undisturbed = trained(tmp_path / "once", step=99)
    assert trained(tmp_path / "again", "--restarts", "2", "--spares") == undisturbed
    logs = tmp_path / "again" / "logs"
    assert (logs / "attempt-001" / "launcher.log").stat().st_size
    assert not (logs / "attempt-002" / "launcher.log").stat().st_size
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if names(pid, "waiting_rank", str(tmp_path))]


IN_MEMORY = [
    "callbacks.checkpoint.every=12 steps",
    "callbacks.2.use=memory_checkpoint",
    "callbacks.2.every=5 steps",
]


def test_a_restart_from_memory_learns_the_same_and_the_certificate_knows_it(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "once", step=99)
    options = ["--restarts", "2", "--spares", *IN_MEMORY]
    line = "starts again from step 5 in memory in 0 s"
    assert trained(tmp_path / "again", *options, line=line) == undisturbed
    assert not list(Path("/dev/shm").glob("paddle-dp-memory-*"))
    checks = [*folder_checks(read(tmp_path / "again"), tmp_path / "again")]
    assert all(good for good, _ in checks), checks
    assert any("went on with the same weights" in line for _, line in checks), checks


def test_without_restarts_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.yaml", tmp_path / "run")
    done = run_python("-m", "paddle_dp", "train", recipe, "--ranks", "2", *IN_MEMORY, status=2)
    assert "callbacks.memory_checkpoint: it serves the restarts of a job" in done.stderr
    assert not (tmp_path / "run").exists()


def names(process: Path, *words: str) -> bool:
    try:
        text = (process / "cmdline").read_text() + (process / "environ").read_text(errors="replace")
    except OSError:
        return False
    return all(word in text for word in words)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--spares"], "--spares needs --restarts"),
     (["--restarts", "1", "--spares", "strategy={use: parameter_server, servers: 1}"], "servers and workers")],
)  # fmt: skip
def test_spares_are_refused_where_they_could_not_help(tmp_path: Path, options: list[str], words: str) -> None:
    recipe = write(tmp_path / "recipe.yaml", tmp_path / "run")
    done = run_python("-m", "paddle_dp", "train", recipe, "--ranks", "2", *options, status=2)
    assert words in done.stderr
