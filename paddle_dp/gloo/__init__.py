"""The CPU bridge: replaces parts of Paddle on CPUs, so that fleet's hybrid parallelism runs over gloo.

Call `install("cpu")` before `fleet.init`. It works for any fleet script (docs/parallelism.md has one); on an
accelerator it replaces nothing. Fleet's sharding stages 2 and 3 and its sharding v2 run on accelerators only
(docs/decisions/0017): on CPUs a UsageError replaces Paddle's assertion. `axes` cuts, stages and shards models.
`fleet_mends` corrects faults that fleet has on every device: a script calls its functions, `install` does not.

Checked on Paddle 3.3.1 (CPU wheel, Python 3.11); `KNOWN` has the other versions that were tried. G is
paddle.base.core.ProcessGroupGloo, F is paddle.distributed.fleet. Each name of G is also added as `…_on_calc_stream`,
which gloo lacks.

| name                                              | symptom without it                               | file
|---------------------------------------------------|--------------------------------------------------|----------------
| G.create                                          | groups use the same keys of one store: the second| process_groups
|                                                   | hangs or dies (0 of 18 starts on 4 ranks)        |
| TCPStore (its sockets, through /proc/self/fd)     | 40 to 90 ms a call: Nagle, delayed ACKs          | process_groups
| FLAGS_tcp_store_using_libuv (while one is opened) | port taken: SIGABRT in place of an exception     | process_groups
| G.send G.recv G.send_partial G.recv_partial       | block each other; mixed up in groups of 3 or more| p2p
| G._start_coalescing G._end_coalescing             | a block's receives wait one by one, on both sides| p2p
| G.all_reduce                                      | float16: inf; no AVG                             | collectives
| G.reduce                                          | partial sums on the other ranks                  | collectives
| G.reduce_scatter G.reduce_scatter_tensor          | NotImplementedError                              | collectives
| G.all_to_all G.all_to_all_tensor                  | NotImplementedError                              | collectives
| G.all_to_all_single G.all_gather_partial          | NotImplementedError                              | collectives
| G.barrier                                         | gives up after a fixed 30 s                      | collectives
| G.all_gather G.all_gather_into_tensor G.broadcast | refuse strided tensors; no _on_calc_stream twin  | collectives
| G.scatter G.scatter_tensor G.gather               | the same                                         | collectives
| any of them, int16 or complex                     | exit(-1) without a message                       | originals
| the time limit of gloo's contexts, in C++         | a peer 30 s late ends the job, also in backward  | time_limit
|                                                   | of DataParallel, which calls gloo from C++       |
| F.layers.mpu.mp_ops: _c_identity _mp_allreduce    | no CPU kernel                                    | tensor_ops
| _c_concat _c_split                                | no CPU kernel; c_split's gradient joins the wrong| tensor_ops
|                                                   | dim on every device                              |
| _c_softmax_with_cross_entropy                     | no CPU kernel                                    | tensor_ops
| _c_lookup_table                                   | float64: half the gradient is garbage            | tensor_ops
| broadcast_input_data (two modules)                | asserts a GPU                                    | gpu_checks
| pp_layers.recompute_hybrid                        | asserts a GPU                                    | gpu_checks
| parallel.ParallelEnv._device_id                   | AttributeError in PipelineLayer                  | gpu_checks
| core.nccl_version                                 | AttributeError in all_reduce(op=AVG)             | gpu_checks
| distributed.group_sharded_parallel (3 modules),   | an assertion that leads nowhere: refused with a  | gpu_checks
| __init__ of GroupShardedOptimizerStage2 and Stage3| sentence                                         |
| F.utils.tensor_fusion_helper:                     | the same                                         | gpu_checks
| get_current_device_type                           |                                                  |
| Tensor.cuda                                       | load_state_dict moves tensors to a GPU           | gpu_checks
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import paddle

from paddle_dp.errors import UsageError
from paddle_dp.gloo import collectives, gpu_checks, originals, p2p, process_groups, tensor_ops, time_limit
from paddle_dp.gloo.patch import Patch, apply
from paddle_dp.mesh import transport
from paddle_dp.mesh.doors import send_at_once
from paddle_dp.mesh.transport import Patience

# The tests run on 3.3.1. On 3.0.0, 3.1.1 and 3.2.2 (which need protobuf < 7) tensor2 x pipeline2 with tied weights
# matched one process.
KNOWN = ((3, 0), (3, 1), (3, 2), (3, 3))
OVERRIDE = "PADDLE_DP_BRIDGE"  # =try accepts an unknown version
_installed: list[str] = []

__all__ = ["KNOWN", "check_version", "install"]


def install(device: str, *, patience: float | None = None) -> tuple[str, ...]:
    """Makes fleet's hybrid parallelism run over gloo; returns the dotted names in Paddle that were replaced.

    Call it before `fleet.init`, before or after `join`. On another `device` than a CPU, and from the second call on, it
    replaces nothing and returns (). `patience`: seconds that an exchange waits for a late peer, by default `join`'s, or
    600.

    Raises UsageError on a version of Paddle that the bridge does not know.
    """
    if not device.startswith("cpu") or _installed:
        return ()
    check_version(paddle.__version__)
    Patience.seconds = patience = Patience.seconds if patience is None else patience
    originals.save()
    _installed.extend(apply(list(patches())))
    if paddle.distributed.is_initialized():
        time_limit.set_time_limit(0, patience)
        send_at_once()
        transport.endpoint()
    return tuple(_installed)


def is_installed() -> bool:
    """True if `install` has replaced functions in this process."""
    return bool(_installed)


def patches() -> Iterator[Patch]:
    """Yields every patch of the bridge. Call `originals.save()` first."""
    for module in (process_groups, p2p, collectives, tensor_ops, gpu_checks):
        yield from module.patches()


def check_version(version: str) -> None:
    """Raises UsageError unless the bridge knows this version of Paddle or PADDLE_DP_BRIDGE=try."""
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    if numbers in KNOWN or os.environ.get(OVERRIDE) == "try":
        return
    known = ", ".join(".".join(map(str, pair)) for pair in KNOWN)
    raise UsageError(
        f"Paddle {version} is not a version that the CPU bridge knows ({known}): hybrid layouts may hang or compute "
        f"wrong updates. Install paddlepaddle==3.3.1, or set {OVERRIDE}=try and run pytest tests/gloo first."
    )
