"""The walker: an object's attributes as JSON values by path, which are equal where two objects have the same settings.

Numbers, texts and lists count as they are, arrays and tensors by a checksum; dicts, functions, schedules and objects of
users' classes are walked to a depth. Learned tensors are left out, and values that may differ between ranks and runs of
one training: paths, devices, times, random ids, this rank's number. No code is read: a function counts by its closure
and its defaults, its text by the checksum of its file (facts).
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase as Parameter
from paddle.optimizer.lr import LRScheduler

from paddle_dp.tensors import dtype_of, nbytes

DEPTH = 3  # levels of objects within objects that are walked
_SHORT = 16  # entries of a list that is short
MAX_ENTRIES = 100  # of a list or a dict that is walked entry by entry; a longer one is one checksum
_MAX_LIST_CHARS = 1000  # characters of a list that are kept as they are
_MAX_ARRAY_BYTES = 2**28  # bytes of an array that is read for its checksum
_NO_VALUE = object()

_PATHS = {"path", "folder", "dir", "directory", "file", "filename", "name", "root", "cache"}
_DEVICES = re.compile(
    r"(place\()?(undefined|cpu|[a-z]*gpu(_pinned)?|cuda|xpu|npu|mlu|dcu|custom\w*)(:\d+)?\)?"
)
# Words in names of settings that differ between the processes of one training: `local_rank`, `gpu_id`, `is_main`.
_NUMBERS, _DEVICE_NUMBERS = {"rank", "pid", "port"}, {"device", "gpu", "cuda"}
_SWITCHES = {"main", "master", "resume", "verbose", "debug"}
_ADDRESS_TEXT = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object
_RANDOM_ID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}")  # uuid4
_GENERATED = re.compile(r"\w+_\d+(\.\w+)*")  # Paddle's names of layers and parameters, which count up
_EPOCH = 1.6e9  # seconds since 1970, in 2020: no setting is as large and has a fraction
_ADDRESSES = range(0x5500_0000_0000, 2**48, 16)  # a Linux process has its objects there: their `id()`
_ADDRESS = "an object of this process"
# Of norms that replace their `_data_format` in a forward (3.3.1): the constructor's, with channels first and last.
_DATA_FORMATS = {
    nn.BatchNorm1D: ("NCL", "NLC"),
    nn.BatchNorm3D: ("NCDHW", "NDHWC"),
    nn.SyncBatchNorm: ("NCHW", "NHWC"),
}


def is_library(module: str | None) -> bool:
    """True for a module of Paddle, NumPy, this package or Python itself, which its version identifies."""
    top = (module or "").partition(".")[0]
    return top in ("paddle", "paddle_dp", "numpy") or (top in sys.stdlib_module_names and top != "__main__")


def checksum(content: bytes | str) -> str:
    """ "CRC-32 0a1b2c3d": the digest of files, texts and arrays."""
    return f"CRC-32 {zlib.crc32(content.encode() if isinstance(content, str) else content):08x}"


def kind_of(thing: Any) -> str:
    """ "paddle.nn.layer.common.Linear"; a function's own name."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def prefixed(prefix: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of something by "prefix.path"; "" is itself."""
    return {f"{prefix}.{path}" if path else prefix: fact for path, fact in facts.items()}


@dataclass(frozen=True)
class Walker:
    """Walks objects. `state`: also reads random generators and iterators, which change with use. `saved`: where it is
    not None, tensors with a gradient count, too, except those with these ids. `only_plain`: reads numbers and texts
    alone, without tensors and containers, which take time."""

    state: bool = False
    saved: Collection[int] | None = None
    only_plain: bool = False

    def settings_of(self, thing: Any, depth: int = DEPTH) -> dict[str, Any]:
        """The settings of an object by path."""
        return self.walk(attributes_of(thing), depth)

    def walk(self, values: Mapping[str, Any], depth: int = DEPTH) -> dict[str, Any]:
        """The JSON values of `values`, and of their contents, by path."""
        facts: dict[str, Any] = {}
        for name, value in values.items():
            if value is None or isinstance(value, Parameter) or _may_differ(name, value):
                continue
            if self.only_plain and not isinstance(value, (int, float, str)):
                continue
            if (plain := self._plain(value)) is not _NO_VALUE:
                facts[name] = plain
            elif depth:
                inner = self._within(value, depth - 1)
                if len(inner) > MAX_ENTRIES and isinstance(value, (list, tuple, deque, Mapping)):
                    inner = {"": _in_short(inner)}
                facts |= prefixed(name, inner)
        return facts

    def _within(self, value: Any, depth: int) -> dict[str, Any]:
        """The facts of an object ("": its kind), or of the entries of a list or a dict."""
        if isinstance(value, (list, tuple, deque, Mapping)):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            return self.walk(self.by_label(pairs), depth)
        if self.state and isinstance(value, GeneratorType):
            frame = value.gi_frame
            return {} if frame is None else self.walk({"line": frame.f_lasti, **frame.f_locals}, depth)
        if self.state and (state := _state_of(value)) is not None:
            return {"": f"state {zlib.crc32(_ADDRESS_TEXT.sub('', repr(state)).encode()):08x}"}
        if not _is_walked(value):
            return {}
        tensors = tensors_of(value) if isinstance(value, nn.Layer) else {}
        return {"": kind_of(value), **self.settings_of(value, depth), **tensors}

    def by_label(self, pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        """The entries of a dict by labels that are equal in each process: keys may be objects, or their addresses."""
        entries: dict[str, Any] = {}
        for key, entry in pairs:
            label = self._label(key)
            entries[label if label not in entries else f"{label} ({len(entries)})"] = entry
        return entries

    def _label(self, item: Any) -> str:
        plain = _NO_VALUE if isinstance(item, paddle.Tensor) else self._plain(item)
        return kind_of(item) if plain is _NO_VALUE else str(plain)

    def _plain(self, value: Any) -> Any:
        """A JSON value that is the same for the same numbers and words; _NO_VALUE if there is none."""
        if isinstance(value, Enum):
            return str(value)
        if isinstance(value, str):
            return _ADDRESS_TEXT.sub("", value)
        if value is None or isinstance(value, (bool, int)):
            return _ADDRESS if type(value) is int and value in _ADDRESSES else value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)  # a checkpoint's JSON has no others
        if isinstance(value, np.generic):
            return self._plain(value.item())
        if isinstance(value, paddle.Tensor):
            learned = id(value) in self.saved if self.saved is not None else not value.stop_gradient
            return _NO_VALUE if learned or isinstance(value, Parameter) else _array(value)
        if isinstance(value, np.ndarray):
            return _array(value)
        if isinstance(value, (set, frozenset)):
            return _in_short(sorted(map(self._label, value)))
        if isinstance(value, (list, tuple, deque)):
            items = [self._plain(item) for item in value]
            return _NO_VALUE if any(item is _NO_VALUE for item in items) else _in_short(items)
        return _NO_VALUE


def attributes_of(thing: Any) -> dict[str, Any]:
    """The named values that make an object: its attributes, also in slots, and its class's defaults; the attributes,
    the closure and the defaults of a function; the arguments of a partial; for a method its object's, too.

    Private attributes count for classes of users, and for layers (ELU keeps `_alpha`), without the ones of all layers.
    """
    if isinstance(thing, type):
        return {}
    if isinstance(thing, partial):
        arguments = {f"argument {number}": value for number, value in enumerate(thing.args)}
        return {**attributes_of(thing.func), **arguments, **thing.keywords}
    if inspect.ismethod(thing):
        return {**attributes_of(thing.__self__), **attributes_of(thing.__func__)}
    if inspect.isfunction(thing):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}
        parameters = inspect.signature(thing, follow_wrapped=False).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        return {n: v for n, v in vars(thing).items() if n[:2] != "__"} | closure | defaults
    bases = type(thing).__mro__
    users = [vars(base) for base in reversed(bases) if not is_library(base.__module__)]
    defaults = {n: v for names in users for n, v in names.items() if isinstance(v, _DEFAULTS)}
    slots = [name for base in bases for name in _listed(vars(base).get("__slots__", ()))]
    attributes = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    attributes = {**defaults, **attributes, **getattr(thing, "__dict__", {})}
    for kind, formats in _DATA_FORMATS.items():
        if isinstance(thing, kind):
            attributes["_data_format"] = formats[attributes["_data_format"] in ("NHWC", "NLC", "NDHWC")]
    if isinstance(thing, nn.Layer):
        return {n: v for n, v in attributes.items() if n not in layer_attributes() and n[:2] != "__"}
    hidden = "_" if is_library(type(thing).__module__) else "__"
    return {n: value for n, value in attributes.items() if isinstance(n, str) and not n.startswith(hidden)}


def objects_within(thing: Any) -> list[Any]:
    """An object and those within it that have attributes, such as the transforms of a data set: in attributes and short
    lists, to a depth. No functions and modules."""
    objects: dict[int, Any] = {}
    values = [thing]
    for _ in range(DEPTH + 1):
        level = {id(value): value for value in values if id(value) not in objects and _has_attributes(value)}
        objects |= level
        attributes = [value for each in level.values() for value in readable_attributes(each).values()]
        values = [inner for value in attributes for inner in (short_list(value) or [value])]
    return [*objects.values()]


def readable_attributes(thing: Any) -> dict[str, Any]:
    """`attributes_of`; {} for an object that raises where its attributes are read, such as a closed one or a dead
    proxy."""
    try:
        return attributes_of(thing)
    except Exception:  # noqa: BLE001 - a user's class may raise anything there
        return {}


def registered_parameters(layer: nn.Layer) -> list[paddle.Tensor]:
    """The parameters of a layer and its sublayers, also where a class has another `parameters`, as a method that
    returns a head's alone, or as an attribute."""
    layers = {id(layer): layer}
    waiting = [layer]
    while waiting:  # without their own methods, which a class may override
        new = [each for _, each in nn.Layer.named_children(waiting.pop()) if id(each) not in layers]
        layers |= {id(each): each for each in new}
        waiting += new
    parameters = [p for each in layers.values() for p in each._parameters.values() if p is not None]
    return [*{id(parameter): parameter for parameter in parameters}.values()]


def short_list(value: Any) -> list[Any]:
    """The entries of a short list or tuple, or of a short dict; [] of anything else."""
    if type(value) not in (list, tuple, dict) or len(value) > _SHORT:  # by type: a proxy may be dead
        return []
    return [*(value.values() if isinstance(value, dict) else value)]


def _has_attributes(value: Any) -> bool:
    try:
        is_code = isinstance(value, (FunctionType, MethodType, ModuleType))
        return not is_code and isinstance(getattr(value, "__dict__", None), dict)
    except Exception:  # noqa: BLE001 - a dead proxy
        return False


_DEFAULTS = (
    bool, int, float, str, Enum, list, tuple, set, frozenset, dict, np.generic, np.ndarray, paddle.Tensor,
)  # fmt: skip


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [*names]


@cache
def layer_attributes() -> frozenset[str]:
    """The names of the attributes of every nn.Layer: its tables, hooks and mode."""
    return frozenset(vars(nn.Layer()))


def tensors_of(layer: nn.Layer) -> dict[str, Any]:
    """The buffers and frozen parameters of a layer, by shape, dtype and checksum."""
    tensors = {**layer._parameters, **layer._buffers}
    digests = {n: _array(t) for n, t in tensors.items() if t is not None and t.stop_gradient}
    return {name: digest for name, digest in digests.items() if digest is not _NO_VALUE}


def hooks_around(layer: nn.Layer) -> dict[str, Any]:
    """The hooks around a layer's forward, without this package's, by "hook before 0"."""
    hooks: dict[str, Any] = {}
    for position, table in (("before", layer._forward_pre_hooks), ("behind", layer._forward_post_hooks)):
        kinds = [(hook, kind_of(hook.func if isinstance(hook, partial) else hook)) for hook in table.values()]
        users = [hook for hook, kind in kinds if not kind.startswith("paddle_dp.")]
        hooks |= {f"hook {position} {number}": hook for number, hook in enumerate(users)}
    return hooks


def hooks_of(layer: nn.Layer) -> dict[str, Any]:
    """The kinds and settings of the hooks around a layer's forward, such as spectral norm."""
    facts: dict[str, Any] = {}
    for label, hook in hooks_around(layer).items():
        facts |= prefixed(label, {"": kind_of(hook), **Walker().settings_of(hook)})
    return facts


def _array(value: Any) -> Any:
    """ "float32[2], CRC-32 0a1b2c3d"; _NO_VALUE without memory."""
    is_tensor = isinstance(value, paddle.Tensor)
    if not value._is_initialized() if is_tensor else value.dtype.hasobject:
        return _NO_VALUE
    kind = f"{dtype_of(value) if is_tensor else value.dtype}{list(value.shape)}"
    if (nbytes(value) if is_tensor else value.nbytes) > _MAX_ARRAY_BYTES:
        return kind
    content = np.ascontiguousarray(value.numpy() if is_tensor else value)
    return f"{kind}, {checksum(content.tobytes())}"


def _in_short(values: Any) -> Any:
    """The list, or the checksum of a long one, or of a dict."""
    text = json.dumps(values, default=str, sort_keys=True)
    if isinstance(values, list) and len(text) <= _MAX_LIST_CHARS:
        return values
    return f"{checksum(text)} of {len(values)} values"


def _is_walked(value: Any) -> bool:
    """True for functions, schedules, layers without trained parameters, such as the loss that a function calls, and
    objects of a user's class, such as a configuration."""
    if isinstance(value, nn.Layer):
        return all(p.stop_gradient for p in registered_parameters(value))
    if isinstance(value, FunctionType):
        return not kind_of(value).startswith("paddle_dp.")
    if isinstance(value, (partial, LRScheduler, SimpleNamespace, argparse.Namespace)):
        return True
    return not isinstance(value, type) and not is_library(type(value).__module__)


def _may_differ(name: str, value: Any) -> bool:
    """True if a setting is a location, a device, a time, a random id, a switch of one run, or this rank's number."""
    tokens = {*name.lower().split("_")}
    if isinstance(value, bool):
        return name == "training" or not _SWITCHES.isdisjoint(tokens)
    if isinstance(value, float):
        return _EPOCH < value <= time.time() and not value.is_integer()
    if isinstance(value, str):
        return (
            (value.startswith(tempfile.gettempdir() + os.sep) or _RANDOM_ID.fullmatch(value) is not None)
            or ("host" in tokens or ("name" in tokens and _GENERATED.fullmatch(value) is not None))
            or (not {"device", "place"}.isdisjoint(tokens) and _DEVICES.fullmatch(value.lower()) is not None)
            or (os.sep in value and not _PATHS.isdisjoint(tokens))
        )
    numbered = name.lower().strip("_").rpartition("_")[2] in _NUMBERS
    return type(value) is int and (numbered or not _DEVICE_NUMBERS.isdisjoint(tokens))


def _state_of(value: Any) -> Any:
    """The state of a random generator or of an iterator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, Iterator):
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore", DeprecationWarning)  # from itertools, since Python 3.12
            return value.__reduce__()
    return None


# State outside of checkpoints -----------------------------------------------------------------------------------------
# Python attributes with state that no checkpoint holds: of models, losses, schedules and optimizers, including a
# user-defined optimizer's state outside its state_dict.

# The attributes that Paddle's optimizers keep their parameters, states and caches in.
_PADDLE_ATTRIBUTES = """
    _parameter_list _param_groups _param_dict _default_dict _learning_rate _learning_rate_map _accumulators
    _accumulators_holder _already_create_accumulator _opti_name_list _auxiliary_vars _master_weights _master_grads
    _params_name _param_device_map _n_tensor _etas _sign _learning_rate_range helper clear_gradients
    fusion_storage _use_fusion_storage _fuse_buffer_version _need_refuse merged_model_params regularization _grad_clip
    _apply_decay_param_fun _exclude_from_weight_decay_fn _lr_ratio
"""
PADDLE_ATTRIBUTES = frozenset(_PADDLE_ATTRIBUTES.split())
_Facts = dict[str, dict[str, Any]]  # by attribute


class OptimizerMemory:
    """Reads an optimizer's attributes when it is created, and lists those that training has changed since.

    `parameters`: those it updates.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[paddle.Tensor]):
        self._optimizer, self._params = optimizer, parameters
        package = type(optimizer).__module__.partition(".")[0]
        self._is_known = package in ("paddle", "paddle_dp")  # all is saved
        self._initial = self._attributes()

    def lost(self) -> list[str]:
        """The changed attributes of the optimizer and of parameters that neither its state_dict nor the model saves."""
        saved = {} if self._is_known else self._optimizer.state_dict()
        changed = _changed(self._initial, self._attributes())
        return [name for name in changed if name not in saved and name.lstrip("_") not in saved]

    def _attributes(self) -> _Facts:
        if self._is_known:
            return {}
        walker = Walker(state=True, saved={id(tensor) for tensor in self._optimizer.state_dict().values()})
        facts = {
            name: walker.walk({name: value})
            for name, value in vars(self._optimizer).items()
            if name not in PADDLE_ATTRIBUTES
        }
        for parameter in self._params:
            for name, value in getattr(parameter, "__dict__", {}).items():
                if name != "main_grad":  # fleet's gradient
                    facts[f"{parameter.name}.{name}"] = walker.walk({name: value})
        return facts


class Attributes:
    """Reads the attributes of objects when it is created, and lists those that training has changed since.

    `owners`: objects by their name in messages; objects of library classes are left out. Their state_dict counts as
    saved if `walker` reads state.
    """

    def __init__(self, owners: Mapping[str, Any], walker: Walker | None = None):
        self._walker = walker or Walker(state=True)
        self._owners = {n: owner for n, owner in owners.items() if not is_library(kind_of(owner))}
        self._initial = self._facts()

    def changed(self) -> list[str]:
        """ "model.layers.0.calls", "loss.warm": the attributes that have changed or are new."""
        return _changed(self._initial, self._facts())

    def _facts(self) -> _Facts:
        facts: _Facts = {}
        for label, owner in self._owners.items():
            has_state = hasattr(owner, "state_dict") and not isinstance(owner, nn.Layer)
            saved = owner.state_dict() if has_state and self._walker.state else {}
            for name, value in attributes_of(owner).items():
                if name not in saved:
                    facts[f"{label}.{name}"] = self._walker.walk({name: value})
        return facts


def _changed(before: _Facts, after: _Facts) -> list[str]:
    """The attributes with other facts, or new ones."""
    return [name for name, facts in after.items() if facts != before.get(name, {})]
