"""Our models are Hugging Face's and torchvision's: small ones with random weights, made on the spot, give the same
outputs, losses and gradients, in any layout, and read back what is exported.

Needs torch, transformers and torchvision: `pip install -e '.[hf]'`.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import paddle
import pytest

from tests.ranks import run_ranks

MISSING = [name for name in ("torch", "transformers", "torchvision") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[hf]'"),
]
MAKER = Path(__file__).with_name("published.py")
RATE = 1000.0  # so that a weight's step is large against its rounding
MODELS = ("gpt", "gpt untied", "llama", "llama tied", "llama linear", "bert", "bert untied", "vit", "resnet")
LAYOUTS = {"tensor": "{use: hybrid, tensor: 2}", "pipeline": "{use: hybrid, pipeline: 2}"}
RECIPE = """
model: {model}
dataset: {{use: random_tokens}}
loss: {{use: cross_entropy}}
optimizer: {{use: sgd}}
train: {{length: 1 step, batch: 4}}
{more}
"""
_folders: list[TemporaryDirectory[str]] = []  # removed when the session ends


@cache
def published(name: str) -> Path:
    """The folder of a model that transformers made, with what it computes."""
    _folders.append(TemporaryDirectory(prefix="published-"))
    folder = Path(_folders[-1].name)
    run(name, folder)
    return folder


def run(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, MAKER, *map(str, words)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


def recipe_of(name: str, folder: str, into: Path) -> Any:
    from paddle_dp.recipe import read_recipe

    use = name.split()[0]
    model, more = f"{{use: {use}, from: {folder}, dropout: 0}}", ""
    if use == "llama":
        model = f"{{use: llama, from: {folder}}}"
    if use == "resnet":
        model, more = "{use: resnet, depth: 18, classes: 10}", f"load: {{path: {folder}/resnet18.pth}}"
    into.mkdir(parents=True, exist_ok=True)
    file = into / "r.yaml"
    file.write_text(RECIPE.format(model=model, more=more))
    return read_recipe(file)


class Seen:
    """The samples on which the other side computed."""

    def __init__(self, folder: str):
        seen = np.load(Path(folder) / "seen.npz")
        self.inputs, self.targets = seen["inputs"], seen["targets"]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[index], self.targets[index]


def learned(name: str, folder: str, out: str, strategy: str) -> dict[str, Any]:
    """In every rank: begins with the weights, and does one step of plain SGD; the weights are saved before and after.

    On one process also the outputs before it.
    """
    from paddle_dp import checkpoint
    from paddle_dp.mesh import join
    from paddle_dp.recipe.page import parse
    from paddle_dp.train import Trainer
    from tests.parity import recorded

    mesh = join(seed=2)
    recipe = recipe_of(name, folder, Path(out) / str(mesh.rank))
    seen = Seen(folder)
    small = "pipeline" in strategy and name != "resnet"
    trainer = Trainer.of(
        model=recipe.model.build(), load=recipe.load, train=seen, batch=4, micro_batches=2 if small else 1,
        length="1 step", loss="cross_entropy", optimizer="sgd", strategy=parse(strategy, "").values, callbacks=[],
        schedule={"use": "constant", "learning_rate": RATE}, precision="float64" if name == "resnet" else "float32",
        folder=f"{out}/run",
    )  # fmt: skip
    model, outputs = trainer.learner.model, None
    if mesh.ranks == 1:
        model.eval()
        inputs = seen.inputs.astype("float64") if name == "resnet" else seen.inputs
        outputs = trainer.learner.predict(paddle.to_tensor(inputs)).numpy()
        model.train()
    before = checkpoint.save(trainer.snapshot(), Path(out) / "before", trainer.mesh)
    rows = recorded(trainer)
    trainer.fit()
    after = checkpoint.save(trainer.snapshot(), Path(out) / "after", trainer.mesh)
    return {"outputs": outputs, "loss": rows[0][0], "before": str(before), "after": str(after)}


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest number."""
    ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def gradients_apart(name: str, folder: Path, found: dict[str, Any], tmp: Path) -> float:
    """The largest difference of a parameter's gradient, relative to the largest number of that parameter's, of those
    whose gradient is more than rounding."""
    from paddle_dp.checkpoint import TensorShard, load
    from paddle_dp.checkpoint.other_names import names_of, translated
    from paddle_dp.checkpoint.source import WeightsOf, source
    from paddle_dp.checkpoint.tensor_file import write_tensors

    theirs = dict(np.load(folder / "gradients.npz"))
    file = tmp / "gradients.safetensors"
    write_tensors(
        file, {k: TensorShard.whole(k, g, str(g.dtype)) for k, g in theirs.items()}, {"format": "pt"}
    )
    model = recipe_of(name, str(folder), tmp).model.build()
    wanted, _ = translated(source(file), names_of(model), {})
    before, after = (WeightsOf(load(Path(found[when]))) for when in ("before", "after"))
    largest = max(float(np.abs(gradient).max()) for gradient in theirs.values())
    worst, seen = 0.0, 0
    named = [name for name, p in model.named_parameters() if not p.stop_gradient]  # no running statistics
    for parameter in named:
        want = wanted.read(parameter).astype("float64")
        got = (before.read(parameter).astype("float64") - after.read(parameter)) / RATE
        seen += 1
        if np.abs(want).max() > 1e-5 * largest:
            worst = max(worst, apart(got, want))
        else:  # that of keys' biases is 0: softmax does not see them
            assert np.abs(got).max() <= 1e-5 * largest, parameter
    assert seen == len(named) > 10
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    folder = published(name)
    seen = np.load(folder / "seen.npz")
    [found] = run_ranks(learned, 1, name, str(folder), str(tmp_path / "out"), "{use: single}")
    gradients = gradients_apart(name, folder, found, tmp_path)
    outputs = apart(found["outputs"], seen["outputs"])
    print(
        f"{name}: outputs {outputs:.1e}, gradients {gradients:.1e}, loss {found['loss'] / seen['loss'] - 1:+.1e}"
    )
    assert outputs < 1e-5 and gradients < 1e-5 and found["loss"] == pytest.approx(seen["loss"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layout_has_the_same_gradients(name: str, layout: str, tmp_path: Path) -> None:
    if (name, layout) == ("resnet", "tensor"):
        pytest.skip("ResNet has no table of cuts")
    folder = published(name)
    loss = float(np.load(folder / "seen.npz")["loss"])
    found = run_ranks(learned, 2, name, str(folder), str(tmp_path / "out"), LAYOUTS[layout])
    gradients = gradients_apart(name, folder, found[0], tmp_path)
    print(f"{name}, {layout} 2: gradients {gradients:.1e}, loss {found[0]['loss'] / loss - 1:+.1e}")
    assert gradients < 1e-5 and found[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_is_read_by_theirs(name: str, tmp_path: Path) -> None:
    from paddle_dp.checkpoint import load
    from paddle_dp.checkpoint.source import WeightsOf
    from paddle_dp.export.hugging_face import write

    folder = published(name)
    strategy = "{use: single}" if name == "resnet" else LAYOUTS["tensor"]
    found = run_ranks(learned, 1 + (name != "resnet"), name, str(folder), str(tmp_path / "out"), strategy)
    saved = WeightsOf(load(Path(found[0]["before"])))
    write(recipe_of(name, str(folder), tmp_path), saved, tmp_path / "hf")
    run(name, tmp_path / "hf", folder)
    np.testing.assert_array_equal(
        np.load(tmp_path / "hf/outputs.npy"), np.load(folder / "seen.npz")["outputs"]
    )


@pytest.mark.parametrize("name", MODELS)
def test_other_files_of_theirs_have_the_same_numbers(name: str, tmp_path: Path) -> None:
    from paddle_dp.checkpoint.other_names import names_of, translated
    from paddle_dp.checkpoint.source import source

    folder = published(name)
    model = recipe_of(name, str(folder), tmp_path).model.build()
    whole = source(folder / "resnet18.pth" if name == "resnet" else folder)
    wanted, _ = translated(whole, names_of(model), {})
    others = ["bin/old.pth"] if name == "resnet" else ["bin", "shards", "half"]
    for other in others:
        found, _ = translated(source(folder / other), names_of(model), {})
        assert set(model.state_dict()) <= set(found.names)
        for ours in model.state_dict():
            numbers, want = found.read(ours), wanted.read(ours)
            if other == "half":
                assert found.dtype(ours) == "bfloat16"
                numbers = (numbers.astype("uint32") << 16).view("float32")
                np.testing.assert_allclose(numbers, want, rtol=2**-8)
            else:
                np.testing.assert_array_equal(numbers, want)
