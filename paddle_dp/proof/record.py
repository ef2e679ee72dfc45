"""What a run shows while it learns, written down inside a rank: gradients, updates, states, and what layers gave.

Everything goes by whole-model names. A rank writes what it is the one to save (train.state): slices with their place in
the whole, copies once. Copies that differ between ranks are written by every rank that holds one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_dp.checkpoint import Piece
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.parallel import Learner
from paddle_dp.proof.sheets import key
from paddle_dp.train.state import optimizer_pieces, owned

Named = list[tuple[str, paddle.Tensor]]


class Recorder:
    """Watches one learner's updates. `pieces` has what this rank saw of each quantity, `copies` what it holds of those
    that differ between ranks."""

    def __init__(self, learner: Learner):
        self.learner, self.mesh = learner, learner.mesh
        self.pieces: dict[str, Piece] = {}
        self.copies: dict[str, np.ndarray] = {}
        self.apart: dict[str, list[list[int]]] = {}  # by key: ranks that hold the same bits, in groups
        self.recorded: list[int] = []  # the steps whose update was watched
        self._do, self._step = learner._step, 0
        learner._step = self._watched_step  # type: ignore[method-assign]
        self._named = learner.named_parameters()

    def watch(self, step: int) -> None:
        """From now on updates are those of `step`; 0 is for those that nobody wants to see."""
        self._step = step

    @contextmanager
    def probing(self, step: int) -> Iterator[None]:
        """Inside, gradients are written down as those of a probe, and no update is done: weights, rate and loss scale
        stay what they are."""
        learner, scale = self.learner, self.learner.mixed.scale
        do, rate_step = learner._step, learner.rate.step
        kept = scale.state() if scale is not None else {}
        learner._step = partial(self._probed, step)  # type: ignore[method-assign]
        learner.rate.step = lambda: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            learner._step = do  # type: ignore[method-assign]
            learner.rate.step = rate_step  # type: ignore[method-assign]
            if scale is not None:
                scale.load(kept)

    def _probed(self, step: int) -> None:
        self._step = step
        trainable = [(name, p) for name, p in self._named if not p.stop_gradient]
        self._take("probe", {name: (p.grad, p) for name, p in trainable if p.grad is not None})

    def _watched_step(self) -> None:
        if not self._step:
            self._do()
            return
        trainable = [(name, p) for name, p in self._named if not p.stop_gradient]
        gradients = {name: (p.grad, p) for name, p in trainable if p.grad is not None}
        self._take("gradient", gradients)
        self._compare_copies("gradient", [(name, p, p.grad) for name, p in trainable if p.grad is not None])
        before = self._weights("weight")
        self._do()
        after = self._weights("weight")
        holds = self.learner._holds
        self._compare_copies("weight", [(name, p, p) for name, p in self._named if holds(p)])
        frozen = {name for name, p in self._named if p.stop_gradient}
        for name, old in before.items():
            kind = "frozen" if name in frozen else "update"
            self._put(kind, name, old, after[name].array.astype("float64") - old.array.astype("float64"))
        self.recorded.append(self._step)

    def initial(self) -> None:
        """Writes the weights down, before the first update."""
        for name, piece in self._weights("initial").items():
            self._put("initial", name, piece, piece.array)

    def final(self, step: int) -> str | None:
        """After the last watched step: optimizer states, running statistics, buffers. Collective.

        Returns what is amiss where ranks that should hold equal weights do not.
        """
        amiss = None
        try:
            self.learner.check(f"after step {step}")
        except DivergenceError as error:
            amiss = str(error)
        except NotFiniteError:
            pass  # the numbers are compared themselves, and may be so on both sides
        self.states(step)
        self.learner.meet()
        weights = {name for name, _ in self._named}
        running = running_statistics(self.learner)
        others = {n: (t, t) for n, t in self.learner.state().items() if n not in weights}
        ours = {id(p) for _, p in self._named}
        others = {
            n: pair for n, pair in others.items() if id(pair[0]) not in ours
        }  # a tied weight's other names
        self._take("statistic", {n: pair for n, pair in others.items() if n in running})
        self._take("buffer", {n: pair for n, pair in others.items() if n not in running})
        return amiss

    def states(self, step: int) -> None:
        """Writes the optimizer's states down as they are after `step`."""
        self._step = step
        for name, piece in optimizer_pieces(self.learner).items():
            self._put("state", name.removeprefix("optimizer/"), piece, piece.array)

    def weights(self, step: int) -> None:
        """Writes the trained weights down as they are after `step`."""
        self._step = step
        for name, piece in self._weights("weight").items():
            self._put("weight", name, piece, piece.array)

    def _weights(self, kind: str) -> dict[str, Piece]:
        return {
            piece.name: piece for piece in owned(self.learner, {n: (p, p) for n, p in self._named}).values()
        }

    def _take(self, kind: str, tensors: dict[str, tuple[Any, Any]]) -> None:
        for piece in owned(self.learner, tensors).values():
            self._put(kind, piece.name, piece, piece.array)

    def _put(self, kind: str, name: str, like: Piece, array: np.ndarray) -> None:
        if like.dtype == "bfloat16":
            array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        number = key(kind, self._step, name)
        self.pieces[number] = Piece(number, like.shape, like.offset, np.asarray(array))

    def _compare_copies(self, kind: str, held: Iterable[tuple[str, Any, Any]]) -> None:
        """Finds the copies of one tensor that differ between ranks, and keeps those. Collective."""
        if self.mesh.ranks == 1:
            return
        seat, arrays = self.mesh.seats["tensor"], {}
        rows = []
        for name, parameter, tensor in held:
            arrays[name] = tensor.numpy()
            digest = hashlib.blake2b(np.ascontiguousarray(arrays[name]).tobytes(), digest_size=8).hexdigest()
            rows.append([name, seat if hasattr(parameter, "cut") else -1, digest])
        found: dict[tuple[str, int], dict[str, list[int]]] = {}
        for rank, told in enumerate(self.mesh.gather(rows)):
            for name, part, digest in told:
                found.setdefault((name, part), {}).setdefault(digest, []).append(rank)
        for (name, part), groups in found.items():
            if len(groups) > 1:
                number = key(kind, self._step, name)
                self.apart[number] = list(groups.values())
                if name in arrays and part in (-1, seat):
                    self.copies[number] = arrays[name].astype("float64")


def running_statistics(learner: Learner) -> set[str]:
    """The names of BatchNorm's running means and variances, by the kind of the layer that holds them."""
    found = set()
    for name, layer in learner.named_layers():
        if "BatchNorm" in type(layer).__name__ and hasattr(layer, "_mean") and hasattr(layer, "_variance"):
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}_mean", f"{prefix}_variance"}
    return found
