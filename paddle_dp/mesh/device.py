"""Chooses a process's device: the first that Paddle sees here, or the requested one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paddle_dp.errors import UsageError, did_you_mean


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
    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        device_types.append("gpu")
    if paddle.is_compiled_with_xpu() and paddle.base.core.get_xpu_device_count():
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
