"""On an accelerator nothing of Paddle changes; on a CPU exactly the names that are said, and all are in the table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import paddle_dp.gloo as bridge
from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import Patch, apply, look_up
from tests.ranks import run_ranks


def look() -> dict[Any, int]:
    """What each name of Paddle's modules and classes stands for."""
    seen: dict[Any, int] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "paddle" and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                seen[id(module), key] = id(value)
                if isinstance(value, type):
                    seen.update({(id(value), k): id(v) for k, v in list(vars(value).items())})
    return seen


def changes(devices: list[str]) -> dict[str, list[str]]:
    """In a rank: what the bridge says that it changes for these devices, and what it does change."""
    for name in ("fleet.layers.mpu.mp_ops", "communication.batch_isend_irecv"):
        importlib.import_module(f"paddle.distributed.{name}")
    before = look()
    names = [name for device in devices for name in bridge.install(device)]
    after = look()
    changed = [key for owner, key in after if before.get((owner, key)) != after[owner, key]]
    return {"names": names, "changed": changed, "again": [*bridge.install(devices[0])]}


def test_nothing_is_touched_on_an_accelerator() -> None:
    (found,) = run_ranks(changes, 1, ["gpu:0", "xpu:1", "npu:0"])
    assert found == {"names": [], "changed": [], "again": []}


def test_on_a_cpu_it_changes_the_names_that_it_returns_and_that_the_table_lists() -> None:
    (found,) = run_ranks(changes, 1, ["cpu"])
    assert len(found["names"]) > 30 and found["again"] == []
    last = {name.rpartition(".")[2] for name in found["names"]}
    assert last == set(found["changed"])
    missing = {name.removesuffix("_on_calc_stream") for name in last if name not in str(bridge.__doc__)}
    assert {name for name in missing if name not in str(bridge.__doc__)} == set()


def test_an_unknown_version_is_refused_unless_it_is_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("3.3.1", "3.0.0"):
        bridge.check_version(known)
    for unknown in ("3.9.0", "2.6.2", "0.0.0"):
        with pytest.raises(UsageError, match=rf"Paddle {unknown} is not a version .*PADDLE_DP_BRIDGE=try"):
            bridge.check_version(unknown)
    monkeypatch.setenv("PADDLE_DP_BRIDGE", "try")
    bridge.check_version("3.9.0")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    owner = SimpleNamespace(known=1)
    monkeypatch.setitem(sys.modules, "stand_in", SimpleNamespace(owner=owner))  # type: ignore[misc]
    return owner


def test_patches_add_skip_or_refuse_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = stand_in(monkeypatch)
    patch = {"owner": "stand_in.owner", "value": 2, "symptom": "it hangs"}
    done = apply(
        [
            Patch(**patch, name="known"),
            Patch(**patch, name="new", missing="add"),
            Patch(**patch, name="old", missing="skip"),
        ]
    )
    assert done == ("stand_in.owner.known", "stand_in.owner.new")
    assert vars(owner) == {"known": 2, "new": 2}


def test_one_missing_name_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = stand_in(monkeypatch)
    patch = {"owner": "stand_in.owner", "value": 2, "symptom": "it hangs"}
    with pytest.raises(UsageError, match=r"no stand_in.owner.gone, .*\(it hangs\).*paddlepaddle==3.3.1"):
        apply([Patch(**patch, name="known"), Patch(**patch, name="gone")])
    assert vars(owner) == {"known": 1}


def test_look_up_finds_modules_and_what_is_in_them() -> None:
    assert look_up("json.decoder.JSONDecoder") is json.JSONDecoder
    assert look_up("json.nothing") is None and look_up("no_such_package.x") is None


def refusals() -> list[str]:
    """In a rank: what three of fleet's ways to shard say."""
    import paddle
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    bridge.install("cpu")
    from paddle.distributed.sharding import group_sharded_parallel

    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    calls: tuple[Callable[[], object], ...] = (
        lambda: group_sharded_parallel(layer, optimizer, "os_g"),
        lambda: GroupShardedStage3(layer, optimizer),
        lambda: tensor_fusion_helper.FusedCommBuffer(0, layer.parameters(), None, acc_steps=1, act=0),
    )
    said = []
    for call in calls:
        with pytest.raises(UsageError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_fleet_has_for_accelerators_only_is_refused_with_a_sentence() -> None:
    """There was an assertion of Paddle's, which says nothing of the bridge nor of another way."""
    ((sharded, stage3, fused),) = run_ranks(refusals, 1)
    assert (
        sharded == stage3 and sharded.startswith("group_sharded_parallel") and "sharding_stage: 2" in sharded
    )
    assert fused.startswith("fleet's fused buffers")
