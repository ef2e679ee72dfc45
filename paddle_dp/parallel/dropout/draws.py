"""What a learner draws: a scope around each of its forwards, and what was noticed there that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from paddle import nn

from paddle_dp.batch import Batch, Micro
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.dropout.places import install
from paddle_dp.parallel.dropout.scope import Scope
from paddle_dp.parallel.dropout.unseen import Watch, cut_unsaid

Layers = Sequence[tuple[str, nn.Layer]]


class Draws:
    """The random numbers of a learner's forwards: masks that one process would draw (`exact`), or each rank's own.

    The forwards of its first update are watched for draws that no scope decides.
    """

    def __init__(self, exact: bool):
        self.exact = exact
        self._watch: Watch | None = Watch()
        self._found: dict[str, list[str]] = {}
        self._doubted: dict[str, tuple[list[int], int]] = {}
        self._unsaid: dict[str, str] = {}
        if exact:
            install()

    def around(
        self, batch: Batch, micro_batch: Micro, layers: Callable[[], Layers]
    ) -> AbstractContextManager[Any]:
        """Around the forward of one micro-batch; `layers`: those of the model that lie here, with their names."""
        if not self.exact and self._watch is None:
            return nullcontext()
        scope = self.scope(batch, micro_batch)
        if self._watch is None:
            return scope
        both = ExitStack()
        both.enter_context(scope)
        both.enter_context(self._watch.on(layers()))
        return both

    def gather_findings(self, mesh: Mesh) -> None:
        """After the first update: what was noticed on any rank, known on all of them. Collective."""
        if self._watch is None:
            return
        mine = {label: sorted(kinds) for label, kinds in self._watch.found.items()}, self._watch.doubted
        if mesh.ranks > 1:
            self._unsaid = cut_unsaid(mesh.gather((dict(mesh.coords), self._watch.dropped)))
        self._watch = None
        for found, doubted in mesh.gather(mine) if mesh.ranks > 1 else [mine]:
            self._doubted = doubted | self._doubted
            for label, kinds in found.items():
                self._found[label] = sorted({*self._found.get(label, []), *kinds})

    def differences(self) -> list[str]:
        """Sentences for what draws numbers that are others on another number of ranks, or may do so."""
        return [*self._drawn(), *self._unclear()]

    def _unclear(self) -> Iterator[str]:
        if self._unsaid:
            first, more = min(self._unsaid), len(self._unsaid) - 1
            also = f" ({more} more do the like)" if more else ""
            yield (
                f"{first} drops by one mask from what is not the same on the ranks of the {self._unsaid[first]} axis"
                f"{also}: nothing says that they hold slices of it. A dropout between cut layers is `columns` in "
                "`cuts`; the method in which attention's weights are dropped belongs into `attention_methods`"
            )
        if not self._doubted:
            return
        first, more = min(self._doubted), len(self._doubted) - 1
        also = f" ({more} more do the like)" if more else ""
        shape, samples = self._doubted[first]
        yield (
            f"{first} drops elements of a tensor {shape} in a micro-batch of {samples} samples{also}: dim 0 does not "
            "tell which sample a row is of, so another number of ranks may drop others; "
            f"drop where it is [{samples}, …]"
        )

    def _drawn(self) -> list[str]:
        if not self._found:
            return []
        first, more = min(self._found), len(self._found) - 1
        who = f"{first} and {more} more draw" if more else f"{first} draws"
        kinds = {kind for kinds in self._found.values() for kind in kinds}
        if not self.exact and "Paddle" in kinds:
            said = f"{who} random numbers of each rank's own"
            return [f"{said}; train.dropout=exact draws those of dropout alike on any number of ranks"]
        whose = " and ".join(f"{kind}'s" for kind in sorted(kinds))
        return [
            f"{who} {whose} random numbers, others on another number of ranks: only dropout's are the same"
        ]

    def scope(self, batch: Batch, micro_batch: Micro) -> AbstractContextManager[Any]:
        """Around a forward of these samples of a batch, again: it drops what the first one dropped."""
        if not self.exact:
            return nullcontext()
        samples = max(micro_batch.samples, 1)
        return Scope(batch.seed, batch.epoch, batch.index, micro_batch.first, samples, micro_batch.places)
