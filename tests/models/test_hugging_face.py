"""Our models are Hugging Face's and torchvision's: small ones with random weights, made on the spot, give the same
outputs, losses and gradients, in any layout, and read back what is exported.

Ours compute in float32, and are compared with what theirs compute in float64 (Llama's norms and positions are float32
there, too): the difference is then our rounding alone, and stands beside that of theirs in float32. Measured are each
tensor's largest difference relative to its largest number, and the difference's 2-norm relative to the tensor's, which
is judged for gradients. A ResNet's images are such that rounding changes the sign of no ReLU's input
(`published.far_from_kinks`).

Needs torch, transformers and torchvision: `pip install -e '.[hf]'`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp import checkpoint
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import TensorShard, load
from paddle_dp.checkpoint.other_names import names_of, translated
from paddle_dp.checkpoint.source import WeightsOf, source
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.export.hugging_face import write
from paddle_dp.mesh import join
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.yaml_document import parse
from tests.house.programs import run_python
from tests.house.recipes import small_recipe
from tests.parity import recorded
from tests.ranks import run_ranks

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[hf]'"),
]
MAKER = Path(__file__).with_name("published.py")
RATE = 1000.0  # so that a weight's step is large against its rounding
LLAMAS = (
    "llama", "llama tied", "llama linear", "llama biases", "smollm2", "mistral", "qwen2", "qwen2 tied", "qwen3",
    "qwen3 biases", "ernie4_5", "ernie4_5 untied",
)  # fmt: skip
BERTS = ("bert", "bert untied", "ernie", "ernie relu")
HUGGING_FACE = ("gpt", "gpt untied", *LLAMAS, *BERTS, "vit")
TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision not installed")
MODELS = (*HUGGING_FACE, pytest.param("resnet", marks=TORCHVISION))
COMPARED = (*MODELS, pytest.param("resnet float64", marks=TORCHVISION))
LAYOUTS = {"tensor": "{use: hybrid, tensor: 2}", "pipeline": "{use: hybrid, pipeline: 2}"}

_folders: list[TemporaryDirectory[str]] = []  # removed when the session ends


@cache
def published(name: str) -> Path:
    """The folder of a model that transformers or torchvision made, with what it computes."""
    _folders.append(TemporaryDirectory(prefix="published-"))
    folder = Path(_folders[-1].name)
    run(name, folder)
    return folder


def run(*words: object) -> None:
    run_python(MAKER, *map(str, words), timeout=200)


def recipe_of(name: str, folder: str, into: Path) -> Any:
    use = "bert" if name in BERTS else name.split()[0]
    model, more = f"{{use: {use}, from: {folder}, dropout: 0}}", ""
    if name in LLAMAS:
        model = f"{{use: llama, from: {folder}}}"
    if use == "resnet":
        model, more = "{use: resnet, depth: 18, classes: 10}", f"load: {{path: {folder}/resnet18.pth}}"
    into.mkdir(parents=True, exist_ok=True)
    file = into / "r.yaml"
    text = small_recipe(
        "length: 1 step, batch: 4", more, model=model, dataset="random_tokens", optimizer="sgd"
    )
    file.write_text(text)
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
    """In every rank: begins with the weights, computes outputs, and does one step of plain SGD; the weights are saved
    before and after."""
    mesh = join(seed=2)
    recipe = recipe_of(name, folder, Path(out) / str(mesh.rank))
    seen = Seen(folder)
    small, precision = "pipeline" in strategy and "resnet" not in name, name.split()[-1]
    precision = precision if precision == "float64" else "float32"
    trainer = Trainer.of(
        model=recipe.model.build(), load=recipe.load, train=seen, batch=4, micro_batches=2 if small else 1,
        length="1 step", loss="cross_entropy", optimizer="sgd", strategy=parse(strategy, "").values, callbacks=[],
        schedule={"use": "constant", "learning_rate": RATE}, precision=precision, folder=f"{out}/run",
    )  # fmt: skip
    inputs = seen.inputs.astype(precision) if "resnet" in name else seen.inputs
    trainer.learner.model.eval()
    outputs = trainer.learner.runner.predict(paddle.to_tensor(inputs))
    trainer.learner.model.train()
    before = checkpoint.save(trainer.snapshot(), Path(out) / "before", trainer.mesh)
    rows = recorded(trainer)
    trainer.fit()
    after = checkpoint.save(trainer.snapshot(), Path(out) / "after", trainer.mesh)
    outputs = None if outputs is None else outputs.numpy()  # of the last stage; of this rank's classes
    return {"outputs": outputs, "loss": rows[0][0], "before": str(before), "after": str(after)}


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest number."""
    ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def apart_in_norm(ours: Any, theirs: Any) -> float:
    """The 2-norm of the difference, relative to the norm of all."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def gradients_apart(name: str, folder: Path, found: dict[str, Any], tmp: Path) -> tuple[float, float]:
    """The largest `apart_in_norm` and the largest `apart` of a parameter's gradient, of those whose gradient is more
    than rounding."""
    theirs = dict(np.load(folder / "gradients.npz"))
    file = tmp / "gradients.safetensors"
    write_tensors(
        file, {k: TensorShard.full(k, g, str(g.dtype)) for k, g in theirs.items()}, {"format": "pt"}
    )
    model = recipe_of(name, str(folder), tmp).model.build()
    wanted, _ = translated(source(file), names_of(model), {})
    before, after = (WeightsOf(load(Path(found[when]))) for when in ("before", "after"))
    largest = max(float(np.abs(gradient).max()) for gradient in theirs.values())
    worst, highest, seen = 0.0, 0.0, 0
    named = [name for name, p in model.named_parameters() if not p.stop_gradient]  # no running statistics
    for parameter in named:
        want = wanted.read(parameter).astype("float64")
        got = (before.read(parameter).astype("float64") - after.read(parameter)) / RATE
        seen += 1
        if np.abs(want).max() > 1e-5 * largest:
            worst, highest = max(worst, apart_in_norm(got, want)), max(highest, apart(got, want))
        else:  # that of keys' biases is 0: softmax does not see them
            assert np.abs(got).max() <= 1e-5 * largest, parameter
    assert seen == len(named) > 10
    return worst, highest


def theirs_of(name: str) -> tuple[Path, dict[str, Any], float]:
    """The folder of a model, what it computes, and how far ours may be apart."""
    folder = published(name.removesuffix(" float64"))
    return folder, dict(np.load(folder / "seen.npz")), 1e-11 if name.endswith("float64") else 1e-5


@pytest.mark.parametrize("layout", ["single", *LAYOUTS])
@pytest.mark.parametrize("name", COMPARED)
def test_outputs_and_gradients_are_theirs_in_each_layout(name: str, layout: str, tmp_path: Path) -> None:
    folder, seen, most = theirs_of(name)
    ranks, strategy = (2, LAYOUTS[layout]) if layout in LAYOUTS else (1, "{use: single}")
    found = run_ranks(learned, ranks, name, str(folder), str(tmp_path / "out"), strategy)
    gradients, highest = gradients_apart(name, folder, found[0], tmp_path)
    parts = [np.asarray(each["outputs"]) for each in found if each["outputs"] is not None]
    whole = parts[0] if parts[0].shape == seen["truth"].shape else np.concatenate(parts, axis=-1)
    outputs = apart(whole, seen["truth"])
    theirs = [f"{error:.1e}" for error in seen["errors"]]
    print(
        f"{name}, {layout}: outputs {outputs:.1e} (theirs {theirs[0]}), gradients in norm {gradients:.1e} "
        f"({theirs[1]}), largest {highest:.1e} ({theirs[2]})"
    )
    assert outputs < most and gradients < most and found[0]["loss"] == pytest.approx(seen["loss"], rel=most)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_is_read_by_theirs(name: str, tmp_path: Path) -> None:
    folder = published(name)
    strategy = "{use: single}" if name == "resnet" else LAYOUTS["tensor"]
    found = run_ranks(learned, 1 + (name != "resnet"), name, str(folder), str(tmp_path / "out"), strategy)
    saved = WeightsOf(load(Path(found[0]["before"])))
    write(recipe_of(name, str(folder), tmp_path), saved, tmp_path / "hf")
    run(name, tmp_path / "hf", folder)
    np.testing.assert_array_equal(
        np.load(tmp_path / "hf/outputs.npy"), np.load(folder / "seen.npz")["outputs"]
    )


@pytest.mark.parametrize("name", HUGGING_FACE)  # the other has one file only
def test_other_files_of_theirs_have_the_same_numbers(name: str, tmp_path: Path) -> None:
    folder = published(name)
    model = recipe_of(name, str(folder), tmp_path).model.build()
    wanted, _ = translated(source(folder), names_of(model), {})
    for other in ("bin", "shards", "half"):
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
