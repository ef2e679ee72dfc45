"""Fleet's own sharding, unmodified, which takes no CPU: what is right in it, and what is wrong on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gloo import tiny
from tests.gloo.cases import compare, layout, mean, with_and_without
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleet's sharding v2 has a list of devices, and an NPU is in it."""
    monkeypatch.setenv("SIM_NAME", "npu")


def group_sharded(level: str) -> dict[str, float]:
    """In a rank: `layout` for group_sharded_parallel, stage 2 (os_g) or 3 (p_g_os)."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.sharding import group_sharded_parallel

    from paddle_dp.mesh import join

    mesh = join()
    found: dict[str, float] = {}
    for optimizer in ("sgd", "adamw"):
        model, _ = tiny.plain()
        names = [name for name, _ in model.named_parameters()]
        update = tiny.make_optimizer(optimizer, model.parameters())
        placed, update, _ = group_sharded_parallel(model, update, level, segment_size=100)
        losses = []
        for batch in tiny.batches():
            inputs, targets = (paddle.to_tensor(np.split(one, mesh.ranks)[mesh.rank]) for one in batch)
            loss = paddle.nn.functional.cross_entropy(placed(inputs), targets)
            loss.backward()
            update.step()
            update.clear_grad()
            losses.append(mean(loss, None, 1))
        if level == "p_g_os":
            placed.get_all_parameters(convert2cpu=False)
        found |= compare(optimizer, (losses, dict(zip(names, model.parameters(), strict=True))), {})
    paddle.device.synchronize()
    dist.barrier()
    return found


@pytest.mark.long
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_group_sharding_learns_what_one_process_learns(level: str, ranks: int) -> None:
    for differences in run_ranks(group_sharded, ranks, level):
        assert len(differences) == 4 and max(differences.values()) < 5e-6


@pytest.mark.long
def test_sharding_v2_learns_what_one_process_learns() -> None:
    for differences in run_ranks(layout, 2, {"sharding": 2, "version": 2}):
        assert len(differences) == 4 and max(differences.values()) < 5e-6


def test_sharding_v2_is_wrong_unless_its_gradients_are_zeroed_in_place() -> None:
    """When only the last line fails, a newer Paddle is right by itself, and the mend may go."""
    options: dict[str, Any] = {"sharding": 2, "version": 2, "optimizers": ["sgd"]}
    found = run_ranks(with_and_without, 2, options, {"mend": False})
    assert max(mended for mended, _ in found) < 5e-6
    assert max(alone for _, alone in found) > 1e-4


def decayed(level: str) -> float:
    """In a rank: how far the weights are from one process's after 5 steps of AdamW, where biases do not decay."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.sharding import group_sharded_parallel

    from paddle_dp.mesh import join

    def build() -> tuple[Any, Any]:
        paddle.seed(0)
        model = paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.Tanh(), paddle.nn.Linear(64, 8))
        decaying = {p.name for p in model.parameters() if p.ndim > 1}
        rule = {"weight_decay": 0.5, "apply_decay_param_fun": decaying.__contains__}
        return model, paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), **rule)

    def learn(model: Any, optimizer: Any, inputs: Any) -> None:
        model(paddle.to_tensor(inputs)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    join()
    batches = np.random.RandomState(0).rand(5, 8, 64).astype("float32")
    (one, alone), (many, optimizer) = build(), build()
    placed, optimizer, _ = group_sharded_parallel(many, optimizer, level, segment_size=100)
    for batch in batches:
        learn(one, alone, batch)
        learn(placed, optimizer, np.split(batch, 2)[dist.get_rank()])
    if level == "p_g_os":
        placed.get_all_parameters(convert2cpu=False)
    pairs = zip(one.parameters(), many.parameters(), strict=True)
    apart = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)
    paddle.device.synchronize()
    dist.barrier()
    return apart


@pytest.mark.long
def test_stage_3_forgets_which_weights_decay() -> None:
    """Why it is not used (docs/decisions/0008). When this fails, a newer Paddle is right by itself."""
    assert max(run_ranks(decayed, 2, "os_g")) < 1e-5
    assert min(run_ranks(decayed, 2, "p_g_os")) > 1e-3
