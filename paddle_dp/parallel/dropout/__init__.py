"""Exact dropout and drop path: on any number of ranks, in every layout, a sample loses the same (docs/dropout.md).

`masks` is the arithmetic; `scope` tracks which samples and which slice of a tensor a call is for; `calls` and `fused`
are the functions that `patching` puts into Paddle; `uncaught` detects random draws that they do not replace; `draws` is
what a learner uses. Models need no change. Random numbers for data (augmentation) are in `data.randomness`.
"""

from paddle_dp.parallel.dropout.draws import Draws
from paddle_dp.parallel.dropout.patching import install
from paddle_dp.parallel.dropout.scope import Scope, current, number_elements, within_slice

__all__ = ["Draws", "Scope", "current", "install", "number_elements", "within_slice"]
