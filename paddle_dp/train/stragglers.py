"""Names the ranks that are slower than their peers, which do the same work, and the phase in which each is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paddle_dp.data import Sampler
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.text import duration

PHASES = ("data", "forward", "backward", "exchange", "update")
SLOW_RATIO, RECOVERED_RATIO = 1.5, 1.25  # to the others' time: slow from the first on, until below the second
LEAST_DELAY_FRACTION = 0.1  # least delay, as a fraction of a step: a smaller one delays no other rank
LEAST_DELAY = 0.010  # least delay, in seconds per step: less is the machine's other work, in steps of few ms
# A rank is named after so many meetings in a row, over so many steps: a machine may be busy for a while.
MEETINGS, STREAK_STEPS = 3, 5


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """A rank's busy seconds between two meetings, and the `usual_seconds` of its peers for as many samples.

    `phase`: the one of most of its delay; `delays`: whether that is long enough to delay others.
    """

    rank: int
    peers: Sequence[int]
    seconds: float
    usual_seconds: float
    phase: str
    delays: bool

    @property
    def times(self) -> float:
        """The ratio to the peers' time."""
        return self.seconds / max(self.usual_seconds, 1e-9)


@dataclass
class _Streak:
    """A rank's state at the last meetings: for how many in a row, and since which step, it has been (not) slow."""

    slow: bool = False
    meetings: int = 0
    since: int = 0


@dataclass
class Stragglers:
    """Compares the ranks' busy times. `shares`: how many samples of a full batch each rank computes.

    Every rank's heartbeat adds up its busy time, without waiting for others, by phase. The times travel in the
    all-reduce with which the ranks agree on stopping, every two seconds or so (`stopping`). Each rank is compared with
    the median of the others that hold the same pipeline stage, since the stages of a model differ by nature. Other work
    than updates (evaluations, checkpoints, callbacks) does not count.

    `slowest` is of the last meeting, None before the second and if no rank has peers; `slowest_numbers` are its numbers
    for callbacks, which read them in each step. `named` are the ranks that are slow now.
    """

    mesh: Mesh
    shares: Sequence[int]
    slowest: RankPace | None = field(default=None, init=False)
    slowest_numbers: dict[str, float] = field(default_factory=dict, init=False)
    named: set[int] = field(default_factory=set, init=False)
    _streaks: dict[int, _Streak] = field(default_factory=dict, init=False)
    _step: int | None = field(default=None, init=False)  # of the last meeting
    _spent: Mapping[str, float] = field(default_factory=dict, init=False)  # until then

    @classmethod
    def from_sampler(cls, sampler: Sampler, mesh: Mesh) -> Stragglers:
        """Compares the ranks that compute the sampler's batches."""
        axes = mesh.axes
        shares = [sampler.samples_of_rank(axes.dp_rank(rank), axes.dp_size) for rank in range(mesh.ranks)]
        return cls(mesh, shares)

    def bring(self, seconds: float) -> list[float]:
        """This rank's part of a meeting's sum over all ranks: at its position its busy seconds by phase since the last
        one, and the `seconds` that have passed; elsewhere zeros."""
        before, self._spent = self._spent, heartbeat.spent()
        rows = [[0.0] * (len(PHASES) + 1) for _ in range(self.mesh.ranks)]
        by_phase = [self._spent.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES]
        rows[self.mesh.rank] = [*by_phase, seconds]
        return [number for row in rows for number in row]

    def hear(self, numbers: Sequence[float], step: int) -> list[str]:
        """Takes the sum of all ranks' `bring` at `step`. Returns a sentence for each rank that has become slow, or is
        no longer; the same on every rank."""
        before, self._step = self._step, step
        if before is None or step <= before:
            return []  # start-up and the first steps, or the training went back
        row = len(PHASES) + 1
        rows = [numbers[row * rank : row * (rank + 1)] for rank in range(self.mesh.ranks)]
        all_peers = {rank: self._peers(rank) for rank in range(self.mesh.ranks)}
        paces = [self._pace(rank, peers, rows, step - before) for rank, peers in all_peers.items() if peers]
        self.slowest = slowest = max(paces, key=lambda pace: pace.times, default=None)
        if slowest is not None:
            self.slowest_numbers = {
                "slowest_rank": float(slowest.rank), "slowest_times_others": slowest.times
            }  # fmt: skip
        return [sentence for pace in paces for sentence in self._judge(pace, before, step)]

    def _pace(self, rank: int, peers: list[int], rows: Sequence[Sequence[float]], steps: int) -> RankPace:
        *phase_seconds, passed = rows[rank]
        share = max(1.0, self.shares[rank] / max(median(self.shares[peer] for peer in peers), 1))
        usual = [share * median(rows[peer][n] for peer in peers) for n in range(len(PHASES))]
        delays = [here - there for here, there in zip(phase_seconds, usual, strict=True)]
        seconds = sum(phase_seconds)
        usual_seconds = median(sum(rows[peer][:-1]) for peer in peers) * share
        return RankPace(
            rank=rank, peers=peers, seconds=seconds, usual_seconds=usual_seconds,
            phase=PHASES[delays.index(max(delays))],
            delays=seconds - usual_seconds >= max(LEAST_DELAY_FRACTION * passed, LEAST_DELAY * steps),
        )  # fmt: skip

    def _peers(self, rank: int) -> list[int]:
        """The other ranks with the same stage of the model; for a server, the other servers."""
        axes = self.mesh.axes

        def kind(number: int) -> tuple[int, bool]:
            return axes.coords(number)["pipeline"], axes.reads(number)

        return [r for r in range(self.mesh.ranks) if r != rank and kind(r) == kind(rank)]

    def _judge(self, pace: RankPace, before: int, step: int) -> list[str]:
        """A sentence, if the rank has become slow between the meetings at these steps, or is no longer."""
        streak, is_named = self._streaks.setdefault(pace.rank, _Streak()), pace.rank in self.named
        slow = pace.times >= (RECOVERED_RATIO if is_named else SLOW_RATIO) and pace.delays
        if slow != streak.slow or not streak.meetings:
            self._streaks[pace.rank] = streak = _Streak(slow, 0, before)
        streak.meetings += 1
        if streak.meetings < MEETINGS or step - streak.since < STREAK_STEPS or slow == is_named:
            return []
        peers = "the others" if len(pace.peers) > 1 else f"rank {pace.peers[0]}"
        if not slow:
            self.named.discard(pace.rank)
            return [f"rank {pace.rank} is as fast as {peers} again, since step {streak.since}"]
        self.named.add(pace.rank)
        steps, possessive = step - before, f"{peers}'" if peers.endswith("s") else f"{peers}'s"
        per_step = f"{duration(pace.seconds / steps)} against {duration(pace.usual_seconds / steps)}"
        return [
            f"rank {pace.rank} takes {pace.times:.1f} × {possessive} time per step for {step - streak.since} steps "
            f"({per_step}, without waiting), most of it in {pace.phase}"
        ]
