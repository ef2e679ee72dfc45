"""Judges mutants of the code that the ranks of one recipe run, by the proof's own comparison.

A mutant is put into the ranks alone. Where no number that `verify` judges is another one than the clean ranks', the
verdict is that of the clean ranks; else one process is compared with them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from unittest import mock

from paddle_dp.launch.command import Job
from paddle_dp.proof import sides
from paddle_dp.proof.rehearsed import RehearsalComparison
from paddle_dp.proof.sides import Side, SideRunner
from paddle_dp.proof.verdict import compare_sides
from tests.proof.mutants.recorded import digests, only_rounding
from tests.proof.mutants.side import mutable_files, run_side
from tests.proof.mutants.sites import ROOT, Site, changed_codes, sites
from tests.proof.zoo.case import Setting
from tests.ranks import run_ranks

HANG = 20.0  # seconds; more where the clean ranks take long
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a mutant.

    `outcome`: "different" and any other word of a verdict but "same", "crash" or "hang" are of verify; "rehearse", of
    --rehearse alone; "same". `bits`, of the numbers that `verify` judges: "equal", where the ranks recorded the clean
    ranks'; "rounding", where theirs are other ones by no more than rounding (`only_rounding`); else "differ". None
    where they did not end.
    `suite`: the test that kills it in the file, "survived", or None where nobody asked. `commit`: where it was judged.
    `in_file`: what verify says with the mutant in one process, too, where that runs the line, and verify has seen it in
    ranks that came to their end; else None.
    """

    recipe: str
    seed: str
    file: str
    number: int
    line: int
    function: str
    text: str
    mutation: str
    shared: bool
    outcome: str
    said: str
    bits: str | None
    in_file: str | None
    suite: str | None = None
    seconds: float
    commit: str = ""

    @property
    def site(self) -> Site:
        return Site(**{each.name: getattr(self, each.name) for each in fields(Site)})

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.site.key


class Exam:
    """The clean sides of a recipe, and the sites of the lines that they run."""

    def __init__(self, name: str, setting: Setting, scratch: Path):
        self.name, self.setting, self.scratch = name, setting, scratch
        self.limit = 600.0
        begun = time.perf_counter()
        covered, ran = self._run_ranks("covered", lines=True, rehearse=False)
        again = time.perf_counter()
        self.clean, _ = self._run_ranks("clean")
        self.limit = max(HANG, 5 * (time.perf_counter() - again))
        self.one, alone = self._run_one("one", self.clean, lines=True, rehearse=True)
        self.digest = digests(self.clean)
        verdict = compare_sides(self.one, self.clean)
        assert verdict.label == "same", f"{name}, without a mutant: {verdict.sentences}"
        assert (said := self._rehearsed(self.clean)) is None, f"{name}, without a mutant: {said}"
        assert digests(covered)[0] == self.digest[0], f"{name}: two clean runs recorded other numbers"
        self.sites = [
            (site, site.line in alone.get(file, ()))
            for file, lines in sorted(ran.items())
            for site in sites(file, (ROOT / file).read_text())
            if site.line in lines
        ]
        self.seconds = time.perf_counter() - begun

    def draw(self, count: int, seed: str) -> Iterator[tuple[Site, bool]]:
        """`count` mutants, and of each whether one process runs its line, too."""
        shared = dict(self.sites)
        return ((site, shared[site]) for site in drawn(shared, count, f"{seed}|{self.name}"))

    def judge(self, site: Site, shared: bool, seed: str) -> Row:
        """Runs the ranks with the mutant, and whatever that calls for."""
        begun = time.perf_counter()
        folder = self.scratch / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        stopped, in_file = "", None
        try:
            self._run_ranks("mutant", site)
        except (AssertionError, TimeoutError) as error:
            stopped = f"{_kind(error)}: {_last_line(error)}"
        if (folder / "trace" / "side.json").exists():  # what may have stopped was the rehearsal behind it
            many = Side(folder / "trace", self.setting.ranks)
            digest = digests(many)
            bits = self._bits(many, digest)
            if digest == self.digest:
                outcome, said = "same", ""
            else:
                outcome, said = self._verdict(many)
            if outcome != "same" and shared:
                in_file, _ = self._verdict(many, site)
            if outcome == "same" and (difference := stopped or self._rehearsed(many)):
                outcome, said = "rehearse", difference
        else:
            bits, (outcome, _, said) = None, stopped.partition(": ")
        return Row(
            recipe=self.name, seed=seed, **asdict(site), shared=shared, outcome=outcome, said=said[:300], bits=bits,
            in_file=in_file, seconds=round(time.perf_counter() - begun, 1),
        )  # fmt: skip

    def _bits(self, many: Side, digest: tuple[str, str]) -> str:
        if digest[0] == self.digest[0]:
            return "equal"
        parts = [(self.clean.trace(part), many.trace(part)) for part in ("wide", "own")]
        return "rounding" if all(only_rounding(a, b) for a, b in parts) else "differ"

    def _verdict(self, many: Side, site: Site | None = None) -> tuple[str, str]:
        """The verdict's word and sentence on these ranks and one process, which has the mutant `site`, if any."""
        try:
            one, _ = self._run_one("mutant-one", many, site)
            verdict = compare_sides(one, many)
            return (
                verdict.label,
                "" if verdict.first_difference is None else verdict.first_difference.sentence,
            )
        except (AssertionError, TimeoutError) as error:
            return _kind(error), _last_line(error)
        except Exception as error:  # noqa: BLE001 - of records that the mutant has made unreadable
            return "crash", f"of the comparison: {error!r}"
        finally:
            shutil.rmtree(self.scratch / "mutant-one", ignore_errors=True)

    def _rehearsed(self, many: Side) -> str | None:
        """What --rehearse says against these ranks."""
        try:
            found = RehearsalComparison.read(
                self.one.folder, many.folder, self.setting.ranks
            ).first_difference()
        except Exception as error:  # noqa: BLE001 - of records that the mutant has made unreadable
            return f"crash of the comparison: {error!r}"
        return None if found is None else found.sentence

    def _run_ranks(
        self, folder: str, site: Site | None = None, lines: bool = False, rehearse: bool = True
    ) -> tuple[Side, dict[str, set[int]]]:
        noted = self._noted(folder) if lines else None
        with self._in_forks(site, noted):
            many = self._runner(self.scratch, rehearse).run_candidate(self.setting.ranks, name=folder)
        return many, _union(noted)

    def _run_one(
        self, folder: str, many: Side, site: Site | None = None, lines: bool = False, rehearse: bool = False
    ) -> tuple[Side, dict[str, set[int]]]:
        noted = self._noted(folder) if lines else None
        with self._in_forks(site, noted):
            one = self._runner(self.scratch / folder, rehearse).run_reference([many])
        return one, _union(noted)

    def _runner(self, scratch: Path, rehearse: bool) -> SideRunner:
        setting = self.setting
        return SideRunner(setting.path, setting.overrides, STEPS, setting.ranks, scratch, rehearse=rehearse)

    def _noted(self, folder: str) -> Path:
        noted = self.scratch / f"lines-{folder}"
        noted.mkdir(parents=True)
        return noted

    @contextmanager
    def _in_forks(self, site: Site | None, lines: Path | None) -> Iterator[None]:
        """Both sides of a comparison run in forks of processes that wait, with the mutant `site`, and fail with an
        exception: AssertionError, or TimeoutError after `limit` seconds."""
        mutant = None if site is None else [site.file, site.number]

        def run(job: Job, waiting: object = None) -> int:
            noted = None if lines is None else str(lines)
            given = (mutant, noted, str(job.recipe), list(job.all_overrides), job.options)
            run_ranks(run_side, job.ranks or 1, *given, timeout=self.limit)
            return 0

        with mock.patch.object(sides, "run", run), mock.patch.object(sides, "run_alone", run):
            yield


def _union(folder: Path | None) -> dict[str, set[int]]:
    """The lines that the processes of a side ran, by file."""
    union: dict[str, set[int]] = {file: set() for file in mutable_files()}
    for sheet in folder.glob("*") if folder is not None else ():
        for file, numbers in json.loads(sheet.read_text()).items():
            union[file] |= set(numbers)
    return union


def drawn(pool: Iterable[Site], count: int, seed: str) -> Iterator[Site]:
    """`count` sites of those at which the compiler makes something else of the mutant. One site more or less in the
    pool changes one in the draw: the order is that of a hash."""
    ordered = sorted(pool, key=lambda site: lot(seed, *site.key, site.number))
    return islice((site for site in ordered if changed_codes(ROOT / site.file, site.number)), count)


def lot(*words: object) -> str:
    """A hash by which things are put in an order that depends on all words."""
    return hashlib.blake2b("|".join(map(str, words)).encode(), digest_size=8).hexdigest()


def _kind(error: BaseException) -> str:
    return "hang" if isinstance(error, TimeoutError) else "crash"


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
