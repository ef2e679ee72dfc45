"""Writes a checkpoint as Hugging Face's libraries read it: config.json, model.safetensors, the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.assembly.build import plain_learner
from paddle_dp.checkpoint import Checkpoint, TensorShard, find, is_adapter, load, tensor_shard
from paddle_dp.checkpoint.other_names import HUGGING_FACE, PYTORCH, Origin, Translated, names_of, origins_of
from paddle_dp.checkpoint.peft import CONFIG as ADAPTER_CONFIG
from paddle_dp.checkpoint.peft import WEIGHTS as ADAPTER
from paddle_dp.checkpoint.peft import A, B, peft_config, peft_origins
from paddle_dp.checkpoint.shards import DTYPES, Dims
from paddle_dp.checkpoint.source import SafetensorsFile, WeightsOf
from paddle_dp.checkpoint.tensor_file import Forms, stream_tensors
from paddle_dp.checkpoint.tensors import WeightSource, box_at
from paddle_dp.core.lora import merge_low_rank
from paddle_dp.errors import ExportError, UsageError
from paddle_dp.export.target import INFO, check_target, new_export
from paddle_dp.mesh import join
from paddle_dp.part import lazily
from paddle_dp.recipe import Recipe
from paddle_dp.recipe.hf_config import FILE as CONFIG
from paddle_dp.recipe.hf_config import written
from paddle_dp.text import few, plural
from paddle_dp.train.state import load_model

WEIGHTS = "model.safetensors"


def export(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes a run's checkpoint into the folder options["to"]: complete or nothing. Merges an adapter into its base, or
    with options["adapter"] writes it alone, in PEFT's format.

    options["ema"] writes averages in place of the weights that have one. Raises the errors of `write` and of
    `write_adapter`, and CheckpointError for a damaged checkpoint or one that holds NaN.
    """
    folder, ema = Path(options["to"]), bool(options.get("ema"))
    check_target(folder)
    checkpoint = find(options.get("checkpoint") or "newest", recipe.folder / "checkpoints")
    if options.get("adapter"):
        saved = load(checkpoint).without_nan()
        print(folder, write_adapter(recipe, saved, folder, ema=ema), sep="\n  ", flush=True)
        return
    if is_adapter(checkpoint):
        learner = plain_learner(recipe, join(seed=recipe.train.seed, device=recipe.train.device))
        load_model(load(checkpoint).without_nan(), learner, ema=ema)
        merge_low_rank(learner.model)
        shards = {name: tensor_shard(name, tensor) for name, tensor in learner.model.state_dict().items()}
        weights: WeightSource = Shards(checkpoint, shards)
    else:
        weights = WeightsOf(load(checkpoint).without_nan(), ema=ema)
    print(folder, write(recipe, weights, folder), sep="\n  ", flush=True)


class Shards:
    """A source of whole tensors in memory."""

    def __init__(self, folder: Path, shards: Mapping[str, TensorShard]):
        self.folder, self._shards = folder, shards

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shards))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[name].box.shape

    def dtype(self, name: str) -> str:
        return self._shards[name].dtype

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        array = self._shards[name].array
        return array[box_at(self, name, offset, shape).slices].copy()


def write(recipe: Recipe, weights: WeightSource, folder: Path) -> str:
    """Writes a model's weights into `folder`, complete or nothing; returns a summary.

    A model without a table of Hugging Face's names gets PyTorch's names, and no config.json. Raises UsageError for a
    folder that holds other files, or a config that Hugging Face's model cannot express; ExportError if the file, read
    back, differs from the checkpoint.
    """
    check_target(folder)
    with lazily():
        model = recipe.model.build()
    tables = names_of(model).names
    naming = HUGGING_FACE if HUGGING_FACE in tables else PYTORCH
    config, texts = None, TokenizerFiles()
    if naming == HUGGING_FACE:
        config = written(recipe.model.config)
        if "vocab_size" in config:
            texts = tokenizer_files(recipe, config["vocab_size"])
            config |= texts.ids
    with new_export(folder) as partial:
        count = _write_tensors(partial / WEIGHTS, weights, origins_of(tables[naming]))
        if config is not None:
            _write_json(partial / CONFIG, config)
        for name, file in texts.files.items():
            shutil.copyfile(file, partial / name)
        if GENERATION not in texts.files and any(value is not None for value in texts.ids.values()):
            _write_json(partial / GENERATION, texts.ids)
        info = {"model": recipe.model.name, "checkpoint": str(weights.folder), "names": naming}
        _write_json(partial / INFO, info)
    kind = f"for {config['architectures'][0]}" if config else f"with {naming} names, and no {CONFIG}"
    files = f", with {plural(len(texts.files), 'file')} of {texts.folder}" if texts.files else ""
    return f"{recipe.model.name} of {weights.folder}: {count} tensors, {kind}{files}"


@runtime_checkable
class LowRankSizes(Protocol):
    """The settings of an adapter of low rank."""

    rank: int
    alpha: float


def write_adapter(recipe: Recipe, saved: Checkpoint, folder: Path, *, ema: bool = False) -> str:
    """Writes an adapter's checkpoint as PEFT reads it, complete or nothing; returns a summary.

    Raises UsageError for a folder that holds other files, a checkpoint without an adapter, and one that has more than A
    and B; ExportError if the file, read back, differs from the checkpoint.
    """
    check_target(folder)
    sizes = None if recipe.adapter is None else recipe.adapter.config
    if "base" not in saved.state or not isinstance(sizes, LowRankSizes):
        raise UsageError(f"--adapter: {saved.folder} holds no adapter.")
    weights = WeightsOf(saved, ema=ema, adapter=True)
    layers = [name.removesuffix(f".{A}") for name in weights.names if name.endswith(f".{A}")]
    if more := sorted(set(weights.names) - {f"{layer}.{factor}" for layer in layers for factor in (A, B)}):
        raise UsageError(
            f"--adapter: this run has trained {few(more, 3)}, too, which are no part of a LoRA: leave --adapter out, "
            "which writes the whole model."
        )
    with lazily():
        tables = names_of(recipe.model.build())
    origins = peft_origins(tables, layers)
    model = written(recipe.model.config) if HUGGING_FACE in tables.names else {"architectures": [""]}
    causal = model["architectures"][0].endswith(("CausalLM", "LMHeadModel"))
    base = (
        recipe.load.path if recipe.load and (Path(recipe.load.path).expanduser() / CONFIG).is_file() else None
    )
    config = peft_config(tables, origins, sizes.rank, sizes.alpha, base, "CAUSAL_LM" if causal else None)
    with new_export(folder) as partial:
        count = _write_tensors(partial / ADAPTER, weights, origins)
        _write_json(partial / ADAPTER_CONFIG, config)
        info = {"model": recipe.model.name, "checkpoint": str(weights.folder), "names": "PEFT's"}
        _write_json(partial / INFO, info)
    return f"lora of {weights.folder}: {count} tensors of {plural(len(layers), 'layer')}, for PEFT"


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(content), indent=2) + "\n", "utf-8")


def _write_tensors(file: Path, weights: WeightSource, origins: dict[str, Origin]) -> int:
    """Writes the weights under their other names, one tensor at a time; returns the number of tensors.

    Raises ExportError unless the file, read back as weights, equals the checkpoint bit for bit.
    """
    forms, ours = _forms(weights, origins)

    def read(target_name: str) -> np.ndarray:
        name = ours[target_name]
        return origins[name].written(weights.read(name))[target_name]

    stream_tensors(file, forms, read, {"format": "pt"})
    back = Translated(SafetensorsFile(file), origins)
    for name in origins:
        if back.read(name).tobytes() != weights.read(name).tobytes():
            raise ExportError(f"{name}, read back, differs from the checkpoint, so nothing was kept.")
    return len(forms)


def _forms(weights: WeightSource, origins: dict[str, Origin]) -> tuple[Forms, dict[str, str]]:
    """Returns dtype and shape of each tensor to write, a tied weight once, and the name of our weight that holds it.

    No weight is read: the shapes are found with broadcast views of a zero.
    """
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    ours: dict[str, str] = {}
    for name, origin in origins.items():
        zeros = np.broadcast_to(np.zeros((), DTYPES[weights.dtype(name)][1]), weights.shape(name))
        for target_name, array in origin.written(zeros).items():
            if target_name not in forms:
                forms[target_name], ours[target_name] = (weights.dtype(name), tuple(array.shape)), name
    return forms, ours


# The tokenizer of an exported language model --------------------------------------------------------------------------

GENERATION = "generation_config.json"
# The files that transformers reads a tokenizer from, and its settings of generation.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", GENERATION,
)  # fmt: skip
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class TextSettings(Protocol):
    """The settings of a data set of texts: `bytes`, or a tokenizer's file."""

    tokenizer: str


@dataclass(frozen=True)
class TokenizerFiles:
    """`files`: name in an export → file; `ids`: of the special tokens, None if unknown; `folder`: their origin."""

    files: Mapping[str, Path] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(IDS))
    folder: Path | None = None


def tokenizer_files(recipe: Recipe, vocab: int) -> TokenizerFiles:
    """The tokenizer of the data set, else of the Hugging Face folder in `load.path`; empty without either.

    Ids are from config.json, else from the tokenizer's own files. An id that is none of the model's `vocab` tokens is
    None: transformers would refuse it, or read another row.
    """
    data = recipe.dataset.config
    if isinstance(data, TextSettings) and isinstance(data.tokenizer, str):
        file = Path(data.tokenizer).expanduser()
        if file.is_file() and file.name not in FILES:
            name = "tokenizer.json" if file.suffix == ".json" else "tokenizer.model"
            return TokenizerFiles({name: file}, _ids({}, {}, file, vocab), file.parent)
        if file.is_file():
            return _in_folder(file.parent, vocab)
        if data.tokenizer == "bytes":
            return TokenizerFiles()
    folder = Path(recipe.load.path).expanduser() if recipe.load else None
    return _in_folder(folder, vocab) if folder is not None and folder.is_dir() else TokenizerFiles()


def _in_folder(folder: Path, vocab: int) -> TokenizerFiles:
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    config = {**_content(folder / GENERATION), **_content(folder / "config.json")}
    ids = _ids(config, _content(folder / "tokenizer_config.json"), folder / "tokenizer.json", vocab)
    return TokenizerFiles(files, ids, folder)


def _ids(
    config: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Path, vocab: int
) -> dict[str, Any]:
    """The special tokens' ids from config.json, else by their texts in the tokenizer's `settings`."""
    added = _content(tokenizer).get("added_tokens", []) if not all(key in config for key in IDS) else []
    by_text = {
        each["content"]: each["id"]
        for each in added
        if isinstance(each, dict) and {"content", "id"} <= each.keys()
    }
    ids: dict[str, Any] = {}
    for key in IDS:
        token = settings.get(key.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        value = config[key] if key in config else by_text.get(text) if text else None
        numbers = value if isinstance(value, list) else [value]
        ids[key] = value if all(type(n) is int and 0 <= n < vocab for n in numbers) else None
    return ids


def _content(file: Path) -> dict[str, Any]:
    """A JSON file's group of settings; empty if there is none."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
