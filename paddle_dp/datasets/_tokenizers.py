"""Tokenizers: bytes, or a trained tokenizer from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._paths import existing_path, needed_module

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to tokens. `vocab`: the number of tokens. `end`: the token that ends a text, or None. `identity`: a
    text that differs between tokenizers and between versions of a file."""

    vocab: int
    end: int | None
    identity: str

    def encode(self, text: bytes) -> Array: ...

    def encode_with_slices(self, text: str) -> tuple[Array, Array]:
        """The tokens [n], and the slice of the text's characters that each one is made of, int64 [n, 2]."""
        ...

    def decode(self, tokens: Array) -> str: ...


class EachByte:
    """Every byte is a token; byte 0, which texts do not contain, ends a text."""

    vocab: int = 256
    end: int | None = 0
    identity: str = "bytes"

    def encode(self, text: bytes) -> Array:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_with_slices(self, text: str) -> tuple[Array, Array]:
        tokens = self.encode(text.encode())
        starts = np.cumsum((tokens & 0xC0) != 0x80) - 1  # other bytes begin a character of UTF-8
        return tokens, np.stack([starts, starts + 1], axis=1)

    def decode(self, tokens: Array) -> str:
        return bytes(np.asarray(tokens, dtype=np.uint8)).decode("utf-8", "replace")


class Trained:
    """A tokenizer.json of the package tokenizers, or a sentencepiece model file."""

    def __init__(self, file: Path):
        stat = file.stat()
        self.identity = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        if file.suffix == ".json":
            self._inner = _package("tokenizers", file).Tokenizer.from_file(str(file))
            self.vocab = self._inner.get_vocab_size()
            ends = [self._inner.token_to_id(token) for token in _ENDS]
            self.end = next((end for end in ends if end is not None), None)
        else:
            self._inner = _package("sentencepiece", file).SentencePieceProcessor(model_file=str(file))
            self.vocab = self._inner.vocab_size()
            self.end = self._inner.eos_id() if self._inner.eos_id() >= 0 else None
        self._json = file.suffix == ".json"

    def encode(self, text: bytes) -> Array:
        string = text.decode("utf-8", "replace")
        tokens = (
            self._inner.encode(string, add_special_tokens=False).ids
            if self._json
            else self._inner.encode(string)
        )
        return np.array(tokens, dtype=kind(self.vocab))

    def encode_with_slices(self, text: str) -> tuple[Array, Array]:
        encoding = self._inner.encode(text, add_special_tokens=False)
        slices = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=kind(self.vocab)), slices

    def decode(self, tokens: Array) -> str:
        return str(self._inner.decode([int(token) for token in tokens]))


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer `name`: "bytes" or a file's path."""
    if name == "bytes":
        return EachByte()
    return Trained(existing_path(name, "a tokenizer.json or a sentencepiece model", setting="tokenizer"))


def kind(vocab: int) -> Any:
    """The smallest integer dtype for `vocab` tokens."""
    return np.min_scalar_type(vocab - 1)


def _package(name: str, file: Path) -> Any:
    error = f"dataset.tokenizer: reading {file} needs the package {name}: pip install {name}"
    return needed_module(name, error)
