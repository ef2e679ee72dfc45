"""Which of a model's BatchNorms normalize over one rank's samples: a training may freeze them, and thaw them again."""

from __future__ import annotations

from collections.abc import Iterable

from paddle import nn

from paddle_dp.parallel.batch_norm import is_local, keeps_statistics


class LocalNorms:
    """Watches the BatchNorms among `layers`, by whole-model name."""

    def __init__(self, layers: Iterable[tuple[str, nn.Layer]]):
        self._watched = [(name, layer) for name, layer in layers if keeps_statistics(layer)]
        self._now: frozenset[str] = frozenset()
        self._ever: frozenset[str] = frozenset()

    def look(self) -> bool:
        """Before an update: True where one was frozen since the last one. The same on every rank."""
        if not self._watched:
            return False
        before, self._now = self._now, self._local()
        self._ever |= self._now
        return not before <= self._now

    def names(self) -> list[str]:
        """Of those that are local, or were in an update."""
        local = self._local() | self._ever
        return [name for name, _ in self._watched if name in local]

    def _local(self) -> frozenset[str]:
        return frozenset(name for name, layer in self._watched if is_local(layer))
