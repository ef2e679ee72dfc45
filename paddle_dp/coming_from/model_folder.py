"""The model of a configuration: the folder that it names, with a config.json, or the family by its name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.errors import RecipeError
from paddle_dp.part import find, names
from paddle_dp.recipe import hf_config

_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json", "*.pdparams",
)  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model")
TEXTS = "path/of/the/texts"
# Kinds whose names other models have, too: gpt-oss, ernie-gram, ERNIE-4.5-21B-A3B. Their config.json decides.
_SHARED_NAMES = ("gpt", "ernie", "ernie4_5")
_HEAD = 1024  # tokens of a sample where neither the file nor the model says a length


@dataclass(frozen=True)
class PublishedModel:
    """The recipe's `model`. `family`: its name here. `folder`: with the tokenizer, if it is known. `sizes`: the
    settings that config.json gives, or none."""

    section: dict[str, Any]
    family: str
    folder: Path | None
    sizes: dict[str, Any]


def published_model(c: Configuration, key: str, folder: Path | None, with_weights: bool) -> PublishedModel:
    """The model that the user's `folder` holds, that `key` names, or, without a name, that the config.json next to the
    file describes.

    `with_weights`: whether the training begins with published weights. Raises UsageError for a model that no family
    here is.
    """
    name = c.take(key) if folder is None else c.values.get(key)
    c.carried |= {key} & c.values.keys()
    neighbor = c.folder if not name and _sizes_file(c.folder).is_file() else None
    local = Path(name).expanduser() if isinstance(name, str) and name else None
    is_local = local is not None and _sizes_file(local).is_file()
    source = folder or (local if is_local else neighbor)
    if source is None:
        return _by_name(c, key, name, with_weights)
    try:
        values = hf_config.read(source)
        family = _family_of(c, key, source, values.get("model_type"))
        _reject_head(c, key, source, family, values.get("architectures"))
        sizes = hf_config.settings_of(values, find("models", family), family, None, hf_config.file_in(source))
    except RecipeError as error:
        c.reject(key, f"{source}: {error}")
    for dropout in ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout"):
        if values.get(dropout):
            c.differ(f"Attention weights are not dropped; theirs are: {dropout} of config.json.")
    has_weights = any(file for pattern in _WEIGHTS for file in source.glob(pattern))
    if with_weights and has_weights and source is not neighbor:
        return PublishedModel({"use": family, "from": str(source)}, family, source, sizes)
    if with_weights:
        begun = f"theirs began with those of {name}" if name else "if theirs began with others, name them"
        c.fill("load", f"weights are drawn here; {begun}: load: {{path: FOLDER}}")
    return PublishedModel({"use": family, **sizes}, family, source, sizes)


def _by_name(c: Configuration, key: str, name: Any, with_weights: bool) -> PublishedModel:
    """The model by the family in its name: the folder has to be filled in."""
    if not isinstance(name, str):
        c.reject(
            key, "missing, so the model is not known: name the folder of its config.json, --model FOLDER"
        )
    last = name.rstrip("/").rpartition("/")[2].lower()
    kinds = [
        (kind, use)
        for kind, use in _families().items()
        if kind not in _SHARED_NAMES and re.search(rf"(?<![a-z]){kind}(?![a-z])", last)
    ]
    if not kinds:
        c.reject(
            key,
            f"there is no such folder, and its name has no family of models that is here ({', '.join(_families())}). "
            "Name the folder of its config.json: --model FOLDER",
        )
    family = kinds[-1][1]
    c.fill(
        "model.from", f"the folder of {name}, which is not here. {family} is by its name; config.json decides"
    )
    if _sizes_file(c.folder).is_file():
        c.differ(
            f"The {hf_config.file_in(c.folder)} next to the file is not read, as the file names {name}: --model "
            f"{c.folder}."
        )
    if not with_weights:
        c.fill("model", "theirs draws the weights anew. A folder with a config.json alone gives the sizes")
    return PublishedModel({"use": family, "from": name}, family, Path(name), {})


def _sizes_file(folder: Path) -> Path:
    return folder / hf_config.file_in(folder)


def _families() -> dict[str, str]:
    """Hugging Face's model_type → the model here."""
    return {kind: use for use in names("models") for kind in hf_config.model_types(use)}


def _family_of(c: Configuration, key: str, folder: Path, model_type: Any) -> str:
    families = _families()
    if model_type not in families:
        here = f"has model_type {json.dumps(model_type)}, and the models here are {', '.join(families)}"
        c.reject(key, f"{_sizes_file(folder)} {here}")
    return families[model_type]


def _reject_head(c: Configuration, key: str, folder: Path, family: str, architectures: Any) -> None:
    """Raises UsageError for a model of another task than the family's here, such as LlamaForSequenceClassification."""
    heads = "ImageClassification" if family == "vit" else "CausalLM|MaskedLM|Pre[Tt]raining"
    known = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if known and not any(re.search(rf"For({heads})|^(?!.*(For[A-Z]|Reward))", each) for each in known):
        c.reject(
            key,
            f"{_sizes_file(folder)} has architectures {', '.join(known)}, a head of another task than "
            f"{family}'s here: name a folder without it, --model FOLDER",
        )


def texts_section(
    c: Configuration,
    model: PublishedModel,
    path: Any,
    length: int | None,
    named: str = "which the file does not name",
    use: str = "text_files",
) -> dict[str, Any]:
    """The data set of a language model, in windows of `length` tokens: texts, for BERT with masked tokens, or another
    `use`. `named`: a clause on the texts, if the file has no `path`."""
    section: dict[str, Any] = {"use": "masked_texts" if model.family == "bert" else use}
    section["path"] = path or TEXTS
    if not path:
        form = "conversations (.jsonl)" if use == "chat" else "texts (.txt, .jsonl)"
        c.fill("dataset.path", f"the file or folder of the {form}, {named}")
    longest = model.sizes.get("length")
    if length is None:
        length = min(longest or _HEAD, _HEAD)
        c.fill("dataset.length", f"tokens of a sample, which the file does not name: {length} here")
    elif longest and length > longest:
        c.differ(f"Samples have {longest} tokens, as the model reads no more; theirs {length}.")
        length = longest
    named_folder = c.take("tokenizer_name_or_path") or c.take("tokenizer_name")
    folders = [Path(folder) for folder in (named_folder, model.folder) if folder]
    files = [folder / name for folder in folders for name in _TOKENIZERS]
    tokenizer = next(filter(Path.is_file, files), None)
    section["tokenizer"] = str(tokenizer or [*files, Path(TEXTS, _TOKENIZERS[0])][0])
    if tokenizer is None:
        c.fill("dataset.tokenizer", "its file, tokenizer.json or a sentencepiece model")
    section["length"] = length
    if model.family == "bert":
        section["mask"] = _mask(c, tokenizer)
    return section


def _mask(c: Configuration, tokenizer: Path | None) -> int:
    """The number of the mask token, or the one in BERT's vocabularies of English."""
    usual = 103
    try:
        content = json.loads(tokenizer.read_text("utf-8")) if tokenizer is not None else {}
        added = [each["id"] for each in content["added_tokens"] if each["content"] == "[MASK]"]
        return int(added[0])
    except (OSError, ValueError, LookupError, TypeError):
        c.fill("dataset.mask", f"the number of the tokenizer's mask token, {usual} in bert-base-uncased")
        return usual


# Linear layers of a Llama by their names in PEFT, and here.
_LINEARS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip


def layers_of(c: Configuration, model: PublishedModel, key: str, names: list[str]) -> list[str]:
    """Patterns of the Linear layers that PEFT's target modules are here: `names`, or all of the blocks."""
    if names in (["all"], ["all-linear"]):
        return blocks_of(c, model)
    known = [name for name in names if model.family == "llama" and name in _LINEARS]
    if len(known) < len(names):
        unknown = next(name for name in names if name not in known)
        reason = f"{unknown} is no layer of {model.family} that is known here: adapter.match has its layers"
        c.lose_key(key, reason if known else f"{reason}, and all of the blocks are taken")
    patterns = [f"*.{_LINEARS[name]}" for name in known if name != "o_proj"]
    if "o_proj" in known:  # the layer after the blocks is an `out`, too
        patterns += blocks_of(c, model, "out")
    return patterns or blocks_of(c, model)


def blocks_of(c: Configuration, model: PublishedModel, layers: str = "*") -> list[str]:
    """Patterns of the Linear layers in the blocks, by default all, without the output layer: LoRA of other tools adapts
    these."""
    depth = model.sizes.get("depth")
    if depth is None:
        pattern = f"a pattern for each block, blocks.1.{layers} to the last one"
        c.fill("adapter.match", f"{pattern}: theirs adapts these")
    return [f"blocks.{number}.{layers}" for number in range(1, 1 + (depth or 1))]
