"""What tells two objects apart, and what does not."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
import uuid
import weakref
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.identity.parameters_within import parameters_within
from paddle_dp.identity.walk import Walker, objects_within

settings_of = Walker().settings_of


def test_a_functions_closure_defaults_and_arguments_are_settings() -> None:
    smoothing, where = 0.3, "cpu"

    def closure(outputs: Any, targets: Any, scale: float = 2.0, *, ignored: int = -1) -> Any:
        return smoothing, where

    assert settings_of(closure) == {"smoothing": 0.3, "where": "cpu", "scale": 2.0, "ignored": -1}
    assert settings_of(partial(closure, ignored=2))["ignored"] == 2
    assert settings_of(partial(closure, 3.0))["argument 0"] == 3.0


class Own:
    d = 8

    def __init__(self, **given: Any):
        vars(self).update(given)

    def loss(self, outputs: Any, targets: Any) -> Any:
        return outputs


def test_a_methods_object_has_the_settings() -> None:
    assert settings_of(Own(scale=3.0).loss) == {"d": 8, "scale": 3.0}


def test_a_classs_own_default_said_aloud_is_nothing_new() -> None:
    assert settings_of(Own(d=8)) == settings_of(Own()) != settings_of(Own(d=16))


def test_lists_and_arrays_are_settings() -> None:
    found = settings_of(Own(scales=(1.0, [2]), by={"a": 1}, table=np.arange(3), mixed=[object()]))
    assert found["scales"] == [1.0, [2]] and found["by.a"] == 1 and "mixed" not in found
    assert found["table"].startswith("int64[3], CRC-32 ")
    assert found["table"] != settings_of(Own(table=np.arange(3)[::-1]))["table"]
    assert settings_of(Own(lowest=float("-inf")))["lowest"] == "-inf"  # JSON has none


def test_what_only_sounds_like_a_place_is_a_setting() -> None:
    same = {"rank_weight": 1.0, "direction": "up", "profile": 2, "place_cells": 3, "filename": "no path"}
    assert {name: settings_of(Own(**same))[name] for name in same} == same
    free = {
        "local_rank": 3, "data_path": "/a/b", "device": "gpu:1", "name": "linear_3.w_0", "training": True,
        "gpu_id": 1,
    }  # fmt: skip
    assert settings_of(Own(**free)) == {"d": 8}


def test_norms_have_the_same_settings_after_a_forward() -> None:
    """Paddle's BatchNorm1D replaces its data format in each forward: a second training in a process was refused, as
    one that resumed the first, or after servers, of which server 0 runs no forward."""
    shapes = {nn.BatchNorm1D: ([2, 3, 4], "NCL", "NLC"), nn.BatchNorm3D: ([2, 3, 4, 5, 3], "NCDHW", "NDHWC")}
    for kind, (shape, *formats) in shapes.items():
        for data_format in formats:
            norm = kind(shape[1 if data_format in ("NCL", "NCDHW") else -1], data_format=data_format)
            before = Walker().settings_of(norm)
            norm(paddle.ones(shape))
            assert norm._data_format != data_format
            assert Walker().settings_of(norm) == before and before["_data_format"] == data_format


def test_a_layers_private_settings_count() -> None:
    assert settings_of(nn.ELU(0.5)) == {"_alpha": 0.5}
    assert settings_of(nn.CrossEntropyLoss(label_smoothing=0.2))["label_smoothing"] == 0.2


@dataclass
class Given:
    """A configuration, of which a loss reads one."""

    alpha: float = 1.0
    resume: bool = False


@dataclass(slots=True)
class Term:
    weight: float

    def __call__(self, x: Any) -> Any:
        return x * self.weight


class Kind(Enum):
    ONE, OTHER = 1, 2


class Configured:
    """A loss that reads what it was given whole."""

    def __init__(self, given: Any, terms: Any = (), **own: Any):
        self.given, self.terms = given, terms
        vars(self).update(own)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return outputs * self.given.alpha


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        (Configured(Given()), Configured(Given(alpha=2.0)), "given.alpha"),
        (Configured(SimpleNamespace(alpha=1)), Configured(SimpleNamespace(alpha=2)), "given.alpha"),
        (Configured(Given(), [Term(1.0)]), Configured(Given(), [Term(2.0)]), "terms.0.weight"),
        (Configured(Given(), {"a": 1, "f": len}), Configured(Given(), {"a": 2, "f": len}), "terms.a"),
        (Configured(None, _alpha=1), Configured(None, _alpha=2), "_alpha"),
        (Configured(None, kind=Kind.ONE), Configured(None, kind=Kind.OTHER), "kind"),
        (Configured(None, norm_place="before"), Configured(None, norm_place="behind"), "norm_place"),
        (Term(1.0), Term(2.0), "weight"),
    ],
)
def test_what_stands_in_objects_of_ones_own_counts(one: Any, other: Any, key: str) -> None:
    before, after = settings_of(one), settings_of(other)
    assert {name for name in before if before[name] != after.get(name)} == {
        key
    } and before.keys() == after.keys()


def test_a_whole_configuration_counts_but_for_the_switches_of_one_run() -> None:
    """Which of it a function reads, only its code would say, and that is not read."""
    args, every = Namespace(alpha=1.0, width=3, resume=False), {"beta": 2, "is_main": True}

    def loss(outputs: Any, targets: Any) -> Any:
        return outputs * args.alpha * every["beta"]

    named = {"args": "argparse.Namespace", "args.alpha": 1.0, "args.width": 3}
    assert settings_of(loss) == {**named, "every.beta": 2}
    assert "given.resume" not in settings_of(Configured(Given(resume=True)))


def test_weights_are_no_settings_wherever_they_are_held() -> None:
    """Each rank may draw others before rank 0's are sent."""
    layer = nn.Linear(2, 2)
    held = {"all": layer.parameters(), "by": {"w": layer.weight, "n": 1}, "made": layer.weight * 2}
    assert settings_of(Own(**held)) == {"d": 8, "by.n": 1}
    layer.weight.stop_gradient = True  # frozen, but a checkpoint has it
    assert settings_of(Own(all=held["all"], by=held["by"])) == {"d": 8, "by.n": 1}
    assert all("CRC" not in str(value) for value in settings_of(nn.LSTM(2, 3)).values())


class Key:
    pass


def of_this_process(names: list[str]) -> Any:
    """What a model may hold that another process, or another rank, has otherwise although nothing has changed."""
    layer, other = nn.Linear(2, 2), nn.Linear(3, 3)
    return Own(
        no_decay={id(p) for p in layer.parameters()},
        rates={id(layer.weight): 0.5, id(other.weight): 0.25},
        by_object={Key(): 1.0, Key(): 2.0},
        by_tensor={layer.weight: 1.0},
        activation=str(lambda x: x),
        few=dict.fromkeys(names[:3], 1.0),
        many=dict.fromkeys(names, 1.0),
        created=time.time(),
        uid=uuid.uuid4().hex,
        dashed=str(uuid.uuid4()),
        scratch=tempfile.mktemp(),
        kept=(layer, other),
    )


def test_addresses_clocks_random_names_and_the_order_of_a_dict_are_no_settings() -> None:
    """A resume of the same script, and a rank beside another one, would be refused for nothing."""
    names = [f"name {number}" for number in range(300)]
    found, again = settings_of(of_this_process(names)), settings_of(of_this_process(names[::-1]))
    few, others = ({key for key in facts if key.startswith("few.")} for facts in (found, again))
    assert len(few) == len(others) == 3 and few != others  # other names
    assert {k: v for k, v in found.items() if k not in few} == {
        k: v for k, v in again.items() if k not in others
    }
    assert found["many"].startswith("CRC-32 ")
    assert len(found["no_decay"]) == 2 and [v for k, v in found.items() if k.startswith("rates.")] == [
        0.5,
        0.25,
    ]
    assert [v for k, v in found.items() if k.startswith("by_object.")] == [1.0, 2.0]
    assert not {"created", "uid", "dashed", "scratch"} & found.keys()


def test_generators_and_iterators_count_where_state_is_asked_for() -> None:
    """Two new objects may well have two states, so they are no settings; a change says that something was drawn."""

    def numbers() -> Any:
        yield from range(9)

    lazy, queue = numbers(), deque([1.0], maxlen=2)
    own = Own(
        draws=random.Random(3), noise=np.random.default_rng(), count=itertools.count(), lazy=lazy, queue=queue
    )
    assert settings_of(own) == {"d": 8, "queue": [1.0]}
    state = Walker(state=True).settings_of
    before = state(own)
    assert state(own) == before
    own.draws.random(), own.noise.random(), next(own.count), next(lazy), queue.append(2.0)  # type: ignore[attr-defined]
    changed = {key.partition(".")[0] for key, fact in state(own).items() if fact != before.get(key)}
    assert changed == {"draws", "noise", "count", "lazy", "queue"}


@pytest.mark.parametrize(
    ("one", "other"), [(2**45, 2**45 + 8), (2**40, 2**40 + 8), (1.7e9, 1.8e9), ("0" * 32, "1" * 32)]
)
def test_large_numbers_and_checksums_are_settings(one: Any, other: Any) -> None:
    assert settings_of(Own(tokens=one)) != settings_of(Own(tokens=other))


def test_objects_within_have_attributes_and_are_in_attributes_and_short_lists_each_once() -> None:
    inner, far = Own(size=1), Own()
    own = Own(one=inner, many=[inner, Own()], named={"far": far}, rows=np.zeros(3), load=inner.loss, code=np)
    vars(inner)["back"], vars(far)["long"] = own, [Own() for _ in range(17)]
    objects = objects_within(own)
    assert len(objects) == 4 and objects[0] is own and inner in objects and far in objects
    assert objects_within([(0, 0)]) == objects_within(None) == []


def test_parameters_are_found_beside_values_that_raise() -> None:
    class Closed(list):
        def __iter__(self) -> Any:
            raise RuntimeError("closed")

    layer, dead = nn.Linear(2, 2), weakref.proxy(nn.Linear(2, 2))
    own = Own(rows=Closed([1]), owner=dead, layers=[layer])
    assert [p.name for p in parameters_within([own])] == [layer.weight.name, layer.bias.name]
    assert parameters_within([dead, Closed([1]), [layer] * 101]) == []
