"""One exchange for all sharded layers that read the same tensor: q, k and v of an attention, gate and up of an MLP.

Fleet's layers exchange separately: three all-reduces for q, k and v in backward, or three all-gathers and
reduce-scatters with sequence parallelism, where Megatron's one wide matrix has one (arXiv:2205.05198, figure 5). Here
the first layer exchanges, and the others reuse its result; backward adds their gradients and all-reduces once.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.core.data_group import Group

Exchange = Callable[[paddle.Tensor], paddle.Tensor]
_CACHE_ATTRIBUTE = (
    "exchanged_for_cut_layers"  # an attribute of the input, so the cache lives as long as the input
)


def shared(x: paddle.Tensor, exchange: Exchange, key: object) -> paddle.Tensor:
    """`exchange(x)`, computed once for a tensor as long as it does not change. `key`: identifies the exchange and its
    group.

    A leaf that requires a gradient outlives its backward, but the cached graph does not: each layer exchanges it.
    """
    if not paddle.in_dynamic_mode() or (x.is_leaf and not x.stop_gradient):
        return exchange(x)
    state = key, x.inplace_version, paddle.is_grad_enabled()
    cached = getattr(x, _CACHE_ATTRIBUTE, None)
    if cached is None or cached[0] != state:
        cached = state, exchange(x)
        setattr(x, _CACHE_ATTRIBUTE, cached)
    output: paddle.Tensor = cached[1]
    return output


def copied(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    """Megatron's f: the tensor itself, the same on all ranks; its gradients are all-reduced."""
    return shared(x, lambda tensor: mp_ops._c_identity(tensor, group=group), ("copied", *group.ranks))
