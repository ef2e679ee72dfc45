"""Saves the states of all random generators of this process as JSON, and restores them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def rng_state() -> dict[str, Any]:
    """The states of Paddle's, NumPy's and Python's generators, as plain values.

    Paddle has generators for the CPU, for the current device, and in fleet's tracker for tensor parallelism.
    """
    return {**_paddle_state(), "numpy": _numpy_state(), "python": _python_state()}


def load_rng_state(state: dict[str, Any]) -> None:
    """Restores the generators. Generators of devices that were not there, or not as many, stay as they are."""
    _load_paddle_state(state)
    values = state["numpy"]
    keys = np.frombuffer(bytes.fromhex(values["keys"]), "<u4")
    np.random.set_state(("MT19937", keys, values["position"], values["has_gauss"], values["gauss"]))
    version, keys_hex, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(bytes.fromhex(keys_hex), "<u4").tolist()), gauss))


@contextmanager
def restoring_rng_state() -> Iterator[None]:
    """Restores all of these generators on exit, so that numbers drawn within change no later one."""
    state, numpy_state, python_state = _paddle_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        _load_paddle_state(state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _paddle_state() -> dict[str, Any]:
    import paddle

    return {
        "paddle": {kind: [_generator_fields(rng) for rng in paddle.get_rng_state(kind)] for kind in _kinds()},
        "tracked": {name: [_generator_fields(rng) for rng in states] for name, states in _tracked().items()},
    }


def _load_paddle_state(state: dict[str, Any]) -> None:
    import paddle

    for kind in _kinds():
        saved, here = state["paddle"].get(kind, []), paddle.get_rng_state(kind)
        if len(saved) == len(here):
            paddle.set_rng_state([_generator(values, here[0]) for values in saved], kind)
    _load_tracked(state["tracked"])


def _tracker() -> Any:
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    return get_rng_state_tracker()


def _tracked() -> dict[str, list[Any]]:
    """The states of fleet's tracker by name; empty without tensor parallelism."""
    states: dict[str, list[Any]] = _tracker().get_states_tracker()
    return states


def _load_tracked(saved: dict[str, list[Any]]) -> None:
    here = _tracked()
    if all(len(saved.get(name, [])) == len(here.get(name, [])) for name in saved.keys() | here.keys()):
        states = {n: [_generator(fields, here[n][0]) for fields in values] for n, values in saved.items()}
        _tracker().set_states_tracker(states)


def _kinds() -> list[str]:
    """The device types with saved generators: the CPU and the current device's type."""
    import paddle

    return sorted({"cpu", paddle.get_device().partition(":")[0]})


def _generator_fields(state: Any) -> dict[str, Any]:
    # Only the pickle protocol exposes it: (device, seed, offset, the characters of the C++ engine's text).
    device, seed, offset, engine = state.__getstate__()
    return {"device": device, "seed": seed, "offset": offset, "engine": bytes(engine).decode()}


def _generator(values: dict[str, Any], like: Any) -> Any:
    # __setstate__ does nothing on an object that was initialised before (3.3.1).
    kind: Any = type(like)
    state = kind.__new__(kind)
    state.__setstate__((values["device"], values["seed"], values["offset"], list(values["engine"].encode())))
    return state


def _numpy_state() -> dict[str, Any]:
    _, keys, position, has_gauss, gauss = np.random.get_state()
    hexed = np.asarray(keys, "<u4").tobytes().hex()
    return {"keys": hexed, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}


def _python_state() -> list[Any]:
    version, values, gauss = random.getstate()
    return [version, np.asarray(values, "<u4").tobytes().hex(), gauss]
