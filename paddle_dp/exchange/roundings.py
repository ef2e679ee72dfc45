"""Bounds on the rounding errors of gradients that travel with fewer digits, recorded where they are rounded, for a
proof.

A number rounded to nearest loses at most u of itself; u = 2⁻⁸ in bfloat16, with its 8 binary digits. So a tensor's
error has at most u times its 2-norm. n successive roundings, as when numbers are rounded and then added up in n - 1
rounded sums, lose at most (1 + u)ⁿ - 1 of the sum of all norms (Higham, Accuracy and Stability of Numerical Algorithms,
3.1). Errors of several tensors at most add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import paddle

from paddle_dp.tensors import Array, dtype_of

DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def is_narrower(reduce_dtype: str, dtype: str) -> bool:
    """Whether gradients of `dtype` lose digits in `reduce_dtype`."""
    return DIGITS[reduce_dtype] < DIGITS[dtype]


def reduce_dtype_of(requested: str | None, parameters: Iterable[paddle.Tensor]) -> str | None:
    """The dtype in which these parameters' gradients travel if `requested` is asked for; None: unrounded.

    float64 gradients are never rounded: a proof uses float64 to check a layout's arithmetic, and compares rounding
    errors in the recipe's precision.
    """
    dtypes = {dtype_of(parameter) for parameter in parameters}
    return None if requested is None or dtypes <= {requested} or "float64" in dtypes else requested


class Roundings:
    """The rounding errors of this rank. Nothing is recorded, and no norm computed, before `watch`."""

    def __init__(self) -> None:
        self._watched = False
        self._lost: defaultdict[int, float] = defaultdict(float)

    def watch(self) -> None:
        """Starts recording."""
        self._watched = True
        self._lost.clear()

    def note(
        self, parameter: paddle.Tensor, numbers: Array | paddle.Tensor, reduce_dtype: str, times: int = 1
    ) -> None:
        """Records that numbers of a parameter's gradient are about to be rounded to `reduce_dtype`, `times` times in a
        row."""
        if not self._watched or not is_narrower(reduce_dtype, dtype_of(parameter)):
            return
        if isinstance(numbers, paddle.Tensor):
            size = numbers.astype("float64").norm().item() if numbers.size else 0.0
        else:
            size = float(np.linalg.norm(numbers.astype("float64")))
        self._lost[id(parameter)] += ((1 + 2.0 ** -DIGITS[reduce_dtype]) ** times - 1) * size

    def take(self) -> dict[int, float]:
        """Bounds on the 2-norm of this rank's errors since the last call, by a parameter's id()."""
        lost = dict(self._lost)
        self._lost.clear()
        return lost


roundings = Roundings()  # of this process
