"""An exported program gives the outputs of the model; one that does not is not written."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.assembly.build import build
from paddle_dp.datasets import digits
from paddle_dp.errors import ExportError, UsageError
from paddle_dp.export import export as exporting
from paddle_dp.export import onnx, program
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.part import find
from paddle_dp.recipe import read_recipe
from paddle_dp.verbs.predict import predict
from tests.house.programs import run_python
from tests.house.recipes import small_recipe

GREY, TOKENS = ("float32", (1, 8, 8)), ("int64", (16,))
SMALL = {"width": 16, "depth": 1, "heads": 4}
# The settings of a small one, what a sample looks like, and the shape of the program's input.
MODELS: dict[str, tuple[dict[str, Any], tuple[str, tuple[int, ...]], list[int | None]]] = {
    "mlp": ({"dropout": 0.5}, ("float32", (64,)), [None, 64]),
    "convnet": ({"norm": "batch"}, GREY, [None, 1, 8, 8]),
    "resnet": (
        {"depth": 18, "classes": 5, "small_images": True},
        ("float32", (3, 16, 16)),
        [None, 3, 16, 16],
    ),
    "vit": ({"image": 8, "patch": 4, "channels": 1, "pool": "class", **SMALL}, GREY, [None, 1, 8, 8]),
    "gpt": ({"length": 16, "dropout": 0.1, "tied": True, **SMALL}, TOKENS, [None, None]),
    "llama": ({"length": 16, "kv_heads": 2, **SMALL}, TOKENS, [None, None]),
}
RECIPE = small_recipe(
    "length: 4 steps, batch: 50", model="convnet, widths: [8], classes: 10, norm: batch", strategy="single",
    dataset="digits, as_image: true", callbacks="[{use: checkpoint, every: 4 steps}]",
)  # fmt: skip


def made(name: str) -> tuple[paddle.nn.Layer, list[np.ndarray], list[list[np.ndarray]], list[int | None]]:
    """A model whose BatchNorm has seen something, real-shaped batches, and its outputs for them."""
    settings, (dtype, shape), wanted_shape = MODELS[name]
    paddle.seed(3)
    model = find("models", name)(**settings).build()
    draw, sizes = np.random.default_rng(0), (4, *shape)
    samples = (draw.normal(size=sizes) if dtype == "float32" else draw.integers(0, 256, sizes)).astype(dtype)
    if dtype == "float32":
        model(paddle.to_tensor(samples))
    model.eval()
    batches = program.batches(samples, lambda batch: program.outputs(model, batch))
    return model, batches, [program.outputs(model, batch) for batch in batches], wanted_shape


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "resnet" else name for name in MODELS]
)
def test_every_model_is_a_program_for_any_number_of_samples(name: str, tmp_path: Path) -> None:
    model, batches, wanted, shape = made(name)
    assert [one.shape for one in program.write(model, batches, tmp_path)] == [shape]
    found = program.compare(program.load(tmp_path), batches, wanted, 1e-6)
    assert found.holds and found.largest > 0 and found.samples == 4


def test_a_program_that_a_full_disk_cuts_short_is_refused(tmp_path: Path) -> None:
    """Paddle's exception, or a difference from the model, came from reading what was left."""
    model, batches, _, _ = made("mlp")
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            program.write(model, batches, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("paddle2onnx")
    pytest.importorskip("onnxruntime")
    model, batches, wanted, _ = made(name)
    onnx.write(model, batches, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert program.compare(onnx.load(tmp_path), batches, wanted, exporting.ONNX_TOLERANCE).holds


def curved() -> tuple[paddle.nn.Layer, list[np.ndarray], list[list[np.ndarray]]]:
    """A layer whose outputs are GELU's alone, where its two forms are furthest apart."""
    model = paddle.nn.Sequential(paddle.nn.Linear(1, 1), paddle.nn.GELU(approximate=True))
    model[0].weight.set_value(paddle.ones([1, 1]))
    points = np.linspace(-4, 4, 101, dtype="float32")[:, None]
    return model, [points], [program.outputs(model, points)]


def test_a_decomposed_gelu_is_the_same_and_only_while_it_is_traced(tmp_path: Path) -> None:
    model, batches, wanted = curved()
    kept = paddle.nn.functional.gelu
    with onnx.gelu_decomposed():
        program.write(model, batches, tmp_path)
        exact = paddle.nn.functional.gelu(paddle.to_tensor(batches[0])).numpy()
    assert paddle.nn.functional.gelu is kept
    assert program.compare(program.load(tmp_path), batches, wanted, 1e-6).holds
    assert "tanh" in (tmp_path / "model.json").read_text()
    assert not program.compare(lambda _: [exact], batches, wanted, exporting.ONNX_TOLERANCE).holds


def test_the_gelu_in_onnx_is_the_models(tmp_path: Path) -> None:
    pytest.importorskip("paddle2onnx")
    pytest.importorskip("onnxruntime")
    model, batches, wanted = curved()
    onnx.write(model, batches, tmp_path)
    assert program.compare(onnx.load(tmp_path), batches, wanted, 1e-5).holds


def test_a_length_is_fixed_where_the_model_wants_it_so(tmp_path: Path) -> None:
    model = paddle.nn.Sequential(paddle.nn.Embedding(9, 4), paddle.nn.Flatten(), paddle.nn.Linear(24, 2))
    samples = np.arange(12).reshape(2, 6) % 9
    batches = program.batches(samples, lambda batch: program.outputs(model, batch))
    assert [batch.shape for batch in batches] == [(2, 6), (1, 6)]
    assert [one.shape for one in program.write(model, batches, tmp_path)] == [[None, 6]]


class Several(paddle.nn.Layer):
    """Of a dict: ids and mask, and a number that is used where it is there; with control flow of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = paddle.nn.Embedding(20, 4), paddle.nn.Linear(4, 3)

    def forward(
        self, ids: paddle.Tensor, scale: paddle.Tensor | None = None, mask: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        x = self.embed(ids)
        if mask is not None:
            x = x * mask.astype("float32").unsqueeze(-1)
        if scale is not None and x.sum() > 1e9:
            x = x * 0
        x = x.mean(1) * (1 if scale is None else scale.unsqueeze(-1))
        return self.head(x)


class OfAPair(Several):
    def forward(self, pair: tuple[paddle.Tensor, paddle.Tensor]) -> paddle.Tensor:
        return super().forward(pair[0], mask=pair[1])


IDS, MASK, SCALE = np.arange(18).reshape(3, 6), np.ones((3, 6), bool), np.float32([1, 2, 3])


@pytest.mark.parametrize(
    ("model", "samples", "read"),
    [
        (Several, {"mask": MASK, "ids": IDS}, ["ids: int64 [any, any]", "mask: bool [any, any]"]),
        (
            Several,
            {"ids": IDS, "scale": SCALE, "mask": MASK},
            ["ids: int64 [any, any]", "mask: bool [any, any]", "scale: float32 [any]"],
        ),
        (Several, (IDS, SCALE), ["inputs_0: int64 [any, any]", "inputs_1: float32 [any]"]),
        (OfAPair, (IDS, MASK), ["inputs_0: int64 [any, any]", "inputs_1: bool [any, any]"]),
    ],
)
def test_a_model_of_several_inputs_is_a_program(
    model: type[paddle.nn.Layer], samples: Any, read: list[str], tmp_path: Path
) -> None:
    made = model()
    made.eval()
    batches = program.batches(samples, lambda batch: program.outputs(made, batch))
    wanted = [program.outputs(made, batch) for batch in batches]
    assert [str(one) for one in program.write(made, batches, tmp_path)] == read
    found = program.compare(program.load(tmp_path), batches, wanted, 1e-6)
    assert found.holds and found.largest > 0 and found.samples == 3


def test_an_input_that_does_not_matter_is_told(tmp_path: Path) -> None:
    class Ignores(Several):
        def forward(self, ids: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
            return super().forward(ids)

    with pytest.raises(ExportError, match="one of the inputs ids, mask does not matter"):
        program.write(Ignores(), [{"ids": IDS, "mask": MASK}], tmp_path)


def test_nan_is_a_difference() -> None:
    one = np.ones((2, 3), "float32")
    for other in (one * 1.001, one * np.nan):
        assert not program.compare(lambda _, o=other: [o], [one], [[one]], 1e-5).holds
    with pytest.raises(ExportError, match="outputs of"):
        program.compare(lambda _: [one[:1]], [one], [[one]], 1e-5)


def test_equal_infinities_are_equal() -> None:
    """A model that masks classes or tokens by minus infinity was not exported."""
    one = np.ones((2, 3), "float32")
    masked = one.copy()
    masked[0, 1] = -np.inf
    program.check_finite([[masked]])
    same = program.compare(lambda _: [masked.copy()], [one], [[masked]], 1e-5)
    assert same.holds and (same.difference, same.largest) == (0, 1)
    for other in (one, -masked, np.where(masked < 0, np.nan, masked)):
        assert not program.compare(lambda _, o=other: [o], [one], [[masked]], 1e-5).holds
        assert not program.compare(lambda _: [masked], [one], [[other]], 1e-5).holds
    for wrong in (np.where(masked < 0, np.nan, masked), one * np.inf):
        with pytest.raises(ExportError, match="sample 0 is the first"):
            program.check_finite([[wrong]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(RECIPE)
    recipe = read_recipe(folder / "recipe.yaml", [f"output_dir={folder}"])
    build(recipe, Mesh.alone()).fit("4 steps")
    return folder


def recipe_of(run: Path, *words: str) -> Any:
    return read_recipe(run / "recipe.yaml", [f"output_dir={run}", *words])


def test_a_checkpoint_becomes_a_folder_that_plain_paddle_loads(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time in the first one's place
        exporting.export(recipe_of(run), {"to": None})
    said = capsys.readouterr().out
    assert "input inputs: float32 [any, 1, 8, 8]" in said and "largest difference" in said
    assert sorted(os.listdir(run / "export")) == ["export.json", "model.json", "model.pdiparams"]
    about = json.loads((run / "export" / "export.json").read_text())
    assert about["classes"] == [str(n) for n in range(10)] and about["parity"]["program"]["samples"] == 8
    code = (
        f"import paddle, numpy as np; p = paddle.jit.load({str(run / 'export' / 'model')!r}); p.eval()\n"
        "assert p(paddle.zeros([3, 1, 8, 8])).shape == [3, 10]"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/", timeout=100).returncode == 0


def test_where_nothing_is_held_out_a_program_is_run_on_the_training_samples(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, data = recipe_of(run), recipe_of(run).dataset.build("train")
    monkeypatch.setattr(digits.Config, "build", lambda _, split: None if split == "test" else data)
    exporting.export(recipe, {"to": str(tmp_path / "out")})
    assert "over 8 real samples" in capsys.readouterr().out
    np.save(tmp_path / "zeros.npy", np.zeros([2, 1, 8, 8], "float32"))
    assert not (run / "inputs.json").exists()
    predict(recipe, {"files": [str(tmp_path / "zeros.npy")]})
    assert len(capsys.readouterr().out.splitlines()) == 2


class Forgetful(paddle.nn.Layer):
    """Counts its calls in Python, where no program can look."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = paddle.nn.Linear(64, 10), 0

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return self.head(images.flatten(1)) * self.calls


def test_a_program_that_is_not_the_model_is_told_and_not_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporting._trained
    monkeypatch.setattr(exporting, "_trained", lambda *a: (Forgetful(), real(*a)[1]))
    with pytest.raises(ExportError, match="does not give the model's outputs, so nothing was written"):
        exporting.export(recipe_of(run), {"to": str(tmp_path / "out")})
    assert os.listdir(tmp_path) == []


class Masked(paddle.nn.Layer):
    """Never chooses class 7."""

    def __init__(self) -> None:
        super().__init__()
        self.head, mask = paddle.nn.Linear(64, 10), paddle.zeros([10])
        mask[7] = float("-inf")
        self.register_buffer("mask", mask)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.head(images.flatten(1)) + self.mask


def test_a_model_with_a_mask_is_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, model = exporting._trained, Masked()
    model.eval()
    monkeypatch.setattr(exporting, "_trained", lambda *a: (model, real(*a)[1]))
    exporting.export(recipe_of(run), {"to": str(tmp_path / "out")})
    assert "largest difference 0.0e+00" in capsys.readouterr().out


def test_a_folder_with_other_files_is_left_as_it_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="something else already"):
        exporting.export(recipe_of(run), {"to": str(tmp_path)})
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_tiny", "vit_digits"])
def test_a_run_of_a_split_layout_is_exported_whole(name: str, tmp_path: Path) -> None:
    layout = ["strategy.use=hybrid", "strategy.tensor=2", "strategy.pipeline=2"]
    words = ["train", f"configs/{name}.yaml", "--ranks", str(Degrees(tensor=2, pipeline=2).ranks), *layout]
    out = ["--out", str(tmp_path / "run")]
    for asked in ([*words, *out, "train.length=4 steps"], ["export", str(tmp_path / "run")]):
        done = run_python("-m", "paddle_dp", *asked, timeout=250)
    assert "program: largest difference 0.0e+00" in done.stdout
