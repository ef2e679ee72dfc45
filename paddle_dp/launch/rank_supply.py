"""Chooses the number of ranks of an attempt: as many as are available now and the recipe can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.launch import console, machine
from paddle_dp.launch.command import LaunchPlan
from paddle_dp.launch.machine import Machine, spoken
from paddle_dp.launch.restarts import AttemptResult
from paddle_dp.text import plural

FILE = "ranks"  # in the run's folder: the number of ranks that this machine may have now
LOOK = 1.0  # seconds between two looks at the file and the devices
ROW = 2  # failures of one rank in a row, without a new checkpoint, after which it is lost

Offer = tuple[int, int]
"""A node's number, and its number of ranks."""
Obstacle = Callable[[int], str]
"""Returns why a recipe cannot be trained on a number of ranks; "" if it can."""


def equal(offers: Sequence[Offer]) -> Sequence[Offer]:
    """Returns all offers. Raises UsageError if one node offers more ranks than another."""
    if len({ranks for _, ranks in offers}) > 1:
        there = ", ".join(f"{ranks} on node {number}" for number, ranks in offers)
        raise UsageError(f"every node needs as many ranks as the others, not {there}. Give --ranks N to all.")
    return offers


def choose(offers: Sequence[Offer], least: int, least_ranks: int, obstacle: Obstacle) -> list[Offer]:
    """Chooses the most offered ranks that the recipe can be trained on: the same number on each of the first nodes.

    It needs `least` nodes with `least_ranks` ranks each. Raises UsageError, with the reason against the largest number,
    if none fits.
    """
    counts = {
        (nodes * ranks, nodes)
        for nodes in range(least, len(offers) + 1)
        for ranks in range(least_ranks, min(offered for _, offered in offers[:nodes]) + 1)
    }
    reasons: dict[int, str] = {}
    for total, nodes in sorted(counts, reverse=True):
        reasons[total] = reasons.get(total) or obstacle(total)
        if not reasons[total]:
            return [(number, total // nodes) for number, _ in offers[:nodes]]
    there = " + ".join(str(offered) for _, offered in offers)
    if not reasons:
        minimum = f"{least_ranks} on each of {least} nodes" if least > 1 else f"{least_ranks}"
        raise UsageError(f"there are {there} ranks to be had now, and {minimum} are the least.")
    why = reasons[max(reasons)]
    raise UsageError(
        f"of the {there} ranks to be had now, no number can train this recipe. On {max(reasons)}: {why}"
    )


def with_ranks(plan: LaunchPlan, ranks: int) -> LaunchPlan:
    """Returns the plan reduced to `ranks`."""
    plan = replace(plan, ranks=ranks)
    return replace(plan, devices=plan.devices[: ranks - plan.servers_here])


def _culprit(result: AttemptResult) -> str | None:
    """Returns the device of the rank of this node that failed, or on a CPU its number; None without one. After a resize
    a number may be another device's."""
    if (plan := result.plan) is None:
        return None
    numbers = plan.numbers[plan.servers_here :] if plan.devices else plan.numbers  # a server has no device
    names: dict[int | None, str] = dict(zip(numbers, plan.devices or map(str, numbers), strict=False))
    return names.get(result.culprit)


@dataclass
class RankSupply:
    """The ranks available on this machine, found again before and during every attempt.

    `plan` has all requested ranks. `run` is the run's folder.
    """

    plan: LaunchPlan
    run: Path
    obstacle: Obstacle
    machine: Callable[[], Machine] = Machine.here
    lost: list[str] = field(default_factory=list)  # devices; on a CPU, ranks

    def __post_init__(self) -> None:
        self._shortage = ""
        self._limit: int | None = None  # the last valid number in the run folder's file
        self._limit_known = False
        self._not_followed = ""  # the file's invalid text that a line has reported
        self._from = 0  # length of the history when the last rank was lost

    @property
    def varies(self) -> bool:
        """True if this machine may have another number of ranks in another attempt."""
        return self.plan.job.least_ranks is not None

    def next(self, history: Sequence[AttemptResult] = ()) -> LaunchPlan:
        """Returns the plan of the attempt after `history`. Raises UsageError if too few ranks are left."""
        if not self.varies:
            return self.plan
        self.note_lost(history)
        plan = self.offered()
        [(_, ranks)] = choose([(0, plan.ranks)], 1, self.plan.job.least_ranks or 1, self.obstacle)
        return with_ranks(plan, ranks)

    def choose_offers(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Returns the ranks that an attempt takes of the nodes' offers. Raises UsageError if they do not suffice."""
        plan, job = self.plan, self.plan.job
        if not job.elastic:
            return equal(offers)
        return choose(offers, job.least_nodes or plan.nodes, job.least_ranks or plan.ranks, self.obstacle)

    def announce_next(self, history: Sequence[AttemptResult] = ()) -> LaunchPlan:
        """Returns `next`'s plan, and prints why if it has fewer ranks than requested."""
        if self.varies and self.plan.devices:
            machine.ask_paddle.cache_clear()  # a device of a plugin may have gone
        plan = self.next(history)
        previous, self._shortage = self._shortage, self.shortage(plan)
        if self._shortage not in ("", previous):
            console.write(self._shortage)
        return plan

    def offered(self) -> LaunchPlan:
        """Returns the plan of as many ranks as are available now, even if the recipe cannot be trained on them."""
        plan = self.plan
        if not self.varies:
            return plan
        if plan.devices:
            chosen, here = plan.job.devices, self.machine().devices
            names = here if chosen is None else tuple(str(n) for n in chosen if str(n) in here)
            there = tuple(name for name in names if name not in self.lost)[: len(plan.devices)]
            most = len(there) + plan.servers_here
        else:
            there, most = (), plan.ranks - len(self.lost)
        if (allowed := self._allowed()) is not None:
            most = min(most, allowed)
        return with_ranks(replace(plan, devices=there), max(most, 0))

    def resize(self, plan: LaunchPlan) -> str:
        """Returns a line: why a running attempt of `plan` stops now, and how it goes on; "" if it need not stop."""
        if not self.varies:
            return ""
        try:
            target = self.next()
        except UsageError:  # too few are left: the running ranks may continue
            return ""
        if (target.ranks, target.devices) == (plan.ranks, plan.devices):
            return ""
        allowed, ranks = self._allowed(), plural(target.ranks, "rank")
        why = f"{ranks} can be had now"
        if allowed is not None and allowed == self.offered().ranks != plan.ranks:
            why = f"{self.run / FILE} allows {plural(allowed, 'rank')}"
        elif target.ranks == plan.ranks:
            why = f"{spoken(plan.kind)} {', '.join(target.devices)} can be had now"
        running = f"{plan.ranks} {'is' if plan.ranks == 1 else 'are'} running"
        return f"{why}, {running}: saving a checkpoint, then going on with {target.ranks}"

    def _allowed(self) -> int | None:
        """Returns the number in the run folder's file `ranks`; None without such a file.

        Another text does not count, nor a number below the least of --ranks, unless it was there before the first
        attempt: the previous number stays valid, and a line reports that once.
        """
        file = self.run / FILE
        try:
            text = file.read_bytes()[:20].decode(errors="replace").strip()
        except FileNotFoundError:
            self._limit, self._limit_known, self._not_followed = None, True, ""
            return None
        except OSError:
            return self._limit
        if not text:
            return self._limit
        number = int(text) if text.isdecimal() and text.isascii() else None
        least = self.plan.job.least_ranks or 1
        if number is not None and (number >= least or not self._limit_known):
            self._limit, self._limit_known, self._not_followed = number, number >= least, ""
            return number
        if text != self._not_followed:
            self._not_followed = text
            most = self.plan.ranks if self._limit is None else min(self._limit, self.plan.ranks)
            wrong = f"{text!r}, which is no number"
            if number is not None:
                wrong = f"{number}, fewer than --ranks {least}:{self.plan.ranks} allows"
            console.write(f"{file} has {wrong}: still at most {most}.")
        return self._limit

    def note_lost(self, history: Sequence[AttemptResult]) -> bool:
        """Counts a device, or on a CPU a rank, as lost if it alone was the first to fail in each of the last attempts;
        returns True then."""
        new = history[self._from :][-ROW:]
        name, *others = {_culprit(result) for result in new} or {None}
        if name is None or others or len(new) < ROW or any(result.progressed for result in new[1:]):
            return False
        self._from = len(history)
        self.lost.append(name)
        return True

    def shortage(self, plan: LaunchPlan) -> str:
        """Returns why an attempt has fewer ranks than requested, "3 of at most 4 ranks: …"; "" if it has all."""
        if plan.ranks >= self.plan.ranks:
            return ""
        reasons = []
        if (allowed := self._allowed()) is not None and allowed < self.plan.ranks:
            reasons.append(f"{self.run / FILE} has {allowed}")
        if self.lost:
            kind = spoken(self.plan.kind) if self.plan.devices else "rank"
            reasons.append(f"{kind} {', '.join(self.lost)} was the first to fail {ROW} times in a row")
        gone = [name for name in self.plan.devices if name not in (*plan.devices, *self.lost)]
        if gone and not reasons:
            reasons.append(f"{spoken(self.plan.kind)} {','.join(gone)} is not there, or not needed")
        offered = self.offered().ranks
        if offered > plan.ranks and (why := self.obstacle(offered)):
            reasons.append(f"{offered} cannot train it: {why}")
        return f"{plan.ranks} of at most {self.plan.ranks} ranks: {'; '.join(reasons)}"
