"""Packed windows on several ranks: every axis learns what one process learns, also after a resume on other ranks."""

import json

import numpy as np
import pytest

from tests.parity import SHORT, assert_same, train, truth
from tests.ranks import run_ranks

LAYOUTS = {
    "data": (2, "{use: data_parallel}"),
    "three data ranks": (3, "{use: data_parallel, recompute: selective}"),
    "sharding 3": (2, "{use: hybrid, sharding: 2, sharding_stage: 3}"),
    "tensor": (2, "{use: hybrid, tensor: 2}"),
    "sequence parallel": (2, "{use: hybrid, tensor: 2, sequence_parallel: true}"),
    "sequence": (2, "{use: hybrid, sequence: 2}"),
    "pipeline": (2, "{use: hybrid, pipeline: 2}"),
    "interleaved": (2, "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved, virtual_stages: 2}"),
    "recomputed": (2, "{use: hybrid, pipeline: 2, recompute: full}"),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Overrides for each data set that train on windows of 16, four batches an epoch: 40 documents, one of them much
    longer than a window; 24 conversations."""
    folder, random = tmp_path_factory.mktemp("packed"), np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(97, 123, n))) for n in [*random.integers(2, 24, 39), 100]]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    turns = [[("user", "a" * (1 + n % 5)), ("assistant", "b" * (1 + n % 7))] for n in range(24)]
    records = [{"messages": [{"role": r, "content": c} for r, c in each]} for each in turns]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    more = f"cache: {folder}/cache, held_out: 0.25"
    packed = f"dataset={{use: packed_texts, path: {folder}/texts.jsonl, length: 16, {more}}}"
    chat = f"dataset={{use: chat, path: {folder}/chat.jsonl, length: 128, {more}}}"
    counted = "loss={use: cross_entropy, ignore_index: -100}"
    return {
        "packed_texts": (packed, "model.vocab=128"),
        "chat": (chat, counted, "model.vocab=128", "model.length=128", "train.batch=4"),
    }


# The resume below trains the data axis in every run.
FAST = [("sequence parallel", "gpt"), ("sequence", "llama"), ("interleaved", "llama")]
ALL = [
    pytest.param(name, model, marks=() if (name, model) in FAST else pytest.mark.long)
    for name in LAYOUTS
    for model in ("gpt", "llama")
]


@pytest.mark.parametrize(("name", "model"), ALL)
def test_every_layout_learns_what_one_process_learns(tmp_path, settings, name, model):
    (ranks, strategy), more = LAYOUTS[name], settings["packed_texts"]
    many = run_ranks(train, ranks, str(tmp_path), strategy, SHORT, model=model, more=more)
    assert_same(many, truth(SHORT, model, more=more))


@pytest.mark.parametrize(
    "name", ["pipeline", *(pytest.param(n, marks=pytest.mark.long) for n in ("data", "tensor", "sequence"))]
)
def test_every_layout_learns_answers_as_one_process_does(tmp_path, settings, name):
    (ranks, strategy), more = LAYOUTS[name], settings["chat"]
    many = run_ranks(train, ranks, str(tmp_path), strategy, SHORT, model="llama", more=more)
    assert_same(many, truth(SHORT, "llama", more=more))


@pytest.mark.parametrize("data", ["packed_texts", pytest.param("chat", marks=pytest.mark.long)])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_on_other_ranks(tmp_path, settings, data):
    """Six steps, in the second epoch, on two ranks, and the other four on three."""
    more = settings[data]
    first = run_ranks(train, 2, str(tmp_path), "{use: data_parallel}", "6 steps", more=more)
    rest = run_ranks(train, 3, str(tmp_path), "{use: data_parallel}", resume=True, more=more)
    whole = [{**found, "rows": first[0]["rows"] + found["rows"]} for found in rest]
    assert_same(whole, truth(more=more))
