from __future__ import annotations

import random

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.checkpoint import json_codec, load_rng_state, rng_state


@pytest.fixture(autouse=True)
def as_before():
    state = rng_state()
    yield
    load_rng_state(state)


def _draw() -> list:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # both keep a spare number
    dropped = paddle.nn.functional.dropout(paddle.ones([100])).numpy().tolist()
    return [*gauss, random.random(), np.random.rand(3).tolist(), paddle.rand([3]).numpy().tolist(), dropped]


def test_every_generator_goes_on_from_where_it_was():
    paddle.seed(5)
    _draw()
    state = json_codec.decode(json_codec.encode(rng_state()))
    first = _draw()
    assert _draw() != first
    load_rng_state(state)
    assert _draw() == first


def test_looking_changes_nothing():
    state = rng_state()
    assert rng_state() == state


@pytest.mark.parametrize("kinds", [["cpu", "gpu"], ["gpu"]])
def test_a_state_of_another_device_is_passed_over(kinds):
    paddle.seed(5)
    state, words = rng_state(), rng_state()["paddle"]["cpu"]
    state["paddle"] = {kind: words * (1 if kind == "cpu" else 8) for kind in kinds}
    paddle.seed(6)
    before = rng_state()["paddle"]["cpu"]
    load_rng_state(state)
    assert rng_state()["paddle"]["cpu"] == (words if "cpu" in kinds else before)


def test_several_generators_of_one_device(monkeypatch):
    """A machine with two GPUs has two generators; here they are two of the CPU's kind."""
    there = {"cpu": paddle.get_rng_state("cpu"), "gpu": paddle.get_rng_state("cpu") * 2}
    put_back = {}
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:1")
    monkeypatch.setattr(paddle, "get_rng_state", lambda kind: there[kind])
    monkeypatch.setattr(paddle, "set_rng_state", lambda states, kind: put_back.update({kind: states}))
    state = rng_state()
    assert [len(words) for words in state["paddle"].values()] == [1, 2]
    state["paddle"]["gpu"][1]["seed"] = 99
    load_rng_state(state)
    assert put_back["gpu"][1].current_seed() == 99
    state["paddle"]["gpu"].pop()
    put_back.clear()
    load_rng_state(state)
    assert put_back.keys() == {"cpu"}


def test_what_is_drawn_for_cut_activations_goes_on_too():
    tracker = get_rng_state_tracker()

    def draw() -> list:
        with tracker.rng_state("cut"):
            return paddle.rand([3]).tolist()

    tracker.add("cut", 5)
    try:
        state, common = json_codec.decode(json_codec.encode(rng_state())), paddle.rand([3]).tolist()
        first = draw()
        assert draw() != first
        load_rng_state(state)
        assert (draw(), paddle.rand([3]).tolist()) == (first, common)
    finally:
        tracker.reset()
    load_rng_state(state)
    assert not tracker.get_states_tracker()  # nothing is cut any more
