"""Real autocast on the device, in types that the CPU has no products in: float32 inside a kernel, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.errors import JobError
from paddle_dp.proof import SideRunner
from tests.jobs import comparisons_in_forks
from tests.ranks import run_ranks
from tests.sim.recipes import gpt
from tests.sim.test_operations import OPTIMIZERS


def products(dtype: str) -> dict[str, bool]:
    """In a rank: whether a product is the rounded float32 one, and masters are what weights are rounded from."""
    import paddle
    from paddle import nn

    paddle.set_device(paddle.device.get_available_custom_device()[0])
    paddle.seed(1)
    x, y = paddle.randn([33, 65]).astype(dtype), paddle.randn([65, 17]).astype(dtype)
    wide = paddle.matmul(x.astype("float32"), y.astype("float32")).astype(dtype)
    found = {"product": bool((paddle.matmul(x, y) == wide).all())}
    x.stop_gradient, factor = False, x.detach() + 1
    (x * factor).backward(paddle.ones_like(x))  # whose numbers of x Paddle gives up on an NPU
    found["constant factor"] = bool((x.grad == factor).all())
    for name, make in OPTIMIZERS.items():
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        how = {"multi_precision": True} if name == "sgd" else {}
        model, update = paddle.amp.decorate(model, make(model.parameters(), **how), level="O2", dtype=dtype)
        first = model[0].weight.astype("float32")
        for _ in range(3):
            with paddle.amp.auto_cast(level="O2", dtype=dtype):
                output = model(paddle.randn([6, 8]))
            output.astype("float32").square().mean().backward()
            update.step()
            update.clear_grad()
        masters, low = update._master_weights, [p for p in model.parameters() if str(p.dtype).endswith(dtype)]
        rounded = all(bool((masters[p.name].astype(dtype) == p).all()) for p in low)
        finer = bool((masters[low[0].name] != low[0].astype("float32")).any())
        found[name] = rounded and finer and bool((low[0].astype("float32") != first).any())
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_are_rounded_once_and_weights_have_masters(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")
    (found,) = run_ranks(products, 1, dtype)
    assert found == {"product": True, "constant factor": True, **dict.fromkeys(OPTIMIZERS, True)}


def test_what_paddle_would_leave_in_float32_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = SideRunner(gpt(tmp_path), ("train.precision=bfloat16",), 1, 2, tmp_path, wide=False)
    with pytest.raises(JobError, match="did not run"), comparisons_in_forks():
        runner.run_candidate(2, ["strategy.data=2"])
    assert (
        "train.precision is bfloat16, and Paddle's autocast leaves it float32 on sim:"
        in capsys.readouterr().err
    )
