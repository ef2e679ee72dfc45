"""Counts the bytes that this process has sent: exactly for this package's sockets, else by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.mesh import transport


@dataclass
class Traffic:
    """Bytes sent since the process began. `collectives`: bytes of Paddle's process groups, computed for a ring, which
    sends the fewest (docs/exchange.md)."""

    collectives: float = 0.0

    def all_reduced(self, size: float, ranks: int) -> None:
        """Adds a sum of `size` bytes over `ranks` ranks."""
        self.collectives += 2 * (ranks - 1) / ranks * size

    def reduced(self, size: float, ranks: int) -> None:
        """Adds `size` bytes that were summed at one rank, gathered or scattered: each rank sends its part of them."""
        self.collectives += (ranks - 1) / ranks * size

    @property
    def sent(self) -> float:
        """All bytes that this process has sent."""
        return self.collectives + transport.sent_bytes()


traffic = Traffic()
