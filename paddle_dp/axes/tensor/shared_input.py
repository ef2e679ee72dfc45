"""One exchange for all sharded layers that read the same tensor: q, k and v of an attention, gate and up of an MLP.

Fleet's layers exchange separately: three all-reduces for q, k and v in backward, or three all-gathers and
reduce-scatters with sequence parallelism, where Megatron's one wide matrix has one (arXiv:2205.05198, figure 5). Here
the first layer exchanges, and the others reuse its result (`core.precision.shared`); backward adds their gradients and
all-reduces once.
"""

from __future__ import annotations

import paddle
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.core.data_group import Group
from paddle_dp.core.precision import shared


def copied(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    """Megatron's f: the tensor itself, the same on all ranks; its gradients are all-reduced."""
    return shared(x, lambda tensor: mp_ops._c_identity(tensor, group=group), ("copied", *group.ranks))
