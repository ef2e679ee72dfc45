"""Replaces fleet's checks for a GPU: inputs, recompute and device numbers need none; sharding does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.recompute import recompute

from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import Patch


def broadcast_input_data(hcg: Any, *inputs: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Broadcasts every tensor among the inputs, also in lists and dicts, from the first tensor-parallel rank, in place.

    `hcg` is the HybridCommunicateGroup. The other ranks' tensors may have other shapes. Collective.
    """
    with paddle.no_grad():
        for tensor in _tensors((inputs, keywords)):
            _broadcast(tensor, hcg.get_model_parallel_group(), hcg.get_model_parallel_group_src_rank())
    return inputs, keywords


def _tensors(value: Any) -> Iterator[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors(element)


def _broadcast(tensor: paddle.Tensor, group: Any, source: int) -> None:
    shape = paddle.to_tensor(tensor.shape, dtype="int64")
    if tensor.ndim:
        dist.broadcast(shape, source, group)
    full = tensor if group.rank == 0 else paddle.zeros(shape.tolist(), tensor.dtype)
    dist.broadcast(full, source, group)
    if full is not tensor:
        tensor._clear_data()
        full._share_buffer_to(tensor)
        tensor.get_tensor()._set_dims(full.shape)  # fleet omits this, and reads past a shorter buffer


def recompute_hybrid(context: dict[str, Any], function: Any, *args: Any, **keywords: Any) -> Any:
    """Recomputes without splitting or offloading the inputs, which is useless on a CPU."""
    return recompute(function, *args, **keywords)


def stay(tensor: paddle.Tensor, *_: Any, **__: Any) -> paddle.Tensor:
    """Replaces `Tensor.cuda` on a CPU build; returns the tensor itself."""
    return tensor


def refuse_group_sharded(*_: Any, **__: Any) -> NoReturn:
    """Replaces `group_sharded_parallel` and its classes on a CPU. Raises UsageError."""
    raise UsageError(
        "group_sharded_parallel (fleet's sharding stages 2 and 3) runs on accelerators only, also with the CPU bridge. "
        "On CPUs train with paddle_dp's strategy={use: hybrid, sharding: N, sharding_stage: 2}, or with fleet's stage "
        "1 (sharding_degree in hybrid_configs)."
    )


def refuse_fusion(*_: Any, **__: Any) -> NoReturn:
    """Replaces fleet's fused buffers on a CPU. Raises UsageError."""
    raise UsageError(
        "fleet's fused buffers (tensor_fusion, comm_overlap and split_param of sharding_configs, fused gradients) are "
        "for accelerators only, also with the CPU bridge: switch them off where a script runs on CPUs."
    )


def recent_nccl() -> int:
    """Returns the first version of NCCL with AVG (2.10.0); `collectives` computes AVG on CPUs."""
    return 21000


def patches() -> Iterator[Patch]:
    fleet, sharding = "paddle.distributed.fleet", "paddle.distributed.sharding"
    asserts = 'AssertionError: "Only support xpu, gpu and custom_device now"'
    for module in ("meta_parallel.tensor_parallel", "utils.hybrid_parallel_util"):
        yield Patch(f"{fleet}.{module}", "broadcast_input_data", broadcast_input_data, asserts)
    asserts = (
        'AssertionError: "only support gpu, xpu and custom_device now", or IndexError of a device number'
    )
    for module in ("paddle.distributed", sharding, f"{sharding}.group_sharded"):
        yield Patch(module, "group_sharded_parallel", refuse_group_sharded, asserts)
    for stage in ("optimizer_stage2.GroupShardedOptimizerStage2", "stage3.GroupShardedStage3"):
        owner = f"{fleet}.meta_parallel.sharding.group_sharded_{stage}"
        yield Patch(owner, "__init__", refuse_group_sharded, asserts)
    owner = f"{fleet}.utils.tensor_fusion_helper"
    asserts = 'AssertionError: "tensor fusion helper now only support …"'
    yield Patch(owner, "get_current_device_type", refuse_fusion, asserts, missing="skip")
    owner = f"{fleet}.meta_parallel.parallel_layers.pp_layers"
    asserts = 'AssertionError: "Recompute with mp … only support GPU"'
    yield Patch(owner, "recompute_hybrid", recompute_hybrid, asserts)
    absent = "AttributeError in PipelineLayer: never set in a CPU build"
    yield Patch("paddle.distributed.parallel.ParallelEnv", "_device_id", 0, absent, missing="add")
    absent = "AttributeError in all_reduce(op=AVG), which asks for NCCL's version first"
    yield Patch("paddle.base.core", "nccl_version", recent_nccl, absent, missing="add")
    yield Patch("paddle.Tensor", "cuda", stay, "load_state_dict moves tensors to a GPU", missing="add")
