"""A learner's dropout: a scope around each of its forwards, and a report of draws that no scope controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.dropout.calls import install
from paddle_dp.core.dropout.scope import Scope
from paddle_dp.core.dropout.uncaught import DrawMonitor, cut_unsaid
from paddle_dp.mesh import Mesh

Layers = Sequence[tuple[str, nn.Layer]]


class Draws:
    """The random numbers of a learner's forwards: the masks of one process (`exact`), or separate masks per rank.

    A monitor watches the first batch's forwards for draws that no scope controls, and after `watch_on` all later ones;
    asynchronous ranks may share its findings many updates later.
    """

    def __init__(self, exact: bool):
        self.exact = exact
        self._watch: DrawMonitor | None = DrawMonitor()
        self._watched: tuple[int, int] | None = None  # epoch and number of that batch
        self._later: DrawMonitor | None = None  # watches the batches after it
        self._kinds_by_layer: dict[str, list[str]] = {}
        self._doubted: dict[str, tuple[list[int], int]] = {}
        self._unsaid: dict[str, str] = {}
        if exact:
            install()

    def around(
        self, batch: Batch, micro_batch: MicroBatch, layers: Callable[[], Layers]
    ) -> AbstractContextManager[Any]:
        """Wraps the forward of one micro-batch; `layers` returns this rank's named layers."""
        scope = self.scope(batch, micro_batch)
        watch = self._watch
        if watch is not None:
            self._watched = self._watched or (batch.epoch, batch.index)
        if watch is None or self._watched != (batch.epoch, batch.index):
            watch = self._later
        if watch is None:
            return scope
        both = ExitStack()
        both.enter_context(scope)
        both.enter_context(watch.on(layers()))
        return both

    def watch_on(self) -> None:
        """Watches later batches as well as the first one, until `gather_later`."""
        self._later = DrawMonitor(notes_calls=False)

    def gather_findings(self, mesh: Mesh) -> None:
        """Shares the ranks' findings after the first update, or a later one. Collective."""
        if self._watch is None:
            return
        if mesh.ranks > 1:
            self._unsaid = cut_unsaid(mesh.gather((dict(mesh.coords), self._watch.dropped)))
        watch, self._watch = self._watch, None
        self._gather(watch, mesh)

    def gather_later(self, mesh: Mesh) -> None:
        """Shares the findings since `watch_on`, and ends it. Collective."""
        watch, self._later = self._later, None
        if watch is not None:
            self._gather(watch, mesh)

    def _gather(self, watch: DrawMonitor, mesh: Mesh) -> None:
        draws = {label: sorted(kinds) for label, kinds in watch.kinds_by_layer.items()}, watch.doubted
        for kinds_by_layer, doubted in mesh.gather(draws) if mesh.ranks > 1 else [draws]:
            self._doubted = doubted | self._doubted
            for label, kinds in kinds_by_layer.items():
                self._kinds_by_layer[label] = sorted({*self._kinds_by_layer.get(label, []), *kinds})

    def differences(self) -> list[str]:
        """Sentences about draws that differ, or may differ, on another number of ranks."""
        return [*self._drawn(), *self._unclear()]

    def _unclear(self) -> Iterator[str]:
        if self._unsaid:
            first, more = min(self._unsaid), len(self._unsaid) - 1
            also = f" ({more} more do, too)" if more else ""
            yield (
                f"{first} drops by the same mask on all ranks of the {self._unsaid[first]} axis, which hold different "
                f"slices there{also}. Name a dropout between cut layers as `colwise` in `cuts`, and the method that "
                "drops attention weights in `attention_methods`"
            )
        if not self._doubted:
            return
        first, more = min(self._doubted), len(self._doubted) - 1
        also = f" ({more} more do, too)" if more else ""
        shape, samples = self._doubted[first]
        yield (
            f"{first} drops elements of a tensor {shape} in a micro-batch of {samples} samples{also}: dim 0 does not "
            "tell to which sample a row belongs, so another number of ranks may drop others; "
            f"drop where it is [{samples}, …]"
        )

    def _drawn(self) -> list[str]:
        if not self._kinds_by_layer:
            return []
        first, more = min(self._kinds_by_layer), len(self._kinds_by_layer) - 1
        noun = f"{first} and {more} more draw" if more else f"{first} draws"
        kinds = {kind for kinds in self._kinds_by_layer.values() for kind in kinds}
        if not self.exact and "Paddle" in kinds:
            return [
                f"{noun} other random numbers on each rank; train.dropout=exact makes those of dropout the same on any "
                "number of ranks"
            ]
        owners = " and ".join(f"{kind}'s" for kind in sorted(kinds))
        return [
            f"{noun} from {owners} generator, which differs on another number of ranks: exact are dropout, and one "
            "number for each sample"
        ]

    def scope(self, batch: Batch, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Wraps any forward of these samples of a batch: it draws their masks from the first call on."""
        if not self.exact:
            return nullcontext()
        samples = max(micro_batch.samples, 1)
        return Scope(batch.seed, batch.epoch, batch.index, micro_batch.first, samples, micro_batch.places)
