"""Silent faults of fleet on any device, and their corrections. `install` applies none of them.

| fleet 3.3.1                                            | symptom                    | correction                     |
|--------------------------------------------------------|----------------------------|--------------------------------|
| tied weights under pipeline are in the global norm once| loss off by 4e-4 in 5 steps| `count_tied_weights_once`      |
| per stage (it compares names with attribute names)     |                            |                                |
| gradients of norms and biases on sequence shards are   | loss off by 4e-3           | `mark_sequence_parallel`       |
| not summed unless they are marked                      |                            |                                |
| partial send/receive cuts activations that sequence    | loss off by 8e-2           | `PIPELINE_SETTINGS`            |
| parallelism has cut already (default: on)              |                            |                                |
| sharding v2's fused gradients survive `clear_grad()`   | loss off by 0.48           | `clear_gradients`              |
| gradients are summed over the sep axis, not averaged   | loss off by 0.3            | `scale_for_sequence_axis`      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils import sequence_parallel_utils

# For `strategy.pipeline_configs`.
PIPELINE_SETTINGS = {"enable_partial_send_recv": False}


def count_tied_weights_once(pipeline: Any) -> int:
    """Makes a global-norm clip count each shared weight of a PipelineLayer on one stage; returns their number.

    Call it before the optimizer's first step. The clip omits parameters with `is_firstly_shared` false.
    """
    count = 0
    for weights in pipeline.shared_comm.values():
        for name in weights["weight_attr"]:
            getattr(weights["layer"], name).is_firstly_shared = dist.get_rank() == min(weights["ranks"])
            count += 1
    return count


def mark_sequence_parallel(
    model: paddle.nn.Layer, selects: Callable[[str, Any], bool], micro_batches: int = 1, fuse: bool = False
) -> list[str]:
    """Registers the sum over the tensor axis for gradients of parameters that are applied to sequence shards.

    `selects(name, parameter)` selects them: norms, and biases added to sharded activations. A tensor-parallel parameter
    is never marked. `micro_batches` is the number of backward passes per update. Returns the marked names.
    """
    marked = []
    for name, parameter in model.named_parameters():
        if not parameter.is_distributed and selects(name, parameter):
            sequence_parallel_utils.mark_as_sequence_parallel_parameter(parameter)
            marked.append(name)
    sequence_parallel_utils.register_sequence_parallel_allreduce_hooks(model, micro_batches, fuse)
    return marked


def clear_gradients(parameters: Iterable[paddle.Tensor]) -> None:
    """Zeroes gradients in place. Use it instead of `optimizer.clear_grad()` under sharding v2 with fused gradients.

    There a gradient is a view of a buffer that hooks add to; `clear_grad` drops the view and leaves the sums.
    """
    with paddle.no_grad():
        for parameter in parameters:
            for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
                if gradient is not None:
                    gradient.zero_()


def scale_for_sequence_axis(loss: paddle.Tensor, hcg: Any) -> paddle.Tensor:
    """Scales a rank's mean loss over its sequence shard, so that the sum over the sep axis is the global mean.

    `hcg` is the HybridCommunicateGroup. Do not scale a loss that is already divided by the global count.
    """
    return loss / max(1, hcg.get_sep_parallel_world_size())
