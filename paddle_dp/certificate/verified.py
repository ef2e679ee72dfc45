"""Keeps records of the verdicts of `paddle-dp verify` next to a recipe's runs, where its trainings look for a proof.

A training reports "one process's result" only with its proof: the record of a verdict on the same settings, code, data,
layout, number of ranks, and versions. A record is one JSON file in `.verified`, next to the run folders.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import disk, json_codec
from paddle_dp.data.fingerprint import common, single_samples
from paddle_dp.identity.facts import Facts, RunSignature, are_same, callback_facts, packages, recipe_facts
from paddle_dp.identity.same_run import data_changes, is_path
from paddle_dp.identity.source_code import MODULE_PREFIX, module_code, recipe_code
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Recipe
from paddle_dp.text import plural
from paddle_dp.train.run import Proof

FOLDER, FORMAT = ".verified", 1
_MAX_BYTES, _MAX_FILES = 2**22, 256  # bytes of a record; files that are read, the newest first
# Settings that do not affect learning in the steps that a proof compares.
_FREE = (
    "callbacks", "metrics", "watch", "train.length", "train.max_time", "train.patience", "train.device",
    "dataset.reading", "strategy.check_every",
)  # fmt: skip
_DATE = "%Y-%m-%dT%H:%M:%SZ"
VerdictRecord = dict[str, Any]


def facts_of(recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """The facts that a verdict is about, without the data: settings, code, versions, layout, ranks, by dotted key."""
    settings = {
        key: fact
        for key, fact in recipe_facts(recipe).items()
        if not key.startswith(_FREE) and not (key.startswith("dataset.") and is_path(key, fact))
    }
    layout = {f"layout {axis}": degree for axis, degree in mesh.axes.as_dict().items()}
    code = {**recipe_code(recipe), **module_code(), **callback_facts(recipe.callbacks)}
    return {**settings, **code, **packages(mesh), **layout, "ranks": mesh.ranks}


def now() -> str:
    """The time in UTC, to the second."""
    return time.strftime(_DATE, time.gmtime())


def keep(recipe: Recipe, status: int, record: VerdictRecord) -> str:
    """Writes a record where trainings of the recipe look for it; if `status` of `verify` is not 0, removes the one with
    the same key instead. Returns a sentence for the screen, or ""."""
    path = recipe.folder.parent / FOLDER / f"{record['recipe']}-{record['key'][:12]}.json"
    try:
        if status:
            path.unlink(missing_ok=True)
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, json_codec.encode(record, path.name))
    except OSError as error:
        return f"The verdict was not kept in {path}: {error.strerror}."
    return (
        f"The verdict is kept in {path}: a training of this recipe, code and data on as many ranks names it."
    )


def verdict_record(facts: Facts, data: Mapping[str, Any]) -> VerdictRecord:
    """The record of a verdict on these facts and `data`, {"train": {"samples", "read"}}, as JSON values. `verify` adds
    its result: "recipe", "steps", "rehearsed"."""
    train = data["train"]
    identity = [facts, train["samples"], single_samples(train["read"])]
    text = json.dumps(identity, sort_keys=True, default=str)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"format": FORMAT, "key": key, "date": now(), "facts": dict(facts), "data": dict(data)}


@dataclass(frozen=True)
class ProofSearch:
    """Each call looks for the proof of one training: its recipe on these ranks, with this data."""

    recipe: Recipe
    mesh: Mesh
    identity: RunSignature

    def __call__(self) -> Proof:
        facts = json.loads(json.dumps(facts_of(self.recipe, self.mesh), default=str))
        rejected: list[tuple[list[str], VerdictRecord]] = []
        for record in self._records():
            if not (changes := _changes(record, facts, self.identity)):
                return Proof(verdict_key=record["key"], sentence=self._sentence(record))
            if record["recipe"] == self.recipe.name:
                rejected.append((changes, record))
        if not rejected:
            return Proof(sentence=f"none yet that this is {self._result}: {self._command}")
        changes, record = min(rejected, key=lambda rejection: len(rejection[0]))
        reason = f"{_ranks_and_date(record)}, {_difference(changes, self.mesh)}"
        return Proof(sentence=f"no proof of this training: {reason}: {self._command}")

    def _sentence(self, record: VerdictRecord) -> str:
        compared = f"{record['steps']} steps"
        if record["rehearsed"]:
            compared += ", an evaluation, a checkpoint and a resume"
        return f"{_ranks_and_date(record)}, this code and data: {self._result} ({compared})"

    def _records(self) -> Iterator[VerdictRecord]:
        """Yields the records next to this run and in `runs`, the newest first."""
        folders = {(folder / FOLDER).absolute() for folder in (self.recipe.folder.parent, Path("runs"))}
        files: list[tuple[float, Path]] = []
        for path in (path for folder in folders for path in folder.glob("[!.]*.json")):
            with suppress(OSError):  # removed just now
                files.append((path.stat().st_mtime, path))
        for _, path in sorted(files, reverse=True)[:_MAX_FILES]:
            with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or another version's
                record = json_codec.decode(disk.read_bytes(path, _MAX_BYTES))
                if record["format"] == FORMAT and record["data"]["train"] and record["facts"]["ranks"]:
                    yield record

    @property
    def _result(self) -> str:
        if self.recipe.strategy.config.not_promised(self.recipe):
            return "one process's result, step by step"
        return "one process's result"

    @property
    def _command(self) -> str:
        """The command that makes the proof."""
        recipe = str(self.recipe.folder / "recipe.yaml")
        return shlex.join(["paddle-dp", "verify", recipe, "--ranks", str(self.mesh.ranks)])


def _changes(record: VerdictRecord, facts: Facts, identity: RunSignature) -> list[str]:
    """The keys in which a record differs from this training; [] if it proves the training. A module that the training
    has not imported (yet) does not count."""
    known = record["facts"]
    keys = [key for key in {**known, **facts} if key in facts or not key.startswith(MODULE_PREFIX)]
    changes = [key for key in keys if not _equal(known.get(key), facts.get(key))]
    data = record["data"]
    if data_changes(data, identity) or not common(data["train"]["read"], identity.data["train"]["read"]):
        changes.append("data")
    return changes


def _equal(first: Any, other: Any) -> bool:
    """Whether two facts are the same; folders are compared by path, since their content is not read."""
    unread = isinstance(first, dict) and first.get("crc32", "") is None
    return first == other if unread else are_same(first, other)


def _difference(changes: Sequence[str], mesh: Mesh) -> str:
    """The difference of a record from the training that it does not prove, as part of a sentence."""
    if all(key == "ranks" or key.startswith("layout ") for key in changes):
        return f"and now {plural(mesh.ranks, 'rank')}" if "ranks" in changes else "in another layout"
    code = [key.removeprefix("code of ") for key in changes if key.startswith("code of")]
    if code:
        return f"of other code ({code[0]}{', …' * (len(code) > 1)})"
    if "data" in changes:
        return "of other data"
    rest = [key for key in changes if key != "ranks" and not key.startswith("layout ")]
    return f"with another {rest[0]}{' and more' * (len(rest) > 1)}"


def _ranks_and_date(record: VerdictRecord) -> str:
    ranks, day = plural(record["facts"]["ranks"], "rank"), time.strptime(record["date"], _DATE)
    return f"verified on {ranks}, {day.tm_mday} {time.strftime('%b %Y', day)}"
