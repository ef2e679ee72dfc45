"""Names a rank that is slower than its peers, which do the same work, and the phase in which it is slow.

Every rank's heartbeat adds up its busy time, without waiting for others, by phase. The times travel in the all-reduce
with which the ranks agree on stopping, every two seconds or so (`stopping`). Each rank is compared with the median of
the others that hold the same pipeline stage, since the stages of a model differ by nature. Other work than updates
(evaluations, checkpoints, callbacks) does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.text import duration

PHASES = ("data", "forward", "backward", "exchange", "update")
SLOW, NO_LONGER = 1.5, 1.25  # ratios to the others' time: slow from the first on, until below the second
MATTERS = 0.1  # least delay, as a fraction of a step: a smaller one delays no other rank
LATER = 0.010  # least delay, in seconds per step: less is the machine's other work, in steps of few ms
# A rank is named after so many meetings in a row, over so many steps: a machine may be busy for a while.
MEETINGS, STEPS = 3, 5


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """The rank with the largest ratio (`times`) to the others' busy time, and the phase of most of its delay."""

    rank: int
    times: float
    phase: str


@dataclass
class _Streak:
    """A rank's state at the last meetings: for how many in a row, and since which step, it has been (not) slow."""

    slow: bool = False
    meetings: int = 0
    since: int = 0


@dataclass
class Stragglers:
    """Compares the ranks' busy times. `shares`: how many samples of a full batch each rank computes.

    `slowest` is of the last meeting, None before the second and if no rank has peers. `named` are the ranks that are
    slow now.
    """

    mesh: Mesh
    shares: Sequence[int]
    slowest: Slowest | None = field(default=None, init=False)
    named: set[int] = field(default_factory=set, init=False)
    _streaks: dict[int, _Streak] = field(default_factory=dict, init=False)
    _step: int | None = field(default=None, init=False)  # of the last meeting
    _spent: Mapping[str, float] = field(default_factory=dict, init=False)  # until then

    @property
    def numbers(self) -> int:
        """The length of the result of `bring`, on every rank."""
        return self.mesh.ranks * (len(PHASES) + 1)

    def bring(self, seconds: float) -> list[float]:
        """This rank's part of a meeting's sum over all ranks: at its position its busy seconds by phase since the last
        one, and the `seconds` that have passed; elsewhere zeros."""
        spent = heartbeat.spent()
        seconds_by_phase = [spent.get(phase, 0.0) - self._spent.get(phase, 0.0) for phase in PHASES]
        self._spent = spent
        row = len(PHASES) + 1
        return (
            [0.0] * (row * self.mesh.rank)
            + [*seconds_by_phase, seconds]
            + [0.0] * (row * (self.mesh.ranks - 1 - self.mesh.rank))
        )

    def hear(self, numbers: Sequence[float], step: int) -> list[str]:
        """Takes the sum of all ranks' `bring` at `step`. Returns a sentence for each rank that has become slow, or is
        no longer; the same on every rank."""
        before, self._step = self._step, step
        if before is None or step <= before:
            return []  # start-up and the first steps, or the training went back
        row, steps = len(PHASES) + 1, step - before
        rows = [numbers[row * rank : row * (rank + 1)] for rank in range(self.mesh.ranks)]
        sentences, entries = [], []
        for rank, (*phase_seconds, seconds) in enumerate(rows):
            peers = self._peers(rank)
            if not peers:
                continue
            usual = [median(rows[other][n] for other in peers) for n in range(len(PHASES))]
            share = max(1.0, self.shares[rank] / max(median(self.shares[other] for other in peers), 1))
            usual_seconds = median(sum(rows[other][:-1]) for other in peers) * share
            more = [
                seconds_by_phase - share * others_do
                for seconds_by_phase, others_do in zip(phase_seconds, usual, strict=True)
            ]
            entry = Slowest(
                rank=rank,
                times=sum(phase_seconds) / max(usual_seconds, 1e-9),
                phase=PHASES[more.index(max(more))],
            )
            entries.append(entry)
            matters = sum(phase_seconds) - usual_seconds >= max(MATTERS * seconds, LATER * steps)
            peer_name = "the others" if len(peers) > 1 else f"rank {peers[0]}"
            sentences += self._judge(
                entry, peer_name, matters, before, step, sum(phase_seconds) / steps, usual_seconds / steps
            )
        self.slowest = max(entries, key=lambda entry: entry.times, default=None)
        return sentences

    def _peers(self, rank: int) -> list[int]:
        """The other ranks with the same stage of the model; for a server, the other servers."""
        axes = self.mesh.axes

        def kind(number: int) -> tuple[int, bool]:
            return axes.coords(number)["pipeline"], number < axes.servers

        return [r for r in range(self.mesh.ranks) if r != rank and kind(r) == kind(rank)]

    def _judge(  # noqa: PLR0913 - the numbers of a sentence
        self,
        entry: Slowest,
        peer_name: str,
        matters: bool,
        before: int,
        step: int,
        seconds: float,
        usual_seconds: float,
    ) -> list[str]:
        streak = self._streaks.setdefault(entry.rank, _Streak())
        slow = entry.times >= (NO_LONGER if entry.rank in self.named else SLOW) and matters
        if slow != streak.slow or not streak.meetings:
            self._streaks[entry.rank] = streak = _Streak(slow, 0, before)
        streak.meetings += 1
        if streak.meetings < MEETINGS or step - streak.since < STEPS or slow == (entry.rank in self.named):
            return []
        if not slow:
            self.named.discard(entry.rank)
            return [f"rank {entry.rank} is as fast as {peer_name} again, since step {streak.since}"]
        self.named.add(entry.rank)
        possessive = f"{peer_name}'" if peer_name.endswith("s") else f"{peer_name}'s"
        return [
            f"rank {entry.rank} takes {entry.times:.1f} × {possessive} time per step for {step - streak.since} steps "
            f"({duration(seconds)} against {duration(usual_seconds)}, without waiting), most of it in {entry.phase}"
        ]
