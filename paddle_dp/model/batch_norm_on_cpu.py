"""On CPUs, lets a paddle.nn.SyncBatchNorm normalize over this rank's samples, as one on a single GPU does.

Paddle 3.3.1 has no CPU kernel for it, not even for evaluation. Where ranks share its statistics, `synchronize`
(core/batch_norm.py) replaces it.
"""

from __future__ import annotations

from types import MethodType

import paddle
from paddle import nn

from paddle_dp.core.batch_norm import forward


def local_batch_norms(model: nn.Layer) -> None:
    """Makes the model's SyncBatchNorms compute on CPUs, in place. One with a replaced `forward` keeps it."""
    if paddle.get_device() != "cpu":
        return
    for layer in model.sublayers(include_self=True):
        if type(layer).forward is nn.SyncBatchNorm.forward and "forward" not in vars(layer):
            layer.forward = MethodType(forward, layer)
