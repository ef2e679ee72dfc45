"""Real supervisors with real ranks, and a check after each test that none of their processes is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from paddle_dp.launch.command import Job
from paddle_dp.launch.processes import alive, descendants, kill_all, marked, variable
from paddle_dp.mesh.heartbeat import VARIABLE, read
from tests.eventually import eventually
from tests.faults import deeds
from tests.faults.deed_lane import Lane
from tests.faults.lost import lost, train
from tests.faults.namespaces import two_spaces
from tests.faults.table import Row, lines_of, rows_of, write
from tests.house.forked_jobs import ForkedSupervisor

ROOT = Path(__file__).resolve().parent.parent.parent
Forks = Literal["", "supervisor", "all"]
MARK = "PADDLE_DP_TEST"  # reaches every process of a test's job


@dataclass
class Started:
    """A supervisor, its run folder, and what its ranks leave behind."""

    process: subprocess.Popen[str] | ForkedSupervisor
    out: Path
    pids: Path
    mark: str
    job: Job

    def rank_pids(self, ranks: int, timeout: float = 60) -> list[int]:
        """The ranks' pids, once all of them are, or were, at work."""
        end = time.monotonic() + timeout
        names = [self.pids / str(rank) for rank in range(ranks)]
        while True:
            ended = (
                self.process.poll() is not None
            )  # asked first: they may have been at work, and the job is over
            if all(name.exists() for name in names):
                break
            assert not ended, self.process.communicate()
            assert time.monotonic() < end, "the ranks did not come"
            time.sleep(0.02)
        return [int(name.read_text()) for name in names]

    def training_pids(self, ranks: int, steps: int = 20, timeout: float = 60) -> list[int]:
        """The ranks' pids, once each of them has done so many steps of a training: read where its supervisor reads."""
        end = time.monotonic() + timeout
        while True:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "the ranks did not come so far"
            pids = {variable(pid, "PADDLE_TRAINER_ID"): pid for pid in self.left() if is_rank(pid)}
            if len(pids) == ranks:
                board = Path(str(variable(pids["0"], VARIABLE))).read_bytes()
                beats = [read(board, rank) for rank in range(ranks)]
                if all(beat and beat.step >= steps for beat in beats):
                    return [pids[str(rank)] for rank in range(ranks)]
            time.sleep(0.05)

    def finish(self, timeout: float = 60) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        said, complained = self.process.communicate(timeout=timeout)
        return self.process.returncode, said, complained

    def seconds_from_fault(self, said: str = "") -> float:
        """How long ago the first rank did what it was told to do wrong: it says so in its log, or to the screen."""
        logs = [said, *(log.read_text(errors="replace") for log in self.out.glob("logs/*/workerlog.*"))]
        return time.time() - min(
            float(word) for log in logs for word in re.findall(r"the fault is at (\S+)", log)
        )

    def left(self) -> list[int]:
        """The processes of this job that still run."""
        return self.process.left() if isinstance(self.process, ForkedSupervisor) else marked(MARK, self.mark)

    def gone_within(self, seconds: float) -> bool:
        eventually(lambda: not self.left(), seconds)
        return True


def is_rank(pid: int) -> bool:
    """Whether a process is a rank itself: its data workers have the same command, and another parent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        above = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False
    return (
        any(word.endswith(b"launch/recipe_rank.py") for word in words)
        and b"paddle.distributed.launch" in above
    )


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    yield from noting_orphans(tmp_path, request, "")


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    """`start` with a fork as the supervisor: it starts Paddle's launcher, and that one the ranks."""
    yield from noting_orphans(tmp_path, request, "supervisor")


@pytest.fixture
def fork(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    """`start` for what comes once the ranks are at work: the supervisor and its ranks are forks, there at once."""
    yield from noting_orphans(tmp_path, request, "all")


def noting_orphans(
    folder: Path, request: pytest.FixtureRequest, forks: Forks
) -> Iterator[Callable[..., Started]]:
    with supervisors(
        folder, lambda left: request.node.user_properties.append(("orphans", left)), forks
    ) as begin:
        yield begin


@contextmanager
def supervisors(
    folder: Path, note: Callable[[int], None] | None = None, forks: Forks = ""
) -> Iterator[Callable[..., Started]]:
    """start(task, ranks=2, env={}, fault=…, **job): a supervisor at work on "train" or on tests.faults.entry_points.

    `before`: words that stand before its command. `forks`: it is one, or also its ranks (tests/house/forked_jobs.py).
    """
    jobs: list[Started] = []

    def begin(
        entry_point: str,
        ranks: int | None = 2,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        **job: Any,
    ) -> Started:
        place = folder / f"job{len(jobs)}"
        (place / "pids").mkdir(parents=True)
        extra = {"pids": str(place / "pids"), **job.pop("extra", {})}
        named = {
            "recipe": "tests/faults/tiny.yaml",
            "entry_point": entry_point
            if entry_point == "train"
            else f"tests.faults.entry_points:{entry_point}",
            "output_dir": str(place / "run"),
        }
        words = {**named, "ranks": ranks, **job, "extra": extra}
        mark = f"{os.getpid()}-{time.time_ns()}"
        variables = {**os.environ, **(env or {}), MARK: mark}
        command = [*before, sys.executable, "tests/faults/start.py", json.dumps(words)]
        process = ForkedSupervisor(words, variables, place, forks != "all") if forks else subprocess.Popen(
            command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip
        asked = Job(**{**words, "recipe": Path(words["recipe"])})
        jobs.append(Started(process, Path(words["output_dir"]), place / "pids", mark, asked))
        return jobs[-1]

    left = set[int]()
    try:
        yield begin
        left = {pid for job in jobs for pid in job.left()}
        if note:
            note(len(left))
    finally:
        for job in jobs:
            kill_all(
                lambda job=job: [
                    *descendants(job.process.pid),
                    *filter(alive, [job.process.pid]),
                    *job.left(),
                ]
            )
            job.process.wait()
        if not forks:
            job.process.stdout.close()
            job.process.stderr.close()
    assert not left, "processes were left behind"


@pytest.fixture
def spaces(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    with two_spaces() as names:
        yield names
        left = marked(MARK, names[0])
        request.node.user_properties.append(("orphans", len(left)))
    kill_all(lambda: marked(MARK, names[0]))
    assert not left, "processes were left behind"


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Callable[..., None]:
    """found(fault, seconds, named, phase="forward", job=job): one row of the table of faults (tests/faults/table.py):
    how long it took to be noticed, and whether the screen named what had caused it.

    With the ended `job` of a training, what the fault cost is measured, where long tests run: the run is resumed, and
    compared with an undisturbed one; `cost`: what a test has measured itself. How many processes were left is counted
    when the test is over.
    """

    def note(
        fault: str,
        seconds: float,
        named: bool | None,
        *,
        phase: str = "–",
        job: Started | None = None,
        cost: str = "–",
    ) -> None:
        measure = job is not None and "long" in request.config.getoption("markexpr").replace(
            "not long", "", 1
        )
        cost = str(lost(job.job)) if job is not None and measure else cost
        row = Row(fault=fault, seconds=seconds, named=named, phase=phase, lost=cost)
        request.node.user_properties.append(("fault", row.state()))
        assert cost.startswith(("0", "–")), f"{fault}: data lost: {cost}"

    return note


@pytest.fixture
def cause_named(found: Callable[..., None]) -> Callable[..., str]:
    """cause_named(job, fault, status, pattern, phase): the job ends with this status, its screen has the pattern, and
    nobody is left; the fault is a row of the table. Returns what the screen said.

    `measured`: the job is a training, which is resumed then, to see what the fault has cost.
    """

    def check(
        job: Started, fault: str, status: int, pattern: str, phase: str = "forward", measured: bool = True
    ) -> str:
        ended, said, complained = job.finish(timeout=110)
        named = re.search(pattern, complained) is not None
        found(fault, job.seconds_from_fault(said), named, phase=phase, job=job if measured else None)
        assert named and ended == status and not job.left(), complained
        return said + complained

    return check


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Callable[..., None]:
    """noted(deed, layout, step, status, promise): a row of the table of deeds (tests/faults/deeds.py)."""

    def note(deed: str, layout: str, step: int, status: int, promise: str) -> None:
        fields = {"deed": deed, "layout": layout, "step": step, "status": status, "promise": promise}
        request.node.user_properties.append(("deed", fields))

    return note


@pytest.fixture(scope="session")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    """Starts jobs whose ranks are forks of processes that wait."""
    waiting = Lane(tmp_path_factory.mktemp("lane"))
    yield waiting
    waiting.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[deeds.Layout], deeds.Record]:
    """The record of a layout's training that nothing was done to; made once."""
    records: dict[deeds.Layout, deeds.Record] = {}

    def record_of(layout: deeds.Layout) -> deeds.Record:
        if layout not in records:
            run = tmp_path_factory.mktemp("undisturbed") / "run"
            train(layout.path, layout.overrides, layout.ranks, str(run), None)
            records[layout] = deeds.Record.of(run)
        return records[layout]

    return record_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", metavar="FILE", help="write the table of faults into this page")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The tables of the faults and deeds that were injected, as docs/reliability.md has them."""
    reports = [report for several in terminalreporter.stats.values() for report in several]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    done = [fields for name, fields in properties if name == "deed"]
    page = terminalreporter.config.getoption("--faults")
    for name, rows, lines_of_rows, write_rows in (
        ("faults", rows_of(reports), lines_of, write),
        ("deeds", list({str(fields): fields for fields in done}.values()), deeds.lines_of, deeds.write),
    ):
        if rows:
            terminalreporter.section(f"{len(rows)} {name}")
            for line in lines_of_rows(rows):
                terminalreporter.write_line(line)
            if page:
                write_rows(rows, Path(page))
