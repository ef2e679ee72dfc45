"""Installs the bridge on CPUs; on an accelerator it does nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import paddle

from paddle_dp.errors import UsageError
from paddle_dp.gloo import (
    collectives,
    gpu_checks,
    originals,
    p2p,
    process_groups,
    tensor_ops,
    time_limit,
)
from paddle_dp.gloo.patch import Patch, apply
from paddle_dp.mesh import transport
from paddle_dp.mesh.transport import Patience

# The tests run on 3.3.1. On 3.0.0, 3.1.1 and 3.2.2 (which need protobuf < 7) tensor2 x pipeline2 with tied weights
# matched one process.
KNOWN = ((3, 0), (3, 1), (3, 2), (3, 3))
OVERRIDE = "PADDLE_DP_BRIDGE"  # =try accepts an unknown version
_installed: list[str] = []


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
        process_groups.quicken_job_store()
        transport.endpoint()
    return tuple(_installed)


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
