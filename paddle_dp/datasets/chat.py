"""Conversations in .jsonl or .parquet files, whole, in windows; only answers are learned. For gpt and llama."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from paddle_dp.datasets import _texts
from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._chat import FURTHER, Template, WrongLineError, conversation, template_of
from paddle_dp.datasets._packing import Alone, BestFit, Documents, Packed
from paddle_dp.datasets._paths import MissingDataError, existing_path
from paddle_dp.datasets._tokenizers import Tokenizer, kind, tokenizer
from paddle_dp.datasets._windows import TextConfig
from paddle_dp.units import Probability

_VERSION = 2  # of the arrays in the cache


class Conversations(Packed):
    """Conversations in windows, and the way to write and read one: `template` is theirs."""

    template: Template

    def prompt(self, text: str) -> Array:
        """The tokens of a user's message and of the words that begin an answer. Raises WrongLineError."""
        message = {"role": "user", "content": text}
        tokens, _ = self.tokenizer.encode_with_slices(self.template.text([message], prompts=True))
        return tokens

    def answer(self, tokens: Array) -> str:
        """The text of these tokens, up to the mark that ends the assistant's turn."""
        example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text, ((start, stop),) = self.template.write(example)
        end, slices = self.tokenizer.encode_with_slices(text[start:stop])
        end = end[slices[:, 0] >= 1].tolist()  # behind the content
        ends = (n for n in range(len(tokens)) if end and tokens[n : n + len(end)].tolist() == end)
        answered: str = self.tokenizer.decode(tokens[: next(ends, len(tokens))])
        return answered


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    """The text of a conversation is written by the tokenizer's chat_template, or as ChatML. Only the contents of the
    assistant count, with the special token that ends each; the loss needs `ignore_index: -100`."""

    masks_documents: ClassVar[bool] = True  # a model's attention gets a mask
    has_lines: ClassVar[bool] = True

    field: str = "messages"
    """The field of a line, or the column of a .parquet file, that is its list of {role, content}."""

    answers: str | None = None
    """The field of the answers, where `field` has the questions: a text, or a list of as many. Data of PaddleNLP have
    `field: src, answers: tgt`."""

    held_out: Probability = 0.05
    """Share of the different conversations kept for the test split, chosen by their texts: equal ones are in one
    split, and new lines move few others."""

    packing: bool = True
    """Whether conversations share windows. false: each has a separate window, so `train.batch` counts
    conversations."""

    longer: Literal["cut", "leave_out", "refuse"] = "cut"
    """`cut`: of a conversation with more than `length` tokens to predict the first ones are read, and one without an
    answer in them is left out. `leave_out`: it is not read. `refuse`: it is an error."""

    def build(self, split: str) -> Conversations | None:
        """Inputs {"tokens", "positions"} int64 [length] each, targets int64 [length], -100 where none counts. Every
        conversation is in one window of each epoch. None for the test split of `held_out` 0."""
        existing_path(
            self.path and ".", "a .jsonl file with a conversation a line, a folder of them, or a glob"
        )
        is_test = checked_split(split) == "test"
        if is_test and not self.held_out and self.test is None:
            return None
        template, by = template_of(self.tokenizer), tokenizer(self.tokenizer)
        files, (tokens, ends, learned, hashes) = self._conversations(split, by, template)
        if not is_test and self.test is not None:
            self._check_shared(hashes, self._conversations("test", by, template)[1][3])
        documents = Documents.until(ends, tokens, learned)
        chosen = np.full(len(hashes), True)
        if self.test is None:
            chosen = _is_test(hashes, self.held_out) == is_test
        if not chosen.any():
            raise MissingDataError(
                f"dataset.path: all conversations of {self.path} are equal, so none can be held out for the test split"
            )
        documents = replace(documents, begins=documents.begins[chosen], inputs=documents.inputs[chosen])
        count = int(documents.inputs.sum())
        documents = self._fitting(documents, split)
        arrange = (BestFit if self.packing else Alone)(documents.inputs, self.length)
        data = Conversations(documents, arrange, self.length, by, is_test)
        data.template = template
        return self.filled(data, split, count, files)

    def _conversations(
        self, split: str, by: Tokenizer, template: Template
    ) -> tuple[tuple[Path, ...], tuple[Array, ...]]:
        """The files of a split, and what `_encode` makes of them."""
        files = tuple(file for _, file in self.named_files(split))
        encode = partial(_encode, files, by, self.field, self.answers, template)
        settings = (_VERSION, by.identity, template.identity, self.field, self.answers)
        return files, self.encoded(files, encode, 4, *settings)

    def _check_shared(self, hashes: Array, held_out: Array) -> None:
        """Prints how many conversations of `test` are learned, too. Raises MissingDataError if all are."""
        shared = int(np.isin(held_out, hashes).sum())
        sentence = f"{shared} of {len(held_out)} conversations of dataset.test ({self.test}) are in dataset.path, too, "
        sentence += "and are learned, so scores of the test split are too good"
        if 0 < shared == len(held_out):
            raise MissingDataError(
                f"{sentence}: hold out others, or leave dataset.test out for dataset.held_out."
            )
        if shared:
            print(f"chat: {sentence}: remove them from one of both.", flush=True)

    def _fitting(self, documents: Documents, split: str) -> Documents:
        """The documents, cut to a window or without the longer ones. Prints how many are."""
        long = np.flatnonzero(documents.inputs > self.length)
        if not len(long):
            return documents
        lengths = f"{len(long)} of {len(documents.inputs)} conversations of the {split} split have more than "
        lengths += f"{self.length} tokens to predict"
        if self.longer == "refuse":
            most = int(documents.inputs.max())
            raise MissingDataError(
                f"dataset.length: {lengths}, and dataset.longer is refuse: {most} holds all of them. Raise it and "
                "model.length, or set dataset.longer=cut."
            )
        assert documents.learned is not None
        unread = long.tolist()
        if self.longer == "leave_out":
            print(f"chat: {lengths} and are left out", flush=True)
        else:
            unread = [
                index
                for index, begin in zip(long, documents.begins[long] + 1, strict=True)
                if not documents.learned[begin : begin + self.length].any()
            ]
            left_out = f"{len(unread)} of them are left out: no answer begins there"
            print(f"chat: {lengths} and are cut; {left_out}", flush=True)
        read = np.setdiff1d(np.arange(len(documents.inputs)), unread)
        if not len(read):
            fit = "fits into" if self.longer == "leave_out" else "has an answer in its first"
            raise MissingDataError(
                f"dataset.length: none of the {len(long)} conversations of the {split} split {fit} "
                f"{self.length} tokens: raise it, and model.length."
            )
        inputs = np.minimum(documents.inputs, self.length)
        return replace(documents, begins=documents.begins[read], inputs=inputs[read])


def _is_test(hashes: Array, fraction: float) -> Array:
    """Whether a conversation is held out, bool [n]: of the different ones the share with the smallest hashes. So equal
    ones are in the same split, and new lines change the split of few others."""
    different = np.unique(hashes)
    return np.isin(hashes, different[: _texts.count_test(fraction, len(different))])


def _encode(
    files: tuple[Path, ...], by: Tokenizer, field: str, answers: str | None, template: Template
) -> tuple[Array, Array, Array, Array]:
    """The tokens of all conversations in the files' order, the number of tokens up to each one's end, whether a token
    is learned, and a hash uint64 of each one's text. Raises MissingDataError that names the first wrong line and the
    number of others."""
    tokens, learned, wrong = [np.zeros(0, kind(by.vocab))], [np.zeros(0, bool)], list[str]()
    hashes: list[int] = []
    columns = FURTHER if answers is None else (answers, *FURTHER)
    for label, line in (each for file in files for each in _texts.numbered(file, field, (0.0, 1.0), columns)):
        try:
            text, turns = template.write(conversation(line, field, answers))
            pieces, slices = by.encode_with_slices(text)
            counts = np.zeros(len(pieces), bool)
            for start, stop in turns:
                counts |= (slices[:, 1] > start) & (slices[:, 0] < stop)
        except WrongLineError as error:
            wrong.append(f"{label}: {error}")
            continue
        hashes.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        tokens.append(pieces)
        learned.append(counts)
    if wrong:
        first, *rest = wrong
        others = f" So are {len(rest)} other lines, the next {rest[0].split(': ')[0]}." if rest else ""
        raise MissingDataError(f"{first}.{others}")
    ends = np.cumsum([len(piece) for piece in tokens[1:]], dtype=np.int64)
    return np.concatenate(tokens), ends, np.concatenate(learned), np.array(hashes, np.uint64)
