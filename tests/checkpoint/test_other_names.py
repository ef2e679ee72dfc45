"""Weights under other names than the model's: which table is taken, what is renamed, transposed and put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.checkpoint import TensorShard
from paddle_dp.checkpoint.matching import outlook
from paddle_dp.checkpoint.other_names import (
    HUGGING_FACE,
    Origin,
    Translated,
    names_of,
    origins_of,
    renamed,
    translated,
)
from paddle_dp.checkpoint.source import SafetensorsFile, source
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.part import read_part
from paddle_dp.recipe import Load
from tests.checkpoint.torch_files import Tensor, save
from tests.house.weights import assert_read

DRAW = np.random.default_rng(0)


def written(file: Path, metadata: dict[str, str] | None = None, **shapes: Any) -> Path:
    """A safetensors file with random tensors of these shapes, or these arrays."""
    arrays = {
        name: one if isinstance(one, np.ndarray) else DRAW.normal(size=one).astype("float32")
        for name, one in shapes.items()
    }
    tensors = {name: TensorShard.full(name, array, "float32") for name, array in arrays.items()}
    file.unlink(missing_ok=True)
    write_tensors(file, tensors, metadata)
    return file


@pytest.mark.parametrize(
    ("rename", "new"),
    [
        ({"encoder.*": "backbone.*"}, "backbone.0.w.w"),
        ({"*.0.*": "*.zero.*"}, "encoder.zero.w.w"),
        ({"*.w": "*.weight"}, "encoder.0.w.weight"),
        ({"encoder.0.w.w": "first"}, "first"),
        ({"encoder.*.w": "a.*", "*": "b.*"}, "a.0.w"),
        ({"*": "model.*"}, "model.encoder.0.w.w"),
    ],
)
def test_a_name_is_changed_by_the_first_pattern(rename: dict[str, str], new: str) -> None:
    rename = {pattern: wanted for pattern, wanted in rename.items() if pattern != "*" or len(rename) == 1}
    assert renamed(["encoder.0.w.w"], rename) == {new: "encoder.0.w.w"}


def test_what_a_renaming_cannot_mean() -> None:
    with pytest.raises(UsageError, match=r"load\.rename: 'encodr\.\*' matches no tensor there"):
        renamed(["encoder.w"], {"encodr.*": "backbone.*"})
    with pytest.raises(UsageError, match=r"load\.rename: a\.w and b\.w would both be c\.w"):
        renamed(["a.w", "b.w"], {"a.*": "c.*", "b.*": "c.*"})
    with pytest.raises(ValueError, match=r"rename: 'a\.\*' and 'b' have unequal numbers of stars"):
        Load(path="x", rename={"a.*": "b"})


def paddle_file(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A file of paddle.save."""
    paddle.save({name: paddle.to_tensor(one) for name, one in arrays.items()}, str(folder / "w.pdparams"))
    return folder / "w.pdparams"


def small() -> nn.Layer:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4), nn.Linear(4, 3))


def test_a_file_of_pytorch_is_turned_and_one_of_paddle_is_not(tmp_path: Path) -> None:
    """The first Linear is square: who wrote the file says how it lies, or else the shape of the other one."""
    square = DRAW.normal(size=(4, 4)).astype("float32")
    theirs = {"0.weight": square, "0.bias": (4,)}
    for metadata, head, expected in (
        ({"format": "pt"}, None, square.T), ({"format": "pd"}, None, square),
        (None, (3, 4), square.T), (None, (4, 3), square),
    ):  # fmt: skip
        file = written(tmp_path / "w.safetensors", metadata, **theirs, **({"2.weight": head} if head else {}))
        weights, _ = translated(source(file), names_of(small()), {})
        np.testing.assert_array_equal(weights.read("0.weight"), expected)
    for head in ({}, {"2.weight": (7, 9)}):  # of another model, for strict: false
        file = source(written(tmp_path / "w.safetensors", None, **theirs, **head))
        with pytest.raises(
            UsageError, match=r"nothing there says whether PyTorch or Paddle wrote it, and 0\.weight is"
        ):
            translated(file, names_of(small()), {})
    lines = outlook(file, small(), Load(path="x", only=["0.bias"]))
    assert lines[1].split()[:3] == ["loaded", "1", "tensors"]
    with pytest.raises(UsageError, match=r"and 0\.weight is square"):
        outlook(file, small(), Load(path="x", only=["0.*"]))
    torch_file = save({"0.weight": Tensor(square)}, tmp_path / "w.pth")
    weights, whose = translated(source(torch_file), names_of(small()), {})
    np.testing.assert_array_equal(weights.read("0.weight"), square.T)
    assert whose == "PyTorch's"
    weights, _ = translated(source(paddle_file(tmp_path, {"0.weight": square})), names_of(small()), {})
    np.testing.assert_array_equal(weights.read("0.weight"), square)


class Shared(nn.Layer):
    """One layer, with a Linear and statistics, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4))
        self.second = self.first


def test_a_layer_under_two_names_has_the_form_of_pytorch_under_both(tmp_path: Path) -> None:
    square = DRAW.normal(size=(4, 4)).astype("float32")
    square[0, 1] = np.nan  # equal in both
    vectors = {name: DRAW.normal(size=4).astype("float32") for name in ("0.bias", "1.weight", "1.bias")}
    statistics = {"1.running_mean": np.ones(4, "float32"), "1.running_var": np.full(4, 2, "float32")}
    half = {"0.weight": square, **vectors, **statistics}
    theirs = {f"{layer}.{name}": array for layer in ("first", "second") for name, array in half.items()}
    weights, _ = translated(
        source(written(tmp_path / "w.safetensors", {"format": "pt"}, **theirs)), names_of(Shared()), {}
    )
    for ours, array in (("0.weight", square.T), ("1._mean", half["1.running_mean"])):
        names = [f"first.{ours}", f"second.{ours}"]
        for name in names:
            np.testing.assert_array_equal(weights.read(name), array)
        weights.refuse_untied(names, [0] * array.ndim, array.shape, copies=True)


def test_statistics_of_pytorch_say_whose_names_they_are(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "0.weight": (4, 4), "0.bias": (4,), "1.weight": (4,), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,),
        "1.running_mean": (4,), "1.running_var": (4,), "1.num_batches_tracked": (),
    }  # fmt: skip
    file = source(written(tmp_path / "w.safetensors", **shapes))
    lines = outlook(file, small(), Load(path="x"))
    assert "with PyTorch's names" in lines[0] and lines[1].split()[:3] == ["loaded", "8", "tensors"]
    assert (
        lines[2].split()[:8] == ["only", "there,", "of", "no", "use", "here", "1", "tensors"]
        and len(lines) == 3
    )
    weights, _ = translated(file, names_of(small()), {})
    np.testing.assert_array_equal(weights.read("2.weight", (1, 1), (2, 2)), file.read("2.weight").T[1:3, 1:3])
    np.testing.assert_array_equal(weights.read("1._mean"), file.read("1.running_mean"))
    with pytest.raises(UsageError, match=r"a\.2\.weight is only there"):
        outlook(file, small(), Load(path="x", rename={"2.weight": "a.2.weight"}))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_any_box_of_q_k_and_v_joined_head_by_head(tmp_path: Path, apart: bool, turned: bool) -> None:
    inputs, heads, width = 5, 4, 3
    q, k, v = (DRAW.normal(size=(inputs, heads * width)).astype("float32") for _ in range(3))
    whole = np.zeros((inputs, 3 * heads * width), "float32")
    for head in range(heads):
        for number, part in enumerate((q, k, v)):
            at = (3 * head + number) * width
            whole[:, at : at + width] = part[:, head * width : (head + 1) * width]
    pieces = {"q": q, "k": k, "v": v} if apart else {"qkv": np.concatenate([q, k, v], 1)}
    arrays = {name: np.ascontiguousarray(one.T) if turned else one for name, one in pieces.items()}
    file = SafetensorsFile(written(tmp_path / "w.safetensors", **arrays))
    origin = Origin.parse((tuple(f"{name}.T" if turned else name for name in pieces), width))
    weights = Translated(file, {"whole": origin})
    assert weights.shape("whole") == whole.shape
    for columns in [(0, 36), (0, 18), (18, 18), (4, 7), (35, 1), (9, 0)]:
        found = weights.read("whole", (1, columns[0]), (3, columns[1]))
        np.testing.assert_array_equal(found, whole[1:4, columns[0] : sum(columns)])
    for name, array in origin.written(whole).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_q_k_and_v_of_unequal_widths_do_not_fit(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path / "w.safetensors", q=(4, 8), k=(4, 4), v=(4, 4)))
    assert Translated(file, origins_of({"qkv": (("q", "k", "v"), 2)})).shape("qkv") == (4, 8)


def indexed(folder: Path, **files: str) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def test_several_files_with_an_index_are_one_source(tmp_path: Path) -> None:
    written(tmp_path / "1.safetensors", {"format": "pt"}, a=(2, 3))
    written(tmp_path / "2.safetensors", {"format": "pt"}, b=(4,))
    index = indexed(tmp_path, a="1.safetensors", b="2.safetensors")
    for path in (tmp_path, index):  # a folder of Hugging Face's has it
        found = source(path)
        assert found.names == ("a", "b") and found.from_torch and found.shape("b") == (4,)
        np.testing.assert_array_equal(
            found.read("a", (1, 1), (1, 2)), SafetensorsFile(tmp_path / "1.safetensors").read("a")[1:, 1:]
        )
    hub = tmp_path / "snapshots"
    hub.mkdir()
    for name in ("1.safetensors", "2.safetensors", index.name):
        (tmp_path / name).rename(tmp_path / f"blob-{name[0]}")
        (hub / name).symlink_to(tmp_path / f"blob-{name[0]}")
    np.testing.assert_array_equal(source(hub).read("b").shape, [4])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": "gone.safetensors"}, r"names gone\.safetensors, and there is no such file next to it"),
        ({"x": "1.safetensors"}, r"says that x is in 1\.safetensors, and it is not"),
        ({"a": "../1.safetensors"}, "which is no file next to the index"),
        ({"a": 3}, "which is no file next to the index"),
    ],
)
def test_an_index_that_is_wrong_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    written(tmp_path / "1.safetensors", a=(2, 3))
    with pytest.raises(CheckpointError, match=said):
        source(indexed(tmp_path, **files))


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.h5").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"w\.h5 has no known format.*\.pdparams"):
        source(tmp_path / "w.h5")


def in_paddle_nlp(model: Any) -> dict[str, np.ndarray]:
    """A model's weights as PaddleNLP saves them, written out by its own names, and not from our tables."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads, last = 4, len(model.blocks) - 1
    if type(model).__name__ == "Llama":
        found = {
            "llama.embed_tokens.weight": state["blocks.0.token.weight"],
            "llama.norm.weight": state[f"blocks.{last}.norm.weight"],
            "lm_head.weight": state[f"blocks.{last}.out.weight"],
        }
        theirs = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "out": "self_attn.o_proj"}
        theirs |= {each: f"self_attn.{each}_proj" for each in "qkv"}
        theirs |= {each: f"mlp.{each}_proj" for each in ("gate", "up", "down")}
        for n in range(last - 1):
            found |= {
                f"llama.layers.{n}.{name}.weight": state[f"blocks.{n + 1}.{ours}.weight"]
                for ours, name in theirs.items()
            }
            found |= {
                f"llama.layers.{n}.self_attn.{each}_proj.bias": state[f"blocks.{n + 1}.{each}.bias"]
                for each in "qkv"
                if f"blocks.{n + 1}.{each}.bias" in state
            }
        family = "qwen2" if model.bias == "qkv" else "llama"
        return {name.replace("llama", family): array for name, array in found.items()}
    if type(model).__name__ == "GPT":
        return gpt_in_paddle_nlp(state, heads)
    first, end = f"{model.family}.embeddings", f"blocks.{last}"
    found = {f"{first}.word_embeddings.weight": state["blocks.0.token.weight"]}
    found |= {f"{first}.position_embeddings.weight": state["blocks.0.position"]}
    found |= {f"{first}.token_type_embeddings.weight": state["blocks.0.segment"]}
    if "blocks.0.task" in state:
        found |= {f"{first}.task_type_embeddings.weight": state["blocks.0.task"]}
    for decoder in (
        "decoder_",
        "decoder.",
    ):  # since 2.6 it has both names of the bias, and the second one's weight
        found |= {f"cls.predictions.{decoder}weight": found[f"{first}.word_embeddings.weight"]}
        found |= {f"cls.predictions.{decoder}bias": state[f"{end}.out.bias"]}
    found |= {f"{model.family}.pooler.dense.bias": np.zeros(3, "float32")}
    for word in ("weight", "bias"):
        found |= {f"{first}.layer_norm.{word}": state[f"blocks.0.norm.{word}"]}
        found |= {f"cls.predictions.transform.{word}": state[f"{end}.dense.{word}"]}
        found |= {f"cls.predictions.layer_norm.{word}": state[f"{end}.norm.{word}"]}
        for n in range(last - 1):
            found |= layer_in_paddle_nlp(
                state, f"blocks.{n + 1}", f"{model.family}.encoder.layers.{n}", word, heads
            )
    return found


def layer_in_paddle_nlp(
    state: dict[str, np.ndarray], ours: str, theirs: str, word: str, heads: int
) -> dict[str, np.ndarray]:
    """The tensors of a layer of BERT, ERNIE or GPT: `word` is weight or bias."""
    qkv = state[f"{ours}.qkv.{word}"]
    width = qkv.shape[-1] // 3
    apart = qkv.reshape(*qkv.shape[:-1], heads, 3, width // heads)
    found = {
        f"{theirs}.self_attn.{each}_proj.{word}": apart[..., number, :].reshape(*qkv.shape[:-1], width)
        for number, each in enumerate("qkv")
    }
    names = {
        "out": "self_attn.out_proj", "up": "linear1", "down": "linear2", "norm1": "norm1", "norm2": "norm2",
    }  # fmt: skip
    return found | {
        f"{theirs}.{name}.{word}": state[f"{ours}.{layer}.{word}"] for layer, name in names.items()
    }


def gpt_in_paddle_nlp(state: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    found = {
        "gpt.embeddings.word_embeddings.weight": state["blocks.0.token.weight"],
        "gpt.embeddings.position_embeddings.weight": state["blocks.0.position"],
        "lm_head.weight": state["blocks.0.token.weight"],
    }
    for word in ("weight", "bias"):
        found |= {f"gpt.decoder.norm.{word}": state[f"blocks.3.norm.{word}"]}
        for n in range(2):
            found |= layer_in_paddle_nlp(state, f"blocks.{n + 1}", f"gpt.decoder.layers.{n}", word, heads)
    return found


SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {"use": "llama"},
    "qwen2": {"use": "llama", "bias": "qkv"},
    "bert": {"use": "bert", "segments": 2, "tied": True},
    "ernie": {"use": "bert", "segments": 4, "tasks": 3, "tied": True, "family": "ernie"},
    "gpt": {"use": "gpt", "tied": True},
}


def drawn(**settings: Any) -> nn.Layer:
    """A model with square matrices, which would fit the wrong way, too."""
    sizes = {"vocab": 16, "width": 16, "depth": 2, "heads": 4, "hidden": 16, "length": 16}
    model: nn.Layer = read_part("models", {**sizes, **settings}).build()
    with paddle.no_grad():
        for parameter in model.parameters():
            parameter.set_value(DRAW.normal(size=parameter.shape).astype("float32"))
    return model


@pytest.mark.parametrize("family", SWITCHES)
def test_paddle_nlp_s_names_are_known_and_nothing_is_turned(family: str, tmp_path: Path) -> None:
    model = drawn(**SWITCHES[family])
    theirs = in_paddle_nlp(model)
    for inner in ("", f"{family}."):
        saved = {name.removeprefix(inner): paddle.to_tensor(array) for name, array in theirs.items()}
        paddle.save(saved, str(tmp_path / "model_state.pdparams"))
        # The folder has this file alone.
        assert_read(tmp_path, model, "PaddleNLP's" + ", of the model without its head" * bool(inner))


@pytest.mark.parametrize("settings", [{"rope_interleaved": True}, {"bias": "qkv"}, {"qk_norm": True}])
def test_paddle_formers_has_transformers_names_and_turns_nothing_unless_it_says_pt(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = drawn(use="llama", **settings)
    turned = {}
    for ours, origin in origins_of(names_of(model).names[HUGGING_FACE]).items():
        turned |= origin.written(model.state_dict()[ours].numpy())
    kept = ("_proj", "lm_head")
    as_ours = {
        name: array.T if any(each in name for each in kept) else array for name, array in turned.items()
    }
    files = {
        paddle_file(tmp_path, as_ours): "PaddleFormers'",
        written(tmp_path / "np.safetensors", {"format": "np"}, **as_ours): "PaddleFormers'",
        written(tmp_path / "pt.safetensors", {"format": "pt"}, **turned): "Hugging Face's",
        written(tmp_path / "none.safetensors", None, **turned): "Hugging Face's",
    }
    for file, convention in files.items():
        assert_read(file, model, convention)


def test_paddle_nlp_s_layouts_that_are_not_known_are_named(tmp_path: Path) -> None:
    for name, what in (
        ("llama.layers.0.self_attn.qkv_proj.weight", "q, k and v fused"),
        ("model.layers.0.mlp.up_gate_proj.weight", "two products fused"),
    ):
        file = paddle_file(tmp_path, {name: np.ones([4, 4])})
        with pytest.raises(
            UsageError, match=f"{name} is PaddleNLP's, of {what}.*, whose layout is not known here"
        ):
            translated(source(file), names_of(small()), {})


@pytest.mark.parametrize(
    ("family", "other", "said"),
    [
        ("ernie", {"use": "bert", "segments": 4}, r"model \{use: bert, family: ernie\} has its names"),
        ("gpt", {"use": "bert"}, r"model \{use: gpt\} has its names"),
        ("bert", {"use": "gpt"}, r"model \{use: bert\} has its names"),
    ],
)
def test_paddle_nlp_s_other_models_are_named(
    tmp_path: Path, family: str, other: dict[str, Any], said: str
) -> None:
    file = paddle_file(tmp_path, in_paddle_nlp(drawn(**SWITCHES[family])))
    with pytest.raises(UsageError, match=said):
        translated(source(file), names_of(drawn(**other)), {})


def test_two_tensors_are_not_joined_head_by_head() -> None:
    """It was "zip() argument 2 is longer than argument 1", at the first read."""
    with pytest.raises(UsageError, match=r"joins 2 tensors, q \+ k: with a head width it names three"):
        origins_of({"qk": (("q", "k"), 2)})
