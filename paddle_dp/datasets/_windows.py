"""The base of the text data sets: their files, the split, and windows of tokens of equal length.

Tokens are made once from texts and kept in a file, which every reading process maps into memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from paddle_dp.datasets import _texts
from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._paths import MissingDataError, file_state, refuse_learned
from paddle_dp.datasets._texts import Span
from paddle_dp.datasets._tokenizers import Tokenizer, kind, tokenizer
from paddle_dp.errors import DataError
from paddle_dp.files import replacing
from paddle_dp.units import Bytes, Fraction, Positive

_VERSION = 1  # of the token files' format
Filled = TypeVar("Filled", bound=Sized)
Encode = Callable[[], tuple[Array, ...]]
"""Makes arrays of the files' documents, the tokens first."""


class Windows:
    """Consecutive windows of `length` tokens: input int64 [length], target the same shifted by one token.

    Every token but the first is a target exactly once; an incomplete window at the end is not read.
    """

    def __init__(self, tokens: Array, length: int, files: tuple[Path, ...], tokenizer: Tokenizer):
        self.tokens, self.length, self.files, self.tokenizer = tokens, length, files, tokenizer
        count, step = len(self), tokens.strides[0]
        # Windows are rows of one view: gathering rows is 8 times as fast as gathering tokens.
        shape, strides = (count, length + 1), (length * step, step)
        self._rows = as_strided(np.asarray(tokens), shape, strides, writeable=False)

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} samples")
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        return window[:-1], window[1:]

    def take(self, indices: Array) -> tuple[Array, Array]:
        windows = self._rows[indices]
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text files and their tokenization."""

    has_lines: ClassVar[bool] = False  # whether each line is parsed, so that a .json file may have them

    path: str | None = None
    """A folder, a file or a glob: of texts, of .jsonl files with a document a line, or of .parquet files with a
    document a row. Other tables, and archives, are refused."""

    field: str = "text"
    """The field of a .jsonl line, or the column of a .parquet file, that is its text."""

    test: str | None = None
    """A folder, file or glob of the test split, in place of `held_out`; none of its files is one of `path`."""

    limit: Bytes | None = None
    """Read the first files, in the order of their names, up to this much text."""

    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json (package tokenizers) or of a sentencepiece model."""

    length: Positive = 128
    """Tokens of a sample."""

    held_out: Fraction = 0.05
    """Share of the files kept for the test split, chosen by their names; of a single file, its end."""

    cache: str | None = None
    """Folder for token files, which are made once; ~/.cache/paddle_dp by default."""

    def __post_init__(self) -> None:
        if self.held_out >= 1:
            raise ValueError("held_out: 1 leaves nothing to train on; 0.05 keeps a twentieth for the test")

    def windows(self, split: str) -> Windows:
        """Inputs and targets int64 [length]. No two splits share a file, or a byte of a single file."""
        by = tokenizer(self.tokenizer)
        files, (tokens,) = self.texts(split, by, arrays=1)
        return self.filled(Windows(tokens, self.length, files, by), split, len(tokens), files)

    def texts(self, split: str, by: Tokenizer, arrays: int) -> tuple[tuple[Path, ...], tuple[Array, ...]]:
        """The files of a split, their tokens and, if `arrays` is 2, the number of tokens up to each document's end."""
        files, span = self._texts(checked_split(split))
        encode = partial(_encode, files, span, by, self.field)
        return files, self.encoded(files, encode, arrays, span, by.identity)

    def encoded(
        self, files: tuple[Path, ...], encode: Encode, arrays: int, *settings: object
    ) -> tuple[Array, ...]:
        """The first `arrays` arrays that `encode` makes of the files, or has made before. `settings`: all else that it
        depends on (JSON values)."""
        states = [(str(file), *file_state(file.stat())) for file in files]
        field = [self.field] if any(map(_texts.holds_documents, files)) else []
        return cached(self.cache, (states, *settings, *field), encode, arrays)

    def filled(self, data: Filled, split: str, tokens: int, files: tuple[Path, ...]) -> Filled:
        """`data`, made of so many tokens. Raises DataError if it has no sample."""
        if not len(data):
            sizes = f"{tokens} tokens in {len(files)} files, and a sample needs {self.length + 1}"
            raise DataError(
                f"the {split} split has {sizes}: shorten dataset.length, or change dataset.held_out"
            )
        return data

    def named_files(self, split: str = "train") -> list[_texts.Named]:
        """All files, up to `limit`; of the split `test` the files of `test`, if it is set. Of the split `train`
        it raises MissingDataError for a file of `path` that is one of `test`, too."""
        if split == "train" or self.test is None:
            files = _texts.text_files(self.path, self.has_lines)
            files = _texts.first_bytes(files, self.limit.count) if self.limit else files
            test_files = [] if self.test is None else self.named_files("test")
            remedy = "by a glob, or leave dataset.test out for dataset.held_out"
            refuse_learned((file for _, file in test_files), (file for _, file in files), "path", remedy)
            return files
        try:
            return _texts.text_files(self.test, self.has_lines)
        except MissingDataError as error:
            raise MissingDataError(str(error).replace("dataset.path", "dataset.test")) from None

    def _texts(self, split: str) -> tuple[tuple[Path, ...], Span]:
        """The files of a split, and the part of each to read."""
        files = self.named_files(split)
        if self.test is not None:
            return tuple(file for _, file in files), (0.0, 1.0)
        if len(files) == 1:
            span = (0.0, 1 - self.held_out) if split == "train" else (1 - self.held_out, 1.0)
            return (files[0][1],), span
        test_names = _texts.choose_test_files(files, self.held_out)
        return tuple(file for name, file in files if (name in test_names) == (split == "test")), (0.0, 1.0)


def _encode(files: tuple[Path, ...], span: Span, by: Tokenizer, field: str) -> tuple[Array, Array]:
    """The tokens of all documents in the files' order, each followed by the token that ends a text, and the number of
    tokens up to the end of each document."""
    dtype = kind(by.vocab)
    end = np.array([] if by.end is None else [by.end], dtype)
    pieces = [np.zeros(0, dtype)]
    for file in files:
        documents = _texts.documents(file, field, span)
        pieces += [np.concatenate([by.encode(text), end]) for text in documents]
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces[1:]])


def cached(
    folder: str | None, sources: Sequence[object], make: Callable[[], tuple[Array, ...]], arrays: int = 1
) -> tuple[Array, ...]:
    """The first `arrays` arrays that are made from `sources` (JSON values), memory-mapped from `folder`, by default the
    user's cache folder; if one is missing, `make` makes all, and these are written first.

    Several processes may call this: one makes the arrays while the others wait. Without file locks (some network
    folders), every process makes them. If the folder cannot be written, they stay in memory.
    """
    cache = Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paddle_dp")).expanduser()
    name = hashlib.sha256(json.dumps([_VERSION, *sources]).encode()).hexdigest()[:24]
    files = [cache / (f"{name}-{number}.npy" if number else f"{name}.npy") for number in range(arrays)]
    if (known := _read_all(files)) is not None:
        return known
    with contextlib.ExitStack() as lock:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock.enter_context(_alone(cache / f".{name}.lock"))
        except OSError:
            return make()[:arrays]
        if (known := _read_all(files)) is not None:  # another process has made them while this one waited
            return known
        return tuple(map(_write, files, make()))


def _read_all(files: Sequence[Path]) -> tuple[Array, ...] | None:
    """The arrays of the files; None if one of them cannot be read."""
    read = tuple(array for file in files if (array := _read(file)) is not None)
    return read if len(read) == len(files) else None


def _read(file: Path) -> Array | None:
    try:
        read: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    # The file is missing or cut short: some disks lose the end of a renamed file.
    except (OSError, ValueError, EOFError):
        return None
    return read


def _write(file: Path, array: Array) -> Array:
    """Writes `array` to `file` and maps it; returns `array` itself if the disk refuses."""
    try:
        with replacing(file) as partial, partial.open("wb") as out:
            np.save(out, array)
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        return array
    read = _read(file)
    return array if read is None else read


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds the file lock `lock`; has no effect on a file system without locks."""
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
