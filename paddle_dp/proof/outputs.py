"""Records each layer's output in a forward as two numbers per sample, which can be compared for any split of a batch.

The sum and the sum of squares of a sample's outputs also add up over slices: columns on the ranks of the tensor axis,
tokens on those of the sequence axis.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_dp.parallel import Learner
from paddle_dp.parallel.compiled import is_compiled
from paddle_dp.proof.trace_files import WHOLE


class Outputs:
    """Hooks on every layer of a learner, active inside `with`; `taken` returns what they recorded since then."""

    def __init__(self, learner: Learner):
        self.order: list[str] = []  # layers in the order of their first output
        self._calls: dict[str, list[tuple[bool, np.ndarray]]] = {}
        self.active = False
        self._hooks = [
            layer.register_forward_post_hook(partial(self._see, name or WHOLE))
            for name, layer in learner.named_layers()
            if layer is learner.model
            or not is_compiled(learner.model)  # whose layers are called while it is traced
        ]

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exception: object) -> None:
        self.active = False

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, name: str, layer: Any, inputs: Any, output: Any) -> None:
        if not self.active:
            return
        for tensor in paddle.utils.flatten(output):
            if isinstance(tensor, paddle.Tensor) and tensor.is_floating_point() and tensor.ndim:
                if name not in self._calls:
                    self._calls[name] = []
                    if name not in self.order:
                        self.order.append(name)
                self._calls[name].append((paddle.is_grad_enabled(), _sums(tensor)))
                return  # the first tensor of several: an LSTM's outputs, not its states

    def taken(self, rows: list[int], counted: list[int]) -> dict[str, np.ndarray]:
        """By "layer#call", [samples of this rank, 2], for micro-batches of `rows` samples, of which `counted` count.

        A layer under recompute is called without gradients and again with them: the first call counts. An output whose
        rows are not a multiple of the samples is left out.
        """
        found, self._calls = self._calls, {}
        result: dict[str, np.ndarray] = {}
        for name, seen in found.items():
            first = [sums for graded, sums in seen if not graded] or [sums for _, sums in seen]
            each, rest = divmod(len(first), len(rows))
            if rest:
                continue
            for call in range(each):
                parts = [first[micro_batch * each + call] for micro_batch in range(len(rows))]
                if all(len(part) % n == 0 for part, n in zip(parts, rows, strict=True)):
                    kept = [
                        part.reshape(n, -1, 2).sum(1)
                        for part, n, counts in zip(parts, rows, counted, strict=True)
                        if counts
                    ]
                    result[f"{name}#{call}"] = np.concatenate(kept) if kept else np.zeros((0, 2))
        return result


def _sums(tensor: paddle.Tensor) -> np.ndarray:
    """[rows, 2]: the sum and the sum of squares of each row of the first dim, in float64."""
    with paddle.no_grad():
        flat = tensor.detach().astype("float64").reshape([tensor.shape[0], -1])
        return np.asarray(paddle.stack([flat.sum(1), flat.square().sum(1)], axis=1).numpy())
