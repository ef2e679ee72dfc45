"""Exact dropout and drop path: a sample loses the same elements on any number of ranks, in every layout
(docs/dropout.md).

`masks` is the arithmetic; `scope` tracks the samples and the tensor slice of a call; `calls` and `fused` are the
functions that `patching` puts into Paddle; `uncaught` detects random draws that they do not replace; learners use
`draws`. Models need no change. Random numbers for data (augmentation) are in `data.randomness`.
"""

from paddle_dp.parallel.dropout.draws import Draws
from paddle_dp.parallel.dropout.patching import install
from paddle_dp.parallel.dropout.scope import Scope, current, number_elements, within_slice

__all__ = ["Draws", "Scope", "current", "install", "number_elements", "within_slice"]
