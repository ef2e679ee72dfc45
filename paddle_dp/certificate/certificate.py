"""The certificate of a run: its inputs, its ranks, and the digests of the weights in each checkpoint.

The main rank writes RUN/certificate.json when a training begins, after each checkpoint and at the end; a resume
continues it. `paddle-dp certificate RUN` reads it (proof.certified).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paddle_dp.certificate.verified import ProofSearch, now
from paddle_dp.checkpoint import Checkpoint, checkpoints, json_codec, load, step_of
from paddle_dp.checkpoint.disk import replace
from paddle_dp.checkpoint.manifest import MANIFEST
from paddle_dp.data.fingerprint import single_samples
from paddle_dp.errors import CheckpointError, message_of
from paddle_dp.identity.facts import RunSignature, recipe_facts
from paddle_dp.learner import Learner
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.recipe import Recipe
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.judge import Refusal
from paddle_dp.train.run import Run
from paddle_dp.train.state import placed_digest

NAME = "certificate.json"
FORMAT = 1
DONE = "done"
_BITS = 16  # bytes of a digest
VARIABLES = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")  # they decide how products are summed, and so the bits
# These settings decide no number.
_UNUSED = ("callbacks", "metrics", "watch", "train.max_time", "train.patience", "train.device", "arguments")
Content = dict[str, Any]


def with_proof(run: Run) -> Run:
    """The run with the search for its proof; unchanged for a script, and if `verify` compares no such training."""
    if run.recipe is None or run.identity is None:
        return run
    config = run.recipe.strategy.config
    is_compared = config.compared_by_step or not config.not_promised(run.recipe)
    if not is_compared or (run.mesh.ranks == 1 and config.batch_chunks == 1):
        return run
    return dataclasses.replace(run, proof=ProofSearch(run.recipe, run.mesh, run.identity))


class CertificateWriter(Callback):
    """Keeps the certificate of `run`. Only the main rank writes; a disk that cannot be written stops no training."""

    def __init__(self, run: Run):
        self.run = run
        self.path = run.folder / NAME
        self.content: Content = {}
        self._warned = False
        self._began = 0.0  # seconds since 1970

    def start(self, moment: Moment) -> None:
        weights = model_digest(moment.trainer.learner)
        if not self.run.mesh.is_main or self.run.identity is None:
            return
        before = self.content or self._continued()  # a second fit() in one process continues the first one's
        self._began = time.time()
        if self.run.resumed is not None:
            add_saved(before, self.run.resumed.folder, self.run.folder)
        identity, mesh = self.run.identity, self.run.mesh
        attempt = {
            "begun": now(), "ended": None, "why": None,
            "host": mesh.host, "device": mesh.displayed_device, "ranks": mesh.ranks, "layout": mesh.axes.as_dict(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "versions": versions(identity), "recipe": recipe_digest(self.run.recipe, identity),
            "from": moment.progress.step, "to": moment.progress.step,
            "resumed": None if self.run.resumed is None else str(self.run.resumed.folder),
            "changes": list(self.run.changes), "weights": weights, "saved": [], "differences": [],
            "refused": [], **self._proof(),
        }  # fmt: skip
        self.content = {
            "format": FORMAT, "name": self.run.name, "steps": moment.trainer.total_steps,
            "data": data_digests(identity.data), "attempts": [*before.get("attempts", ()), attempt],
            "replay": None if self.run.recipe is None else replay_command(self.run.folder),
        }  # fmt: skip
        self._write()

    def saved(self, moment: Moment, path: Path) -> None:
        if not self.content:
            return
        try:
            _add(self._attempt, path)
        except CheckpointError:  # it was removed just now
            return
        self._write()

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if not self.content or refusal.again:
            return
        self._attempt["refused"].append({"step": refusal.step, "action": refusal.action, "why": refusal.why})
        if refusal.action == "rewind":
            go_back(self.content, moment.progress.step, refusal.step - 1, refusal.why)
        self._write()

    def end(self, moment: Moment) -> None:
        reason = moment.trainer.early_end
        self._close(moment, f"{DONE}: {reason}" if reason else DONE)

    def failed(self, moment: Moment, error: BaseException) -> None:
        if self.content:
            self._add_last()
        self._close(moment, f"{type(error).__name__}: {' '.join(message_of(error).split())}"[:300])

    def _add_last(self) -> None:
        """Adds the checkpoint that was written in the background when the training failed."""
        with suppress(CheckpointError, OSError):  # must not hide the training's error
            for path in checkpoints(self.run.folder / "checkpoints")[-1:]:
                if (path / MANIFEST).stat().st_mtime >= self._began:
                    add_saved(self.content, path, self.run.folder)

    def _close(self, moment: Moment, why: str) -> None:
        if not self.content:
            return
        differences = [str(each) for each in moment.trainer.differences]
        step = moment.progress.step
        self._attempt.update(ended=now(), why=why, to=step, differences=differences, **self._proof())
        self._write()

    def _proof(self) -> dict[str, str | None]:
        """The key of the kept verdict on this attempt, and a sentence on its proof; None each if it cannot have one."""
        if self.run.proof is None:
            return {"verdict": None, "proof": None}
        proof = self.run.proof()
        return {"verdict": proof.verdict_key, "proof": proof.sentence}

    @property
    def _attempt(self) -> Content:
        return self.content["attempts"][-1]

    def _continued(self) -> Content:
        """The certificate that this attempt continues: this folder's, or the resumed run's; {} for a new one.

        A restarted run continues a failed attempt's certificate: a new run gets a new folder.
        """
        resumed = self.run.resumed
        for folder in (self.run.folder, *([] if resumed is None else [resumed.folder.parent.parent])):
            try:
                content = read(folder)
            except (OSError, ValueError):
                continue
            if resumed is not None or not str(content["attempts"][-1]["why"]).startswith(DONE):
                return content
        return {}

    def _write(self) -> None:
        if not self.run.folder.is_dir():  # the training writes no file
            return
        try:
            replace(self.path, json_codec.encode({**self.content, "digest": seal(self.content)}, NAME))
        except OSError as error:
            if not self._warned:
                print(f"{self.path} was not written: {error.strerror}.", file=sys.stderr, flush=True)
            self._warned = True


def replay_command(folder: Path) -> str:
    """The command that trains any step of the run again, on one process."""
    return f"paddle-dp certificate {shlex.quote(str(folder))} --step STEP"


def read(folder: Path) -> Content:
    """Reads the certificate of the run in `folder`. Raises OSError without one, ValueError if it was changed."""
    content = json_codec.decode((Path(folder) / NAME).read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"is of another format than {FORMAT}")
    if content.pop("digest", None) != seal(content):
        raise ValueError("was changed after it was written: its digest is another one")
    return content


def model_digest(learner: Learner) -> str:
    """The digest of the weights and buffers of all ranks together, the same in any layout. Collective."""
    return placed_digest(learner.placed.shards(), learner.mesh)


def recipe_digest(recipe: Recipe | None, identity: RunSignature) -> str:
    """The digest of all settings that affect learning: the resolved recipe's, or a script's objects'."""
    facts = identity.facts if recipe is None else recipe_facts(recipe)
    return digest_of({key: value for key, value in facts.items() if not key.startswith(_UNUSED)})


def data_digests(data: Mapping[str, Any]) -> Content:
    """{split: number of samples, their fingerprint (data.fingerprint), digest of the samples that are always read}."""
    table = {}
    for split, facts in data.items():
        table[split] = {**facts, "digest": digest_of([facts["samples"], single_samples(facts["read"])])}
    return table


def versions(identity: RunSignature) -> dict[str, str]:
    """The versions of the packages that the numbers depend on."""
    facts = identity.facts
    names = ("paddle_dp", "paddle", "numpy")
    return {name: str(facts.get(f"package {name}")) for name in names} | {"python": platform.python_version()}


def saves(content: Content) -> dict[int, Content]:
    """The saved checkpoints by step, without those that a later attempt discarded by going back."""
    saved: dict[int, Content] = {}
    for attempt in content["attempts"]:
        saved = {step: checkpoint for step, checkpoint in saved.items() if step <= attempt["from"]}
        saved |= {checkpoint["step"]: checkpoint for checkpoint in attempt["saved"]}
    return saved


def add_saved(content: Content, path: Path, run: Path) -> None:
    """Adds a checkpoint of `run`, on disk or in the job's memory, that its last attempt wrote and could not record."""
    folders = [run / "checkpoints", Path(os.environ.get(MEMORY) or run, "checkpoints")]
    if not content or path.parent.resolve() not in [folder.resolve() for folder in folders]:
        return
    attempt = content["attempts"][-1]
    if step_of(path) > attempt["from"] and step_of(path) not in saves(content):
        _add(attempt, path)


def _add(attempt: Content, path: Path) -> None:
    step, digests = step_of(path), load(path, verify=False).digests()
    others = [saved for saved in attempt["saved"] if saved["step"] != step]
    attempt["saved"] = [*others, {"step": step, "checkpoint": path.name, **digests}]
    attempt["to"] = max(attempt["to"], step)


def go_back(content: Content, step: int, last: int, why: str) -> None:
    """Ends the last attempt, at update `last`, and begins one with the same ranks at the checkpoint of `step`."""
    before: Content = content["attempts"][-1]
    weights = saves(content).get(step, {}).get("model", before["weights"] if step == before["from"] else None)
    before.update(ended=now(), why=f"went back to step {step}: {why}", to=max(last, before["to"]))
    new: Content = {"from": step, "to": step, "weights": weights, "saved": [], "refused": [], "resumed": None}
    content["attempts"].append({**before, "begun": now(), "ended": None, "why": None, **new})


def attempts_of(content: Content, first: int, last: int) -> list[Content]:
    """The attempts that did the updates `first` to `last` of the run, in order: each those that no later repeated."""
    attempts: list[Content] = content["attempts"]
    ends = [min(last, a["to"], *(later["from"] for later in attempts[i:])) for i, a in enumerate(attempts, 1)]
    return [a for a, end in zip(attempts, ends, strict=True) if max(a["from"], first - 1) < end]


def digest_of(value: Any) -> str:
    """32 hexadecimal digits for plain JSON values."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=_BITS).hexdigest()


def seal(content: Content) -> str:
    """The digest of the certificate itself, which reveals accidents, not forgery."""
    return hashlib.blake2b(json_codec.encode(content, NAME), digest_size=_BITS).hexdigest()


def has_digests(checkpoint: Checkpoint, record: Content) -> bool:
    """Whether a checkpoint's bits have the digests that the certificate names."""
    return all(record.get(key) == digest for key, digest in checkpoint.computed_digests().items())
