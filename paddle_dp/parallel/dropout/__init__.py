"""Dropout that drops the same of every sample on any number of ranks, in every layout: what docs/dropout.md explains.

`masks` is the arithmetic, `scope` says which samples and which part of a tensor are at hand, `calls` are the functions
that stand in Paddle's places, `unseen` notices the draws that none of them can catch, and `draws` is what a learner
asks. No layer of our own is here, and models know nothing of it. Random numbers of data (augmentation) are
`data.randomness`.
"""

from paddle_dp.parallel.dropout.calls import install
from paddle_dp.parallel.dropout.draws import Draws
from paddle_dp.parallel.dropout.scope import Scope, current, number_elements, within_slice

__all__ = ["Draws", "Scope", "current", "install", "number_elements", "within_slice"]
