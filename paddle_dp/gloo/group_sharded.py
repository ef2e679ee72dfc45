"""`group_sharded_parallel` (sharding stages 2 and 3) and sharding v2 on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.base import core

from paddle_dp.gloo.patch import Patch, look_up

SHARDING = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_"
FUSION = "paddle.distributed.fleet.utils.tensor_fusion_helper"


class ModuleView:
    """A module with a few attributes replaced, for one importer only; patching the module would change it for all."""

    def __init__(self, base: Any, **replaced: Any):
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def without_host_copy(add: Callable[..., None]) -> Callable[..., None]:
    """`ParamStorage.add_rank_params` without its copy through the host, which empties a tensor on the host."""

    @functools.wraps(add)
    def add_in_place(storage: Any, parameters: Any, align: Any, convert_gpu: bool = True) -> None:
        add(storage, parameters, align, False)

    return add_in_place


def patches() -> Iterator[Patch]:
    asserts = "AssertionError: «Only GPU and XPU and CustomDevice is supported now»"
    with_gpu = ModuleView(core, is_compiled_with_cuda=lambda: True)
    numbered = ModuleView(paddle, get_device=lambda: "cpu:0")
    for module in ("optimizer_stage2", "stage3"):
        yield Patch(owner=SHARDING + module, name="core", value=with_gpu, symptom=asserts)
        reads = "IndexError: reads a device number from «cpu»"
        yield Patch(owner=SHARDING + module, name="paddle", value=numbered, symptom=reads)
    device = ModuleView(paddle.device, get_all_custom_device_type=lambda: ["cpu"])
    as_custom = ModuleView(paddle, device=device)
    yield Patch(
        owner="paddle.distributed.sharding.group_sharded", name="paddle", value=as_custom, symptom=asserts,
    )  # fmt: skip
    storage = f"{SHARDING}storage.ParamStorage"
    yield Patch(
        owner=storage, name="add_rank_params", value=without_host_copy(look_up(storage).add_rank_params),  # type: ignore[union-attr]
        symptom="parameters are empty: a copy through the host clears what is already there",
    )  # fmt: skip
    sizes = {**look_up(f"{FUSION}.alignment"), "cpu": 256}  # type: ignore[dict-item]
    yield Patch(
        owner=FUSION, name="alignment", value=sizes, symptom="KeyError 'cpu' in sharding v2 and fusion"
    )
    yield Patch(
        owner=FUSION, name="__current_device_type__", value="cpu", missing="skip",
        symptom="sharding v2 reads the device's type as None",
    )  # fmt: skip
