"""Lists several devices of one process, runs work on one of them, and copies between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddle_dp.mesh.device import device_from_name

if TYPE_CHECKING:
    import paddle


def devices_of(main_device: str, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the devices of this process, beginning with its `main_device`, "gpu:0".

    These are the devices from its launcher, else all that Paddle sees; a CPU is alone.
    """
    kind, _, first = main_device.partition(":")
    if not first:
        return [main_device]
    selected = variables.get(f"FLAGS_selected_{kind}s")
    numbers = selected.split(",") if selected else map(str, range(_visible(kind)))
    return [main_device, *(f"{kind}:{number}" for number in numbers if number != first)]


def _visible(kind: str) -> int:
    """Returns the number of devices of a kind that Paddle sees here."""
    import paddle

    if kind == "gpu":
        return int(paddle.device.cuda.device_count())
    if kind == "xpu":
        return int(paddle.base.core.get_xpu_device_count())
    return sum(name.startswith(f"{kind}:") for name in paddle.device.get_available_custom_device())


@contextmanager
def on(device: str) -> Iterator[None]:
    """Makes `device` Paddle's current device within the context; the work's tensors must be on it."""
    import paddle

    before = paddle.device.get_device()
    if device == before:
        yield
        return
    paddle.set_device(device)
    try:
        yield
    finally:
        paddle.set_device(before)


def moved(tensor: paddle.Tensor, device: str) -> paddle.Tensor:
    """Returns a copy of a tensor on another device, detached from its graph; a tensor on that device itself.

    The host waits for the source device, and for the copy: streams of two devices do not wait for each other, and freed
    memory may be reused before the copy has read it.
    """
    import paddle

    here = name_of(tensor.place)
    if here == device:
        return tensor
    if here != "cpu":
        paddle.device.synchronize(here)
    with paddle.no_grad():
        return tensor.to(device_from_name(device), blocking=True)


def name_of(device: Any) -> str:
    """Returns the device name of a place of any of Paddle's classes: "gpu:1" for «Place(gpu:1)»."""
    return str(device).removeprefix("Place(").removesuffix(")")
