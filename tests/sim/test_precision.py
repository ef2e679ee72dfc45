"""Real autocast on the device, in types that the CPU has no products in: float32 inside a kernel, rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import JobError
from paddle_dp.proof import SideRunner
from paddle_dp.tensors import dtype_of
from tests.house.training import build_trainer, trained
from tests.jobs import comparisons_in_forks
from tests.ranks import run_ranks
from tests.sim.recipes import GPT, gpt
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


LOW = ("train.precision={dtype: bfloat16, level: O2}", "ema={decay: 0.9}", "strategy={use: single}")


def saved_by(folder: str) -> str:
    """In a rank: the checkpoint of two steps."""
    return str(trained(GPT, folder, *LOW, until="2 steps")["saved"])


def weights_of_float32(folder: str, saved: str) -> dict[str, bool]:
    """In a rank: what weights in 16 bits get from a run on a CPU that was to have them, and what follows."""
    import paddle

    from paddle_dp import checkpoint
    from paddle_dp.assembly.entry_points import merge
    from paddle_dp.checkpoint.source import source
    from paddle_dp.cli.runs import PLAIN
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train.state import load_model

    there = checkpoint.load(Path(saved))

    def holds(trainer: Any, kind: str = "model") -> bool:
        state = trainer.learner.placed.state()
        low = [name for name, tensor in state.items() if dtype_of(tensor) == "bfloat16"]
        given = {name: paddle.to_tensor(there.read(f"{kind}/{name}")).astype("bfloat16") for name in low}
        return bool(low) and all(bool((state[name] == given[name]).all()) for name in low)

    new = build_trainer(GPT, f"{folder}/new", *LOW, f"load.path={saved}")
    found = {"given": holds(new)}
    load_model(there, new.learner, ema=True)
    found["averages"] = holds(new, "ema")
    resumed = build_trainer(GPT, folder, *LOW, resume=True)
    masters = resumed.learner.optimizer.state_dict()["master_weights"]
    named = [(n, masters[p.name]) for n, p in resumed.learner.placed.named_parameters() if p.name in masters]
    exact = all(bool((master == paddle.to_tensor(there.read(f"model/{n}"))).all()) for n, master in named)
    found["resumed"] = holds(resumed) and bool(named) and exact
    resumed.fit("4 steps")
    words = ["adapter={use: lora, rank: 2, match: [blocks.1.*]}", f"load.path={saved}"]
    trained(GPT, f"{folder}/lora", *LOW, *words, until="2 steps")
    made, merged = Path(f"{folder}/lora.yaml"), Path(f"{folder}/lora.safetensors")
    made.write_text(GPT)
    merge(read_recipe(made, [f"output_dir={folder}/lora", *LOW, *words, *PLAIN]), {"to": str(merged)})
    base, name = paddle.to_tensor(there.read("model/blocks.2.qkv.weight")), "blocks.2.qkv.weight"
    rounded = base.astype("bfloat16").astype("float32").numpy()
    found["merged"] = bool((source(merged).read(name) == rounded).all() and (rounded != base.numpy()).any())
    return found


def resumes_on_cpu(folder: str, saved: str, strategy: str) -> bool:
    """In a rank: whether the weights are the masters of a run on the accelerator, and more steps follow."""
    from paddle_dp.checkpoint import load

    resumed = build_trainer(GPT, folder, *LOW, f"strategy={strategy}", resume=True)
    there = load(Path(saved))
    masters = {name for name in there.names if name.endswith("/master_weight")}
    exact = all(
        bool((p.numpy() == there.read(f"optimizer/{name}/master_weight")).all())
        for name, p in resumed.learner.placed.named_parameters()
        if f"optimizer/{name}/master_weight" in masters
    )
    resumed.fit("4 steps")
    return exact and bool(masters)


def test_masters_of_o2_are_the_weights_of_a_run_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")
    (saved,) = run_ranks(saved_by, 1, str(tmp_path))
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    for ranks, strategy in ((1, "{use: single}"), (2, "{use: hybrid, sharding: 2}")):
        assert run_ranks(resumes_on_cpu, ranks, str(tmp_path), saved, strategy) == [True] * ranks


def test_weights_of_float32_are_rounded_to_the_16_bits_of_o2(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    (saved,) = run_ranks(saved_by, 1, str(tmp_path))
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(library))
    (found,) = run_ranks(weights_of_float32, 1, str(tmp_path), saved)
    assert found == {"given": True, "averages": True, "resumed": True, "merged": True}
