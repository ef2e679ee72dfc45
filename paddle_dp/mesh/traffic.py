"""How many bytes this process has sent to others: counted where our own sockets carry them, else by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.mesh import transport


@dataclass
class Traffic:
    """Bytes since the process began. `collectives`: what Paddle's process groups were given to exchange, as a ring
    sends it, which is the fewest bytes (docs/exchange.md)."""

    collectives: float = 0.0

    def all_reduced(self, size: float, ranks: int) -> None:
        """`size` bytes were summed over so many ranks."""
        self.collectives += 2 * (ranks - 1) / ranks * size

    def reduced(self, size: float, ranks: int) -> None:
        """They were summed at one rank, gathered from all or scattered to all: each rank sends its part of them."""
        self.collectives += (ranks - 1) / ranks * size

    @property
    def sent(self) -> float:
        """All that this process has sent."""
        return self.collectives + transport.sent_bytes()


traffic = Traffic()
