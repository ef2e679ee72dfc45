"""Workers on devices and servers on hosts: one process's updates in step; without waiting, as many; on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe import read_recipe
from tests.house.training import build_trainer, finished
from tests.ranks import run_ranks
from tests.sim.recipes import GPT, gpt
from tests.sim.test_layouts import assert_one_process


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 2])
def test_in_step_it_is_one_process(servers: int, tmp_path: Path) -> None:
    """As many workers as servers, two micro-batches, an uneven last batch, a clip by the norm over all servers."""
    words = {"in step": f"strategy={{use: parameter_server, servers: {servers}}}"}
    assert_one_process(words, tmp_path, ranks=2 * servers, steps=3)


def of_host(bytes_of: Any, tensor: Any) -> Any:
    """`bytes_of`, which the simulated device would let read its own memory: it is the host's."""
    assert tensor.place.is_cpu_place(), tensor.place
    return bytes_of(tensor)


def learn(folder: str, strategy: str, resume: bool = False, **env: str) -> dict[str, Any]:
    """In a rank: twelve steps; on which device, the losses, and what is saved."""
    import os

    from paddle_dp.exchange import pushed_gradients
    from paddle_dp.strategies.parameter_server import async_worker

    os.environ |= env
    for module in (pushed_gradients, async_worker):
        module.bytes_of = partial(of_host, module.bytes_of)  # type: ignore[attr-defined]
    trainer = build_trainer(GPT, folder, f"strategy={strategy}", resume=resume, seed=3)
    found = finished(trainer, folder, "12 steps" if resume else "8 steps")
    places = sorted(
        {str(p.place) for _, p in trainer.learner.placed.named_parameters() if p._is_initialized()}
    )
    updates = getattr(trainer.learner.async_rank, "updates", None)
    trainer.mesh.wait("the end")
    return found | {"places": places, "updates": updates, "held": found["held_out"]["loss"]}


SLOW = {"SIM_COPY_BANDWIDTH": "2e6", "SIM_PINNED": "1"}


@pytest.mark.long
def test_a_slow_copy_changes_no_bit_and_a_run_resumes(tmp_path: Path) -> None:
    """A copy that is read too early, or memory that is used again too early, is a wrong number there."""
    found = {}
    for name, env in (("fast", {}), ("slow", SLOW)):
        strategy = "{use: parameter_server, servers: 1}"
        first = run_ranks(learn, 3, str(tmp_path / name), strategy, **env)
        then = run_ranks(learn, 3, str(tmp_path / name), strategy, resume=True, **env)
        assert first[0]["places"] == ["Place(cpu)"] and "sim:" in first[1]["places"][0]
        found[name] = [row["rows"] for row in (*first, *then)]
    assert found["fast"] == found["slow"] and len(found["slow"][3]) == 4


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 2])
def test_without_waiting_it_makes_one_update_of_each_global_batch(tmp_path: Path, servers: int) -> None:
    strategy = f"{{use: parameter_server, servers: {servers}, mode: async}}"
    found = run_ranks(learn, 2 + servers, str(tmp_path), strategy, **SLOW)
    assert [row["updates"] for row in found[:servers]] == [8] * servers
    assert abs(found[0]["held"] - 3.47) < 0.1  # of random tokens, log 32, and it is no noise
    assert len({row["held"] for row in found}) == 1


def test_weights_of_16_bits_on_devices_are_refused(tmp_path: Path) -> None:
    words = ["strategy={use: parameter_server}", "train.precision={dtype: bfloat16, level: O2}"]
    recipe = read_recipe(gpt(tmp_path), words)
    with pytest.raises(UsageError, match="servers keep weights of 32 bits"):
        recipe.strategy.refuse(recipe, 2, "sim")
    recipe.strategy.refuse(recipe, 2, "cpu")
