"""Where fleet is silently wrong, on any device, and what puts it right. Nothing here is applied by `install`.

| fleet 3.3.1 (and 2.6.2 unless said)                    | what one sees              | mend                           |
|--------------------------------------------------------|----------------------------|--------------------------------|
| tied weights under pipeline are in the global norm once| loss off by 4e-4 in 5 steps| `count_tied_weights_once`      |
| per stage (3.x: it compares names with attribute names)|                            |                                |
| norms and biases on split sequences keep their own     | loss off by 4e-3           | `mark_sequence_parallel`       |
| gradients unless they are marked                       |                            |                                |
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
    """Lets a global-norm clip count each shared weight of a PipelineLayer on one stage; returns how many are shared.

    Call it before the optimizer's first step. The clip leaves out parameters whose `is_firstly_shared` is false.
    """
    shared = getattr(pipeline, "shared_comm", {})  # 2.6 has none without a pipeline
    count = 0
    for meeting in shared.values():
        names = meeting.get("weight_attr", meeting.get("shared_weight_attr"))  # a word in 2.6, a list in 3.x
        for name in [names] if isinstance(names, str) else names:
            getattr(meeting["layer"], name).is_firstly_shared = dist.get_rank() == min(meeting["ranks"])
            count += 1
    return count


def mark_sequence_parallel(
    model: paddle.nn.Layer, whole: Callable[[str, Any], bool], micro_batches: int = 1, fuse: bool = False
) -> list[str]:
    """Lets every parameter that sees only its own stretch of the sequence sum its gradient over the tensor axis.

    `whole(name, parameter)` says which of them these are: norms, and biases added to split activations; a parameter
    that is itself cut never is. `micro_batches` is how many backward passes make one update. Returns the marked names.
    """
    marked = []
    for name, parameter in model.named_parameters():
        if not parameter.is_distributed and whole(name, parameter):
            sequence_parallel_utils.mark_as_sequence_parallel_parameter(parameter)
            marked.append(name)
    sequence_parallel_utils.register_sequence_parallel_allreduce_hooks(model, micro_batches, fuse)
    return marked


def clear_gradients(parameters: Iterable[paddle.Tensor]) -> None:
    """Zeroes gradients in place; instead of `optimizer.clear_grad()` where sharding v2 has fused them.

    There a gradient is a view of a buffer that the hooks add to; dropping the view leaves the sums in the buffer.
    """
    with paddle.no_grad():
        for parameter in parameters:
            for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
                if gradient is not None:
                    gradient.zero_()


def scale_for_sequence_axis(loss: paddle.Tensor, hcg: Any) -> paddle.Tensor:
    """A rank's mean loss over its stretch of the sequence, such that the sum over the sep axis is the whole mean.

    `hcg` is the HybridCommunicateGroup. A loss already divided by the whole count must not be scaled.
    """
    return loss / max(1, hcg.get_sep_parallel_world_size())
