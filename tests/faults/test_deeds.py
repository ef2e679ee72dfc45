"""Whatever is done to a training in its middle: it ends as docs/reliability.md says, and nothing is lost.

`pytest -m long tests/faults/test_deeds*.py` does each deed once, at a step drawn from the tenth on, in the layout or
strategy of its row; `DEEDS_SEED=7 pytest …` draws other steps and victims. After each: the exit status, the cause on
the screen, no process, no file in /dev/shm or TMPDIR, no half checkpoint or line; and once the training has come to its
end, by restarts or by a resume, each update recorded once, and the bits of the undisturbed run (or its samples, where
bits depend on time: tests/faults/deeds.py, `Layout.promise`).
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from paddle_dp.checkpoint import checkpoints
from tests.eventually import eventually
from tests.faults import deeds
from tests.faults.conftest import Started
from tests.faults.deed_lane import Lane, LaneJob
from tests.faults.deeds import LAYOUTS, PERIOD, Draw, Layout, Record, Training
from tests.faults.lost import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]
WHO = r"(?:\w+ \d+ \(rank {rank}\)|rank {rank})"
RESTARTS = {"restarts": 4}


@dataclass
class Scene:
    """A row at work: what was drawn, and who was hit (for patterns of causes)."""

    layout: Layout
    draw: Draw
    training: Training
    job: Started | LaneJob
    folder: Path  # for orders and the small disk
    victim: int = 0
    done: int = 0  # the updates when the deed was done

    def reach(self, more: int = 0) -> None:
        self.done = self.training.reach(self.draw.step + more, self.layout.ranks)

    def hit_rank(self, number: int = signal.SIGKILL, first: int = 0) -> None:
        self.victim = self.draw.rank(self.layout.ranks, first)
        deeds.kill(self.training.ranks[self.victim], number)


def kill_rank(scene: Scene) -> None:
    scene.hit_rank()


def kill_worker_of_server(scene: Scene) -> None:
    scene.hit_rank(first=scene.layout.servers)


def kill_server(scene: Scene) -> None:
    scene.victim = scene.draw.random.randrange(scene.layout.servers)
    deeds.kill(scene.training.ranks[scene.victim])


def kill_two_ranks(scene: Scene) -> None:
    """Another one, or the same, in the attempt that follows."""
    scene.hit_rank()
    victim = scene.victim
    eventually(lambda: len(list(scene.job.out.glob("logs/attempt-*"))) > 1, 60)
    scene.training.ranks = {}
    scene.training.reach(scene.done + scene.draw.random.randint(1, 60), scene.layout.ranks)
    scene.hit_rank()
    scene.victim = victim


def kill_launcher(scene: Scene) -> None:
    deeds.kill(psutil.Process(scene.training.ranks[0]).ppid())


def kill_data_worker(scene: Scene) -> None:
    having = [rank for rank in scene.training.ranks if scene.training.workers(rank)]
    scene.victim = scene.draw.random.choice(having)
    deeds.kill(scene.training.workers(scene.victim)[0])


def stop_data_worker(scene: Scene) -> None:
    having = [rank for rank in scene.training.ranks if scene.training.workers(rank)]
    scene.victim = scene.draw.random.choice(having)
    deeds.kill(scene.training.workers(scene.victim)[0], signal.SIGSTOP)


def stop_rank(scene: Scene) -> None:
    scene.hit_rank(signal.SIGSTOP)


def stop_rank_for_a_while(scene: Scene) -> None:
    scene.hit_rank(signal.SIGSTOP)
    time.sleep(1.5)
    deeds.kill(scene.training.ranks[scene.victim], signal.SIGCONT)


def stop_supervisor_for_a_while(scene: Scene) -> None:
    deeds.kill(scene.job.process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    deeds.kill(scene.job.process.pid, signal.SIGCONT)


def signal_supervisor(number: int) -> Callable[[Scene], None]:
    return lambda scene: deeds.kill(scene.job.process.pid, number)


def signal_rank(number: int) -> Callable[[Scene], None]:
    return lambda scene: scene.hit_rank(number)


def fill_disk(scene: Scene) -> Path:
    """Leaves room for half a checkpoint, so that the next one breaks off within."""
    period = PERIOD[scene.layout.recipe]
    if scene.done < period + 5:
        scene.done = scene.training.reach(period + 5, scene.layout.ranks)
    eventually(lambda: checkpoints(scene.job.out / "checkpoints"), 30)
    newest = checkpoints(scene.job.out / "checkpoints")[-1]
    size = sum(file.stat().st_size for file in newest.iterdir())
    return deeds.fill(scene.job.out.parent, size // 2)


def full_disk(scene: Scene) -> None:
    filler = fill_disk(scene)
    scene.training.reach(scene.done + 2 * PERIOD[scene.layout.recipe] + 5, scene.layout.ranks)
    filler.unlink()


def full_disk_and_kill(scene: Scene) -> None:
    filler = fill_disk(scene)
    scene.training.reach(scene.done + PERIOD[scene.layout.recipe] + 5, scene.layout.ranks)
    scene.hit_rank()
    time.sleep(4.0)
    filler.unlink()


def eat_memory(scene: Scene) -> None:
    scene.victim = scene.draw.rank(scene.layout.ranks)
    _order(scene, f"eat.rank-{scene.victim}")


def eat_memory_of_worker(scene: Scene) -> None:
    _order(scene, "eat.worker")


def _order(scene: Scene, name: str) -> None:
    with deeds.control_group(200) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        partial = scene.folder / "order"
        partial.write_text(str(group))
        partial.rename(scene.folder / "orders" / name)
        begun = time.monotonic()
        while not (obeyed := [*(scene.folder / "orders").glob("*.obeyed-*")]):
            assert time.monotonic() < begun + 20, "nobody has obeyed the order"
            time.sleep(0.02)
        pid = int(obeyed[0].suffix.rpartition("-")[2])
        eventually(lambda: not deeds.alive(pid), 30)


@dataclass(frozen=True, kw_only=True)
class Deed:
    """`do` it; the job ends with `status`, and its screen has the pattern `cause`, where {who}, {rank} and {ranks} are
    filled in; "": the screen is to have nothing. `resumes`: it is started again, by forks."""

    do: Callable[[Scene], Any]
    status: int = 0
    cause: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    resumes: bool = False
    launched: bool = False  # by Paddle's launcher, not by processes that wait
    disk: str = ""  # size of the disk for the run's folder
    until: float = 0.8  # of all steps


AGAIN = r"attempt-001 failed: {who} of {ranks} on \S+: "
DEEDS = {
    "kill -9 of a rank": Deed(do=kill_rank, cause=AGAIN + "ended by SIGKILL", job=RESTARTS),
    "kill -9 of a worker": Deed(
        do=kill_worker_of_server, cause=r"{who} is lost: ended by SIGKILL in(.|\n)*done without .*{rank}\)",
        job=RESTARTS,
    ),
    "kill -9 of a server": Deed(do=kill_server, cause=AGAIN + "ended by SIGKILL", job=RESTARTS),
    "kill -9 of a rank, without --restarts": Deed(
        do=kill_rank, status=137, cause=r"{who} of {ranks} on \S+ failed first: ended by SIGKILL in", resumes=True
    ),
    "kill -9 of a rank, twice": Deed(
        do=kill_two_ranks, cause=AGAIN + r"ended by SIGKILL(.|\n)*attempt-002 failed: .*ended by SIGKILL",
        job=RESTARTS, until=0.6,
    ),
    "kill -9 of paddle-dp": Deed(
        do=signal_supervisor(signal.SIGKILL), status=-9, resumes=True, launched=True
    ),
    "kill -9 of Paddle's launcher": Deed(
        do=kill_launcher, cause=r"attempt-001 failed: Paddle's launcher \(process \d+\) was ended by SIGKILL",
        job=RESTARTS, launched=True,
    ),
    "kill -9 of a data worker": Deed(
        do=kill_data_worker, cause=AGAIN + r"DataError: data worker 0 .*was killed", job=RESTARTS
    ),
    "SIGSTOP of a rank": Deed(
        do=stop_rank, status=124, cause=r"{who} is stopped \(by SIGSTOP", resumes=True, overrides=deeds.PATIENCE
    ),
    "SIGSTOP of a rank, with --restarts": Deed(
        do=stop_rank, cause=r"attempt-001 failed: .*{who} is stopped \(by SIGSTOP", job=RESTARTS,
        overrides=deeds.PATIENCE,
    ),
    "SIGSTOP of a rank for 1.5 s": Deed(do=stop_rank_for_a_while, overrides=deeds.PATIENCE),
    "SIGSTOP of paddle-dp, for 2 s": Deed(do=stop_supervisor_for_a_while, overrides=deeds.PATIENCE),
    "SIGSTOP of a data worker": Deed(
        do=stop_data_worker, cause=AGAIN + r"DataError: .*sample", job=RESTARTS,
        overrides=(*deeds.PATIENCE, "loader.timeout=2 s"),
    ),
    "SIGTERM to paddle-dp": Deed(
        do=signal_supervisor(signal.SIGTERM), status=75, cause="stopped by SIGTERM after step", resumes=True
    ),
    "SIGUSR1 to a rank": Deed(
        do=signal_rank(signal.SIGUSR1), status=75, cause="stopped by SIGUSR1 after step", resumes=True
    ),
    "a disk that is full in mid-checkpoint": Deed(
        do=full_disk, cause="was not saved: No space left on device", disk="8m", until=0.6
    ),
    "a full disk, and kill -9 of a rank meanwhile": Deed(
        do=full_disk_and_kill, cause=AGAIN + "ended by SIGKILL", disk="8m", until=0.5, job=RESTARTS
    ),
    "out of memory of a control group": Deed(
        do=eat_memory, cause=AGAIN + "ended by SIGKILL in .* by the kernel: memory ran out", job=RESTARTS
    ),
    "out of memory of a data worker": Deed(
        do=eat_memory_of_worker, job=RESTARTS,
        cause=r"attempt-001 failed: rank \d of {ranks} on \S+: DataError: data worker 0 .*memory",
    ),
}  # fmt: skip
ALONE = ("single", "replicas")
SERVED = ("parameter_server", "parameter_server async")
NOT_KILLED = ("parameter_server async", "data, 300 slow steps")  # of rows that follow
ROWS = [
    *(("kill -9 of a rank", layout) for layout in LAYOUTS if layout not in NOT_KILLED),
    ("kill -9 of a worker", "parameter_server async"),
    ("kill -9 of a server", "parameter_server async"),
    ("kill -9 of a rank, without --restarts", "sharding 3"),
    ("kill -9 of a rank, without --restarts", "background"),
    ("kill -9 of a rank, without --restarts", "parameter_server"),
    ("kill -9 of a rank, twice", "data, 1000 steps"),
    ("kill -9 of a rank, twice", "local_sgd"),
    ("kill -9 of a rank, twice", "data 2 tensor 2"),
    ("kill -9 of paddle-dp", "data"),
    ("kill -9 of paddle-dp", "sharding 2"),
    ("kill -9 of paddle-dp", "tensor 2 pipeline 2"),
    ("kill -9 of paddle-dp", "diloco"),
    ("kill -9 of paddle-dp", "parameter_server"),
    ("kill -9 of Paddle's launcher", "sequence"),
    ("kill -9 of Paddle's launcher", "power_sgd"),
    ("kill -9 of a data worker", "bfloat16"),
    ("kill -9 of a data worker", "scatter"),
    ("kill -9 of a data worker", "async_average"),
    ("SIGSTOP of a rank", "pipeline"),
    ("SIGSTOP of a rank", "data 2 tensor 2"),
    ("SIGSTOP of a rank", "parameter_server"),
    ("SIGSTOP of a rank, with --restarts", "sharding 1"),
    ("SIGSTOP of a rank, with --restarts", "local_sgd"),
    ("SIGSTOP of a rank for 1.5 s", "tensor"),
    ("SIGSTOP of a rank for 1.5 s", "async_average"),
    ("SIGSTOP of paddle-dp, for 2 s", "data"),
    ("SIGSTOP of a data worker", "data"),
    ("SIGTERM to paddle-dp", "sharding 3"),
    ("SIGTERM to paddle-dp", "local_sgd"),
    ("SIGTERM to paddle-dp", "single"),
    ("SIGTERM to paddle-dp", "parameter_server async"),
    ("SIGUSR1 to a rank", "pipeline 2 sharding 2"),
    ("SIGUSR1 to a rank", "power_sgd"),
    ("SIGUSR1 to a rank", "branches"),
    ("a disk that is full in mid-checkpoint", "data"),
    ("a disk that is full in mid-checkpoint", "background"),
    ("a disk that is full in mid-checkpoint", "sharding 2"),
    ("a disk that is full in mid-checkpoint", "parameter_server"),
    ("a full disk, and kill -9 of a rank meanwhile", "data"),
    ("a full disk, and kill -9 of a rank meanwhile", "pipeline"),
    ("out of memory of a control group", "data"),
    ("out of memory of a control group", "sharding 3"),
    ("out of memory of a data worker", "data"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "orders").mkdir()
    return tmp_path


@pytest.mark.parametrize(("deed", "layout"), deeds.grouped(ROWS))
def test_deed(
    start: Any, lane: Lane, folder: Path, undisturbed: Any, noted: Any, capsys: Any, deed: str, layout: str
) -> None:
    made, way = DEEDS[deed], LAYOUTS[layout]
    draw = Draw(f"{deed}, {layout}", way.length, made.until)
    with ExitStack() as stack:
        words = {"restarts": 4} if way.ranks == 1 else {}
        words |= made.job
        if made.disk:
            if not stack.enter_context(deeds.small_disk(folder / "disk", made.disk)):
                pytest.skip("needs the right to mount a file system")
            words["output_dir"] = str(folder / "disk" / "run")
        words = {
            "recipe": str(way.path), "ranks": way.ranks, "overrides": [*way.overrides, *made.overrides],
            "output_dir": str(folder / "run"), **words,
        }  # fmt: skip
        env = {"PADDLE_DP_DEED_ORDERS": str(folder / "orders")}
        if made.launched:
            job = start("train", env={**env, "TMPDIR": str(lane.temporary)}, **words)
        else:
            job = lane.start(folder, words, env)
        training = Training(job.process.pid, lambda: str(job.screen() if isinstance(job, LaneJob) else ""))
        scene = Scene(way, draw, training, job, folder)
        scene.reach()
        made.do(scene)
        status, said, complained = job.finish(timeout=120)
        screen = said + complained
        if made.disk:  # the log's disk was full, too
            screen += "".join(log.read_text(errors="replace") for log in job.out.glob("logs/*/workerlog.0"))
        with capsys.disabled():
            print(
                f"\n{deed}, {layout}: after step {scene.done} (drawn: {draw.step}, seed {deeds.SEED}): {status}"
            )
        assert status == made.status, screen
        numbers = {"rank": scene.victim, "ranks": way.ranks}
        pattern = re.sub(r"\{(who|rank|ranks)\}", lambda match: _word(match[1], numbers), made.cause)
        assert re.search(pattern, screen) if pattern else status or not complained, (pattern, screen)
        assert job.gone_within(10.0)
        if made.resumes:
            for path in (lane.temporary).iterdir():  # of forks, that of this process counts
                assert made.status == -9, f"left in TMPDIR: {path.name}"
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            train(way.path, (*way.overrides, *made.overrides), way.ranks, str(job.out), "newest")
        shared = deeds.in_shared_memory([*training.pids])
        left = deeds.left_behind(job.out, lane.temporary, shared)
        faults = deeds.apart(Record.of(job.out), undisturbed(way), way.promise, way.length)
    assert not left and not faults, (left, faults, screen)
    noted(deed, layout, scene.done, status, way.promise)


def _word(name: str, words: dict[str, int]) -> str:
    return WHO.format(**words) if name == "who" else str(words[name])
