"""A run's certificate: every attempt with its ranks and its end, and weights by digests that no layout changes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dp.certificate import certificate
from paddle_dp.certificate.certificate import (
    CertificateWriter,
    add_saved,
    attempts_of,
    go_back,
    has_digests,
    read,
    saves,
)
from paddle_dp.checkpoint import Snapshot, TensorShard, load, save
from paddle_dp.mesh import Mesh
from tests.house.recipes import small_recipe
from tests.jobs import train_in_forks

RECIPE = small_recipe(
    "length: 6 steps, batch: 8, micro_batches: 2",
    model="gpt, vocab: 32, width: 32, depth: 2, heads: 2, length: 16",
    dataset="random_tokens, vocab: 32, length: 16, samples: 64, test_samples: 8",
    callbacks="[{use: metrics, every: 1 step}, {use: checkpoint, every: 2 steps, keep: 9}]",
)
TENSOR = "strategy={use: hybrid, tensor: 2}"
LAYOUTS = {1: (), 2: (TENSOR,), 4: ("strategy={use: hybrid, tensor: 2, sharding: 2, sharding_stage: 2}",)}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def train(recipe, out, ranks: int, *words: str, resume: str | None = None) -> dict[str, Any]:
    train_in_forks(recipe, out, ranks, *words, resume=resume)
    return read(out)


def test_a_resume_on_other_ranks_goes_on_with_it(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe, out, 1, "train.length=2 steps")
    content = train(recipe, out, 2, TENSOR, resume="newest")
    first, second = content["attempts"]
    assert [first["ranks"], first["from"], first["to"], first["why"]] == [1, 0, 2, "done"]
    assert [second["ranks"], second["layout"]["tensor"], second["from"], second["to"]] == [2, 2, 2, 6]
    assert second["weights"] == first["saved"][0]["model"] != first["weights"]  # of one rank, and of two
    assert second["resumed"].endswith("step-00000002") and second["changes"]
    assert list(saves(content)) == [2, 4, 6] and attempts_of(content, 3, 3) == [second]
    assert has_digests(load(out / "checkpoints" / "step-00000006"), saves(content)[6])
    assert not has_digests(load(out / "checkpoints" / "step-00000006"), saves(content)[4])


@pytest.mark.long
def test_every_layout_begins_with_the_same_weights(recipe, tmp_path):
    found = {ranks: train(recipe, tmp_path / str(ranks), ranks, *words) for ranks, words in LAYOUTS.items()}
    assert len({content["attempts"][0]["weights"] for content in found.values()}) == 1
    for ranks, content in found.items():
        for step, saved in saves(content).items():
            assert has_digests(load(tmp_path / str(ranks) / "checkpoints" / f"step-{step:08d}"), saved)


def attempt(begin: int, end: int, *steps: int) -> dict[str, Any]:
    return {"from": begin, "to": end, "saved": [{"step": step, "by": begin} for step in steps]}


def test_what_was_gone_back_behind_does_not_count():
    content = {"attempts": [attempt(0, 9, 3, 6, 9), attempt(6, 7), attempt(6, 12, 9, 12)]}
    assert {step: one["by"] for step, one in saves(content).items()} == {3: 0, 6: 0, 9: 6, 12: 6}
    spans = {(1, 6): [0], (4, 9): [0, 2], (6, 6): [0], (7, 7): [2], (7, 12): [2], (13, 13): []}
    for span, indices in spans.items():
        assert attempts_of(content, *span) == [content["attempts"][index] for index in indices]


def test_going_back_begins_another_attempt():
    begun = {**attempt(0, 4, 4), "weights": "first", "resumed": None, "refused": [{"step": 7}]}
    begun["saved"][0]["model"] = "fourth"
    content = {"attempts": [begun]}
    go_back(content, 4, 6, "the loss is nan")
    first, second = content["attempts"]
    assert (first["to"], first["why"]) == (6, "went back to step 4: the loss is nan")
    assert (second["from"], second["weights"], second["refused"], second["why"]) == (4, "fourth", [], None)
    assert first["refused"] and first["saved"] and list(saves(content)) == [4]


def test_a_checkpoint_that_its_attempt_did_not_live_to_write_down_is_added(tmp_path, monkeypatch):
    """As one that was put into place in the background, and then the rank was killed."""
    snapshot = Snapshot(
        tensors={"model/w": TensorShard("model/w", (2,), (0,), np.zeros(2, "float32"))},
        state={"progress": {"step": 6}},
    )
    path = save(snapshot, tmp_path / "checkpoints", Mesh.alone())
    content = {"attempts": [attempt(0, 4)]}
    add_saved(content, path, tmp_path / "another")
    assert list(saves(content)) == []
    add_saved(content, path, tmp_path)
    assert has_digests(load(path), saves(content)[6]) and content["attempts"][0]["to"] == 6
    known = json.dumps(content)
    add_saved(content, path, tmp_path)
    assert json.dumps(content) == known
    monkeypatch.setenv("PADDLE_DP_MEMORY", str(tmp_path))  # the job's folder in memory, of another run folder
    in_memory = {"attempts": [attempt(0, 4)]}
    add_saved(in_memory, path, tmp_path / "another")
    assert list(saves(in_memory)) == [6]
    later = {"attempts": [attempt(8, 9)]}  # which has gone on from another one: this is not its own
    add_saved(later, path, tmp_path)
    assert list(saves(later)) == []


def test_a_changed_certificate_is_refused(tmp_path):
    content = {"format": certificate.FORMAT, "attempts": [attempt(0, 4)]}
    path = tmp_path / certificate.NAME
    path.write_text(json.dumps({**content, "digest": certificate.seal(content)}))
    assert read(tmp_path) == content
    path.write_text(path.read_text().replace('"to": 4', '"to": 5'))
    with pytest.raises(ValueError, match="changed after it was written"):
        read(tmp_path)


def test_an_attempt_that_failed_before_its_first_checkpoint_is_kept(tmp_path):
    run = SimpleNamespace(folder=tmp_path, resumed=None)
    content = {"format": certificate.FORMAT, "attempts": [{**attempt(0, 3), "why": None}]}
    path = tmp_path / certificate.NAME
    for why, kept in (
        (None, True),
        ("LostPeerError: rank 1", True),
        ("done", False),
        ("done: no better", False),
    ):
        content["attempts"][0]["why"] = why
        path.write_text(json.dumps({**content, "digest": certificate.seal(content)}))
        assert CertificateWriter(run)._continued() == (content if kept else {})  # type: ignore[arg-type]
