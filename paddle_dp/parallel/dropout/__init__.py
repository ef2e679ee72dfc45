"""Dropout that drops the same of every sample on any number of ranks, in every layout: what docs/dropout.md explains.

`masks` is the arithmetic, `scope` says which samples and which slice of a tensor are at hand, `calls` and `fused` are
the functions that `places` puts into Paddle's places, `unseen` notices the draws that none of them can catch, and
`draws` is what a learner asks. No layer of our own is here, and models know nothing of it. Random numbers of data
(augmentation) are `data.randomness`.
"""

from paddle_dp.parallel.dropout.draws import Draws
from paddle_dp.parallel.dropout.places import install
from paddle_dp.parallel.dropout.scope import Scope, current, number_elements, within_slice

__all__ = ["Draws", "Scope", "current", "install", "number_elements", "within_slice"]
