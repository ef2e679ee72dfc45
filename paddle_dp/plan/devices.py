"""Accelerators as numbers from their makers' data sheets: peak rates, memory, links, and the nodes they are sold in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from paddle_dp.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, and the node around it.

    `peak16`, `peak32`: FLOP/s of dense products of 16-bit and of float32 numbers (TF32, if the device has it).
    `memory`: bytes. `memory_rate`, `card_link`: bytes/s of its memory, and of its link to the other cards of its node,
    in one direction. `node_link`: bytes/s of all network cards of a node together, in one direction. `node`: cards in
    a node. `bfloat16`: the device multiplies bfloat16. `family`: its architecture, as in the
    published runs that judge its forecasts. `accelerator`: it is no CPU, which emulates 16 bits in float32.
    """

    name: str
    family: str
    peak16: float
    peak32: float
    memory: float
    memory_rate: float
    card_link: float
    node_link: float
    source: str
    node: int = 8
    bfloat16: bool = True
    accelerator: bool = True


_DGX_A100 = "node: DGX A100, 8 × 200 Gbit/s"
_DGX_H100 = "node: DGX H100, 8 × 400 Gbit/s"
_DGX_1 = "node: DGX-1, 4 × 100 Gbit/s"
_A100 = Device(
    name="a100-80", family="a100", peak16=312e12, peak32=156e12, memory=80e9, memory_rate=2.039e12,
    card_link=300e9, node_link=200e9, source=f"NVIDIA A100 data sheet (SXM4, 80 GB, June 2021); {_DGX_A100}",
)  # fmt: skip
_H100 = Device(
    name="h100", family="h100", peak16=989e12, peak32=494e12, memory=80e9, memory_rate=3.35e12,
    card_link=450e9, node_link=400e9, source=f"NVIDIA H100 data sheet (SXM5, dense); {_DGX_H100}",
)  # fmt: skip
_V100 = Device(
    name="v100-32", family="v100", peak16=125e12, peak32=15.7e12, memory=32e9, memory_rate=0.9e12,
    card_link=150e9, node_link=50e9, source=f"NVIDIA V100 data sheet (SXM2, 32 GB); {_DGX_1}", bfloat16=False,
)  # fmt: skip
_NVLINK_400 = "with NVLink of 400 GB/s in both directions"
_DEVICES = (
    _A100,
    replace(_A100, name="a100-40", memory=40e9, memory_rate=1.555e12,
            source=f"NVIDIA A100 data sheet (SXM4, 40 GB); {_DGX_A100}"),
    replace(_A100, name="a800-80", card_link=200e9, source=f"as a100-80, {_NVLINK_400}; {_DGX_A100}"),
    _H100,
    replace(_H100, name="h800", card_link=200e9, source=f"as h100, {_NVLINK_400}; {_DGX_H100}"),
    replace(_H100, name="h200", memory=141e9, memory_rate=4.8e12,
            source=f"NVIDIA H200 data sheet (SXM5, dense); {_DGX_H100}"),
    _V100,
    replace(_V100, name="v100-16", memory=16e9, source=f"NVIDIA V100 data sheet (SXM2, 16 GB); {_DGX_1}"),
)  # fmt: skip
DEVICES = {device.name: device for device in _DEVICES}
_ALIASES = {"a100": "a100-80", "a800": "a800-80", "h100-80": "h100", "h800-80": "h800", "v100": "v100-32"}


def device_named(name: str) -> Device:
    """The device of this name. Raises UsageError, with the nearest name, for one that no table has."""
    key = name.strip().lower().replace("_", "-").removesuffix("gb")
    key = _ALIASES.get(key, key)
    if "," in name:
        raise UsageError(
            f"--device {name}: a plan is of one kind of card. In a mixture all wait for the slowest, and each holds "
            "what the smallest can: plan with that one."
        )
    if key not in DEVICES:
        hint = did_you_mean(key, DEVICES, "Devices:")
        raise UsageError(f"--device {name}: there is no data sheet of that name.{hint}")
    return DEVICES[key]


@cache
def used_cards(ranks: int, node: int) -> int:
    """The cards that so many ranks use of each node of `node`: the most that divide them."""
    return max(n for n in range(1, min(ranks, node) + 1) if ranks % n == 0)
