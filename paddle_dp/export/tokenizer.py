"""The tokenizer of an exported language model: its files, and the ids of its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paddle_dp.recipe import Recipe

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
