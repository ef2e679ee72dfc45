"""Ranks that do not wait for each other ask rank 0 which share of a global batch to compute next."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.mesh.transport import Patience
from paddle_dp.train.ledger import Assignments, Share, Sums

KEEPER = 0


class WorkQueue:
    """A rank's claims to shares, round after round. Rank 0 keeps the ledger: the threads that read its sockets answer
    while it computes.

    A rank claims its next share when it gets one, so that it does not wait for the answer. If ranks may be lost, it
    claims the next one when it has computed one: then a slow or dead rank never holds two.
    """

    def __init__(self, mesh: Mesh):
        """Use `claims_of`: a process has one queue, so that no message of a later training is lost."""
        self.mesh, self.round = mesh, 0
        self._lock = threading.Condition()
        self._ledger: Assignments | None = None
        # Messages of rounds that this rank has not begun.
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._local_shares: deque[Share] = deque()
        self._pace: dict[int, float] = {}  # seconds per share by rank, on rank 0
        self._resting: deque[int] = deque()  # ranks that have computed all that they claimed
        if mesh.ranks > 1 and mesh.rank == KEEPER:
            transport.endpoint().answer(CHANNELS["claims"], self._on_message)
            transport.endpoint().when_gone("claims", self.gone)

    def begin(self, first: int, stop: int) -> None:
        """Begins a round over the global batches `first` to `stop` - 1 of an epoch; the same on every rank."""
        self.round += 1
        if self.mesh.rank == KEEPER:
            with self._lock:
                if self._ledger is not None:
                    self._pace = self._ledger.known_pace()
                self._ledger = Assignments(first, stop, self.mesh.dp_size, self._pace)
                early, self._early = self._early, []
                for rank, message in early:
                    self._hear(rank, message)

    def shares(self) -> Iterator[Share]:
        """Yields this rank's shares of the round, claiming them as it goes."""
        if self.mesh.rank == KEEPER:
            while (share := self._with(lambda ledger: ledger.claim(KEEPER))) is not None:
                self._local_shares.append(share)
                yield share
            return
        later = bool(self.mesh.expendable)  # rank 0 computes nothing, and answers at once
        self._send({"do": "claim"})
        while (answer := json.loads(bytes(self._granted()))) is not None:
            share = (int(answer[0]), int(answer[1]))
            if not later:
                self._send({"do": "claim"})
            self._local_shares.append(share)
            yield share
            if later:
                self._send({"do": "claim"})

    def done(self, sums: Sums | None, seconds: float) -> None:
        """Reports the oldest claimed share as computed; `seconds`: its time here, without waiting for others."""
        share = self._local_shares.popleft()
        if self.mesh.rank == KEEPER:
            self._with(lambda ledger: ledger.done(KEEPER, share, sums, seconds))
        else:
            self._send({"do": "done", "share": share, "sums": sums, "seconds": seconds})

    def more(self) -> bool:
        """Call it when this rank has no shares left. Waits until the others have none left, or are gone. True if shares
        of a lost rank are available; always False, at once, if no rank may be lost."""
        if not self.mesh.expendable:
            return False
        self._send({"do": "rest"})
        with heartbeat.waiting("the shares that other ranks compute"):
            return bool(json.loads(bytes(self._granted())))

    def cut(self) -> None:
        """Lets this round begin no further global batch."""
        if self.mesh.rank == KEEPER:
            self._with(Assignments.cut)
        else:
            self._send({"do": "cut"})

    def gone(self, rank: int) -> None:
        """Hands a lost rank's unfinished shares out again, if the others continue without it. For rank 0."""
        with self._lock:
            if self._ledger is not None and rank in self.mesh.expendable:
                self._ledger.gone(rank)
                self._wake()

    def reported(self, batch: int) -> dict[str, float]:
        """The means over the shares up to this global batch that were done since the last call. For rank 0."""
        return self._with(lambda ledger: ledger.reported(batch))

    def end(self) -> int:
        """Ends the round when this rank finds no share. Rank 0 waits for the shares that others compute and returns the
        batch at which the round stopped; other ranks return 0. Raises LostPeerError after train.patience."""
        if self.mesh.rank != KEEPER:
            return 0
        with self._lock, heartbeat.waiting("the shares that other ranks compute"):
            ledger = self._ledger
            assert ledger is not None, "a round was begun"
            if not self._lock.wait_for(lambda: ledger.is_done, timeout=Patience.seconds):
                raise LostPeerError(
                    f"rank 0 has waited {Patience.seconds:g} s for shares that other ranks have claimed and not "
                    "computed (train.patience). See their logs."
                )
            return ledger.stop

    def _with(self, do: Callable[[Assignments], Any]) -> Any:
        with self._lock:
            assert self._ledger is not None, "a round was begun"
            result = do(self._ledger)
            self._wake()
            return result

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({**message, "round": self.round}).encode()
        transport.endpoint().send(CHANNELS["claims"], KEEPER, memoryview(data))

    def _granted(self) -> bytearray:
        return transport.endpoint().receive(CHANNELS["granted"], KEEPER)

    def _on_message(self, rank: int, data: bytearray) -> None:
        """Takes a message on rank 0, in a thread that reads a socket."""
        message = json.loads(bytes(data))
        with self._lock:
            if message["round"] > self.round:
                self._early.append((rank, message))
            elif message["round"] == self.round:
                self._hear(rank, message)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        ledger = self._ledger
        assert ledger is not None, "a round was begun"
        if message["do"] == "claim":
            answer = json.dumps(ledger.claim(rank)).encode()
            transport.endpoint().send(CHANNELS["granted"], rank, memoryview(answer))
        elif message["do"] == "done":
            ledger.done(rank, (message["share"][0], message["share"][1]), message["sums"], message["seconds"])
        elif message["do"] == "rest":
            self._resting.append(rank)
        else:
            ledger.cut()
        self._wake()

    def _wake(self) -> None:
        """Wakes those that wait for a change of the ledger, here and on resting ranks."""
        ledger = self._ledger
        assert ledger is not None, "a round was begun"
        while self._resting and (ledger.is_done or ledger.has_more):
            answer = memoryview(json.dumps(not ledger.is_done).encode())
            transport.endpoint().send(CHANNELS["granted"], self._resting.popleft(), answer)
        self._lock.notify_all()


_claims: list[WorkQueue] = []


def claims_of(mesh: Mesh) -> WorkQueue:
    """This process's work queue, made on first use."""
    if not _claims or _claims[0].mesh != mesh:
        _claims[:] = [WorkQueue(mesh)]
    return _claims[0]
