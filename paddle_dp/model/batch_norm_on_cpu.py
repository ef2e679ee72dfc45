"""On CPUs, lets a paddle.nn.SyncBatchNorm normalize over this rank's samples, as one on a single GPU does.

Paddle 3.3.1 has no CPU kernel for it, not even for evaluation. Where ranks share its statistics, `synchronize`
(core/batch_norm.py) replaces it.
"""

from __future__ import annotations

from types import MethodType

import paddle
import paddle.nn.functional as F
from paddle import nn


def local_batch_norms(model: nn.Layer) -> None:
    """Makes the model's SyncBatchNorms compute on CPUs, in place. One with a replaced `forward` keeps it."""
    if paddle.get_device() != "cpu":
        return
    for layer in model.sublayers(include_self=True):
        if type(layer).forward is nn.SyncBatchNorm.forward and "forward" not in vars(layer):
            layer.forward = MethodType(forward, layer)


def forward(self: nn.SyncBatchNorm, x: paddle.Tensor) -> paddle.Tensor:
    """A local BatchNorm's forward; its name and "self": as in bias_on_cpu.py."""
    settings = self._momentum, self._epsilon, self._data_format
    return F.batch_norm(x, self._mean, self._variance, self.weight, self.bias, self.training, *settings)
