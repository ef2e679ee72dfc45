"""Records a run inside a rank: gradients, updates, optimizer states, statistics, buffers, and the layers' outputs.

Everything has whole-model names. A rank records its main replicas, as for a checkpoint (train.state): slices with their
offset, copies once. If copies differ between ranks, every rank records its copy. Each quantity is passed on at once, so
only one is in memory at a time.

A layer's output is recorded as two numbers per sample, its sum and its sum of squares. They can be compared for any
split of a batch, because they add up over slices: columns on tensor ranks, and tokens on sequence ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_dp.checkpoint import TensorShard
from paddle_dp.core.consistency import differing_copies
from paddle_dp.core.placed_model import Placed
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.exchange.roundings import roundings
from paddle_dp.learner import Learner
from paddle_dp.model.compiled import is_compiled
from paddle_dp.proof.trace_files import MODEL_LAYER, key_of
from paddle_dp.tensors import widened
from paddle_dp.train.state import optimizer_states, placed_shard


class OutputHooks:
    """Hooks on every layer of a learner, active inside `with`; `take` returns and removes their records."""

    def __init__(self, learner: Learner):
        self.order: list[str] = []  # layers in the order of their first output
        self._calls: defaultdict[str, list[tuple[bool, np.ndarray]]] = defaultdict(list)
        self.active = False
        self._hooks = [
            layer.register_forward_post_hook(partial(self._record, name or MODEL_LAYER))
            for name, layer in learner.placed.named_layers()
            if layer is learner.model
            or not is_compiled(learner.model)  # its layers are called during tracing
        ]

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exception: object) -> None:
        self.active = False

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, name: str, layer: Any, inputs: Any, output: Any) -> None:
        if not self.active:
            return
        for tensor in paddle.utils.flatten(output):
            if isinstance(tensor, paddle.Tensor) and tensor.is_floating_point() and tensor.ndim:
                if name not in self._calls and name not in self.order:
                    self.order.append(name)
                self._calls[name].append((paddle.is_grad_enabled(), _sums(tensor)))
                return  # the first tensor of several: an LSTM's outputs, not its states

    def take(self, rows: list[int], counted: list[int]) -> dict[str, np.ndarray]:
        """Arrays [samples of this rank, 2] by "layer#call"; `rows`: samples per micro-batch, of which `counted` count.

        A layer under recompute is called without gradients and again with them: the first call counts. An output is
        left out if its rows are not a multiple of the samples.
        """
        calls, self._calls = self._calls, defaultdict(list)
        result: dict[str, np.ndarray] = {}
        for name, outputs in calls.items():
            first = [sums for graded, sums in outputs if not graded] or [sums for _, sums in outputs]
            each, rest = divmod(len(first), len(rows))
            for call in range(0 if rest else each):
                micro_batches = [*zip(first[call::each], rows, counted, strict=True)]
                if all(len(sums) % n == 0 for sums, n, _ in micro_batches):
                    by_sample = [sums.reshape(n, -1, 2).sum(1) for sums, n, counts in micro_batches if counts]
                    result[f"{name}#{call}"] = np.concatenate([np.zeros((0, 2)), *by_sample])
        return result


def _sums(tensor: paddle.Tensor) -> np.ndarray:
    """The sum and the sum of squares of each row of the first dim, [rows, 2], in float64."""
    with paddle.no_grad():
        flat = tensor.detach().astype("float64").reshape([tensor.shape[0], -1])
        return np.asarray(paddle.stack([flat.sum(1), flat.square().sum(1)], axis=1).numpy())


Put = Callable[[str, TensorShard], None]


class ProofRecorder:
    """Records one learner's updates, and passes this rank's shard of each quantity to `put`, by key.

    `copies`: this rank's copies of quantities that differ between ranks; `rounded`: by key, the bound of this rank's
    rounding error in a gradient, as a 2-norm. `before_update` is called between the gradients of a recorded update and
    the update. Without `updates`, neither updates nor optimizer states are recorded.
    """

    def __init__(
        self,
        learner: Learner,
        put: Put,
        updates: bool = True,
        before_update: Callable[[int], None] = lambda step: None,
    ):
        self.learner, self.mesh = learner, learner.mesh
        self._put_shard, self._updates, self._before_update = put, updates, before_update
        self.rounded: dict[str, float] = {}
        roundings.watch()
        self.copies: dict[str, np.ndarray] = {}
        self.copy_groups: dict[str, list[list[int]]] = {}  # by key: groups of ranks that hold the same bits
        self.recorded: list[int] = []  # the steps with a recorded update
        self._learner_update, self._step = learner.update, 0
        learner.update = self._recorded_update  # type: ignore[method-assign]
        self._named = learner.placed.named_parameters()
        placement_of = learner.placed.placements.placement_of
        self._parameters: list[Placed] = [(name, p, placement_of(p)) for name, p in self._named]

    def watch(self, step: int) -> None:
        """Sets the step of the next update; 0: do not record it."""
        self._step = step
        roundings.take()  # drops roundings outside of updates: of a trial, an evaluation

    @contextmanager
    def probing(self, step: int) -> Iterator[None]:
        """Context that records gradients as a probe's, without an update of weights, learning rate or loss scale."""
        learner, scale = self.learner, self.learner.mixed.scale
        update, rate_step = learner.update, learner.rate.step
        scale_state = scale.state() if scale is not None else {}
        learner.update = partial(self._record_probe, step)  # type: ignore[method-assign]
        learner.rate.step = lambda: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            learner.update = update  # type: ignore[method-assign]
            learner.rate.step = rate_step  # type: ignore[method-assign]
            if scale is not None:
                scale.load(scale_state)

    def _record_probe(self, step: int) -> None:
        self._step = step
        with self.learner.weights.global_gradients():
            self._put_all("probe", self._gradients())
        self._record_roundings("probe")

    def _recorded_update(self) -> None:
        if not self._step:
            self._learner_update()
            return
        with self.learner.weights.global_gradients():
            gradients = self._gradients()
            self._put_all("gradient", gradients)
            self._compare_copies("gradient", gradients)
        del gradients
        self._record_roundings("gradient")
        self._before_update(self._step)
        weights = self._parameters if self._updates else []
        before = {shard.name: _numbers(shard) for shard in self._shards(weights)}
        self._learner_update()
        self._compare_weights()
        frozen = {name for name, p in self._named if p.stop_gradient}
        for after in self._shards(weights):
            kind = "frozen" if after.name in frozen else "update"
            self._put(kind, after, _subtract(before.pop(after.name), _numbers(after)))
        self.recorded.append(self._step)

    def _gradients(self) -> list[Placed]:
        trained = [placed for placed in self._parameters if not placed[1].stop_gradient]
        return [(name, p.grad, placement) for name, p, placement in trained if p.grad is not None]

    def _record_roundings(self, kind: str) -> None:
        bounds = roundings.take()
        for name, parameter in self._named:
            if (bound := bounds.get(id(parameter))) is not None:
                self.rounded[key_of(kind, self._step, name)] = bound * self.learner.unscaled_by

    def initial(self) -> None:
        """Records the weights before the first update."""
        self._put_all("initial", self._parameters)

    def final(self, step: int) -> str | None:
        """Records optimizer states, running statistics and buffers, after the last step. Collective.

        Returns the error if ranks that should hold equal weights do not.
        """
        divergence = None
        try:
            self.learner.check(f"after step {step}")
        except DivergenceError as error:
            divergence = str(error)
        except NotFiniteError:
            pass  # the comparison judges the numbers; both sides may have the same ones
        if self._updates:
            self.states(step)
        self._step = step
        self.learner.statistics.sync()
        weights = {id(p) for _, p in self._named}  # not by their names: a tied weight has several
        running = running_statistics(self.learner)
        for name, tensor, placement in self.learner.placed.shards():
            if id(tensor) not in weights:
                self._put("statistic" if name in running else "buffer", placed_shard(name, tensor, placement))
        return divergence

    def states(self, step: int) -> None:
        """Records the optimizer states after `step`."""
        self._step = step
        with self.learner.weights.optimizer_states_on_device():
            states = optimizer_states(self.learner)
            self._put_all("state", [(n.removeprefix("optimizer/"), *where) for n, *where in states])

    def weights(self, step: int) -> None:
        """Records the weights after `step`. Collective."""
        self._step = step
        self._compare_weights()
        self._put_all("weight", self._parameters)

    def _shards(self, tensors: Iterable[Placed]) -> Iterator[TensorShard]:
        return (placed_shard(*placed) for placed in self.learner.placed.main_replicas(tensors))

    def _put_all(self, kind: str, tensors: Iterable[Placed]) -> None:
        for shard in self._shards(tensors):
            self._put(kind, shard)

    def _put(self, kind: str, shard: TensorShard, array: np.ndarray | None = None) -> None:
        """Passes a shard on, with `array` in place of its numbers if given."""
        array = _numbers(shard) if array is None else array
        key = key_of(kind, self._step, shard.name)
        self._put_shard(key, TensorShard(key, shard.global_shape, shard.offset, array))

    def _compare_weights(self) -> None:
        """Keeps this rank's copies of weights that differ between ranks. Collective."""
        self.learner.weights.wait()
        stored = [placed for placed in self._parameters if self.learner.placed.is_stored(placed[1])]
        self._compare_copies("weight", stored)

    def _compare_copies(self, kind: str, placed_tensors: Sequence[Placed]) -> None:
        """Keeps this rank's copies of tensors that differ between ranks. Collective."""
        if self.mesh.ranks == 1:
            return
        slice_indices = {name: placement.slice_index for name, _, placement in placed_tensors}
        tensors = {name: tensor for name, tensor, _ in placed_tensors}
        rows = [[name, slice_indices[name], digest(tensor.numpy())] for name, tensor in tensors.items()]
        for (name, slice_index), groups in differing_copies(self.mesh.gather(rows)).items():
            key = key_of(kind, self._step, name)
            self.copy_groups[key] = groups
            if slice_indices.get(name) == slice_index:
                self.copies[key] = tensors[name].numpy().astype("float64")


def digest(array: np.ndarray) -> str:
    """The digest of an array's bits."""
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).data, digest_size=8).hexdigest()


def _numbers(shard: TensorShard) -> np.ndarray:
    """A shard's numbers; bfloat16, which is stored as bits, in float32."""
    return widened(shard.array, shard.dtype) if shard.dtype == "bfloat16" else shard.array


def _subtract(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """after - before in float64; in place if `before` is float64, too."""
    out = before if before.dtype == np.float64 else None
    return np.asarray(np.subtract(after, before, out=out, dtype="float64"))


def running_statistics(learner: Learner) -> set[str]:
    """The names of BatchNorm's running means and variances."""
    names = set()
    for name, layer in learner.placed.named_layers():
        if "BatchNorm" in type(layer).__name__ and hasattr(layer, "_mean") and hasattr(layer, "_variance"):
            prefix = f"{name}." if name else ""
            names |= {f"{prefix}_mean", f"{prefix}_variance"}
    return names
