"""Ranks that a training can lose: their heartbeats mark them as expendable, and their death does not end the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paddle_dp.launch.console import write
from paddle_dp.launch.failures import Failure, read_all
from paddle_dp.launch.rank_monitor import Departure, RankMonitor
from paddle_dp.mesh.heartbeat import RankStatus


class LostRanks:
    """A node's ranks that ended although the job need not: another expendable rank continues, or is done.

    With several nodes (`is_multi_node`), that rank may be on another one; the servers end a job that has lost all of
    them. `beat` returns a rank's last heartbeat; `notify_nodes` sends each line to the other nodes, too.
    """

    def __init__(
        self,
        monitor: RankMonitor,
        beat: Callable[[int], RankStatus | None],
        is_multi_node: bool,
        notify_nodes: Callable[[str], None],
    ):
        self._monitor, self._beat = monitor, beat
        self._multi_node, self._notify_nodes = is_multi_node, notify_nodes
        self._reported: dict[int, str] = {}

    def now(self) -> set[int]:
        """Returns the ranks lost so far; empty if no expendable rank of the only node remains."""
        departures = self._monitor.departures
        gone = {rank for rank, departure in departures.items() if self._is_lost(departure)}
        there = [rank for rank in self._monitor.pids if rank not in departures or self._is_done(rank)]
        remaining = [rank for rank in there if rank not in gone]
        return gone if self._multi_node or any(self._is_expendable(rank) for rank in remaining) else set()

    def tell(self, failure_of: Callable[[int], Failure]) -> None:
        """Prints once for each lost rank how it ended."""
        for rank in sorted(self.now() - self._reported.keys()):
            failure = failure_of(rank)
            self._reported[rank] = failure.rank_name
            text = (
                f"{failure.rank_name} is lost: {failure.in_short}. The others go on without it, and compute what it "
                "had not sent."
            )
            write(text)
            self._notify_nodes(text)

    def tell_all(self) -> None:
        """Prints, at the end of a finished job, which ranks were lost on the way."""
        if self._reported:
            write(f"done without {', '.join(self._reported.values())}, lost on the way")

    def written(self, attempt: Path) -> list[Failure]:
        """Reads the failures that ranks have written, without lost ranks' failures."""
        lost = self.now()
        return [failure for failure in read_all(attempt) if not self._is_ending(failure.rank, lost)]

    def _is_ending(self, rank: int, lost: set[int]) -> bool:
        """True if a rank that has written its failure is lost, or will be as soon as its process has ended."""
        if rank in lost:
            return True
        if rank in self._monitor.departures or not self._is_expendable(rank):
            return False
        others = self._monitor.pids.keys() - self._monitor.departures.keys() - {rank}
        return self._multi_node or any(map(self._is_expendable, others))

    def _is_lost(self, departure: Departure) -> bool:
        is_done = not departure.failed and self._is_done(departure.rank)
        return self._is_expendable(departure.rank) and not is_done

    def _is_expendable(self, rank: int) -> bool:
        return (beat := self._beat(rank)) is not None and beat.expendable

    def _is_done(self, rank: int) -> bool:
        return (beat := self._beat(rank)) is not None and beat.phase == "done"
