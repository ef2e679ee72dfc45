"""Exact dropout and drop path: a sample loses the same elements on any number of ranks, in every layout
(docs/dropout.md).

`masks` is the arithmetic; `scope` tracks a call's samples and tensor slice; `calls` replaces Paddle's functions;
`uncaught` detects other random draws; learners use `Draws` (learner/runner.py). Models need no change. Random
numbers for data (augmentation) are in `data.randomness`.
"""

from paddle_dp.core.dropout.calls import install
from paddle_dp.core.dropout.scope import EVALUATION, Scope, current, number_blocks, within_slice

__all__ = ["EVALUATION", "Scope", "current", "install", "number_blocks", "within_slice"]
