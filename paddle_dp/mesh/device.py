"""Chooses a process's device, lists all devices of a process, runs work on one of them, and copies between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import paddle


def choose(requested: str, variables: Mapping[str, str] = os.environ) -> str:
    """Sets Paddle's device and returns its name: "cpu", "gpu:0", "npu:3".

    `requested` is "auto", "cpu", "gpu", "xpu" or the type of a custom device. The launcher selects each process's
    device by FLAGS_selected_gpus, or the same name with the device's type. Raises UsageError if there is no such
    device.
    """
    import paddle

    here = kinds()
    kind = here[0] if requested == "auto" else requested
    if kind not in here:
        raise UsageError(not_here(requested, here))
    name = kind if kind == "cpu" else f"{kind}:{variables.get(f'FLAGS_selected_{kind}s', '0').split(',')[0]}"
    paddle.set_device(name)
    return name


def kinds() -> list[str]:
    """Returns the types of device of Paddle on this machine, in its order of preference; "cpu" is last."""
    import paddle

    device_types = list(paddle.device.get_all_custom_device_type() or ())
    if paddle.is_compiled_with_cuda() and _visible("gpu"):
        device_types.append("gpu")
    if paddle.is_compiled_with_xpu() and _visible("xpu"):
        device_types.append("xpu")
    return [*device_types, "cpu"]


def current_device() -> Any:
    """Returns Paddle's current device as a place: `to_tensor` is twice as fast with it."""
    import paddle

    return device_from_name(paddle.device.get_device())


def device_from_name(device: str) -> Any:
    """Returns the place of a device's name: "cpu", "gpu:0", "npu:3"."""
    import paddle

    kind, _, number = device.partition(":")
    if kind == "cpu":
        return paddle.CPUPlace()
    if kind == "gpu":
        return paddle.CUDAPlace(int(number))
    return paddle.XPUPlace(int(number)) if kind == "xpu" else paddle.CustomPlace(kind, int(number))


def not_here(requested: str, here: list[str]) -> str:
    """Returns the message for a device that Paddle does not see, with the next step."""
    if requested == "gpu":
        return (
            "train.device is gpu, but Paddle sees none here. Install paddlepaddle-gpu from Paddle's own package "
            "index and look at CUDA_VISIBLE_DEVICES, or set train.device=cpu."
        )
    return (
        f"train.device is {requested}, but Paddle sees none here.{did_you_mean(requested, here, 'It sees')} "
        "Install Paddle's plugin for that device, or set train.device=auto."
    )


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


def synchronize(device: str) -> None:
    """Waits until a device of this process has done all its work; a CPU has."""
    import paddle

    if device != "cpu":
        paddle.device.synchronize()


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
    """Returns the device name of a place of any of Paddle's classes: "gpu:1" for "Place(gpu:1)"."""
    return str(device).removeprefix("Place(").removesuffix(")")
