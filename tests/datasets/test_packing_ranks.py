"""Packed windows on several ranks: every axis learns what one process learns, also after a resume on other ranks."""

import json

import numpy as np
import pytest

from tests.parity import SHORT, assert_same, train, train_cases, truth
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
    """Overrides for each data set that train two blocks, two batches an epoch: 20 documents in windows of 16, one of
    them much longer than a window; 12 conversations."""
    folder, random = tmp_path_factory.mktemp("packed"), np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(97, 123, n))) for n in [*random.integers(2, 24, 19), 60]]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    turns = [[("user", "a" * (1 + n % 5)), ("assistant", "b" * (1 + n % 7))] for n in range(12)]
    records = [{"messages": [{"role": r, "content": c} for r, c in each]} for each in turns]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    more = f"cache: {folder}/cache, held_out: 0.25"
    packed = f"dataset={{use: packed_texts, path: {folder}/texts.jsonl, length: 16, {more}}}"
    chat = f"dataset={{use: chat, path: {folder}/chat.jsonl, length: 128, {more}}}"
    counted = "loss={use: cross_entropy, ignore_index: -100}"
    return {
        "packed_texts": (packed, "model.vocab=128", "model.depth=2"),
        "chat": (chat, counted, "model.vocab=128", "model.depth=2", "model.length=128", "train.batch=4"),
    }


# What packing adds crosses the most in shards of a sequence and between stages; the resume trains the data axis.
QUICK = {
    "sequence parallel": ("gpt", "packed_texts"),
    "sequence": ("llama", "packed_texts"),
    "interleaved": ("llama", "packed_texts"),
    "pipeline": ("llama", "chat"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory, settings):
    """By model and data set, what one process learns; and its checkpoint in the middle of the second epoch."""
    asked = {f"{model} {data}": (model, data, "4 steps") for model, data in dict.fromkeys(QUICK.values())}
    asked["begun"] = ("gpt", "packed_texts", "3 steps")
    cases = {
        name: {"strategy": "{use: single}", "until": until, "model": model, "more": settings[data]}
        for name, (model, data, until) in asked.items()
    }
    return run_ranks(train_cases, 1, str(tmp_path_factory.mktemp("one")), cases)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory, settings, one):
    """By layout, what each of two ranks learns; resumed, from that checkpoint."""
    cases = {
        name: {"strategy": LAYOUTS[name][1], "until": "4 steps", "model": model, "more": settings[data]}
        for name, (model, data) in QUICK.items()
    }
    cases["resumed"] = {
        "strategy": LAYOUTS["data"][1],
        "until": "4 steps",
        "more": settings["packed_texts"],
        "resume": one["begun"]["saved"],
    }
    return run_ranks(train_cases, 2, str(tmp_path_factory.mktemp("two")), cases, timeout=300)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_learn_what_one_process_learns(one, two, name):
    assert_same([rank[name] for rank in two], one[" ".join(QUICK[name])])


def test_a_resume_in_the_middle_of_an_epoch_goes_on_on_two_ranks(one, two):
    begun, whole = one["begun"]["rows"], one["gpt packed_texts"]
    resumed = [rank["resumed"] for rank in two]
    assert_same([{**found, "rows": begun + found["rows"]} for found in resumed], whole)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "model", "data"),
    [
        *((name, model, "packed_texts") for name in LAYOUTS for model in ("gpt", "llama")),
        *((name, "llama", "chat") for name in ("data", "tensor", "sequence")),
    ],
)
def test_every_layout_learns_what_one_process_learns(tmp_path, settings, name, model, data):
    (ranks, strategy), more = LAYOUTS[name], settings[data]
    many = run_ranks(train, ranks, str(tmp_path), strategy, SHORT, model=model, more=more)
    assert_same(many, truth(SHORT, model, more=more))


@pytest.mark.long
@pytest.mark.parametrize("data", ["packed_texts", "chat"])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_on_three_ranks(tmp_path, settings, data):
    """Five steps, in the third epoch, on two ranks, and the other five on three."""
    more = settings[data]
    first = run_ranks(train, 2, str(tmp_path), "{use: data_parallel}", SHORT, more=more)
    rest = run_ranks(train, 3, str(tmp_path), "{use: data_parallel}", resume=True, more=more)
    whole = [{**found, "rows": first[0]["rows"] + found["rows"]} for found in rest]
    assert_same(whole, truth(more=more))
