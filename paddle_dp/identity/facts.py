"""A training as facts: settings, code, versions and types of objects, to compare ranks and to keep in checkpoints."""

from __future__ import annotations

import glob
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from paddle_dp.identity import source_code
from paddle_dp.identity.walk import Walker, is_library, kind_of, prefixed
from paddle_dp.mesh import Mesh
from paddle_dp.part import Part
from paddle_dp.recipe import Recipe
from paddle_dp.units import Length
from paddle_dp.version import __version__

_MAX_VALUE_CHARS = 100  # characters of a value in a message
Facts = Mapping[str, Any]


def are_same(*values: Any) -> bool:
    """True if the values are equal as JSON, or paths to files with the same bytes."""
    if all(isinstance(value, Mapping) and "path" in value for value in values):
        values = tuple(value["crc32"] for value in values)
    return len({json.dumps(value, sort_keys=True, default=str) for value in values}) == 1


def shown(value: Any) -> str:
    """A value for a message."""
    value = value["path"] if isinstance(value, Mapping) and "path" in value else value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "…"


MAY_DIFFER = ("output_dir", "name", "loader")


@dataclass(frozen=True, kw_only=True)
class RunSignature:
    """All facts that decide the result of a training, as its checkpoints keep them.

    `facts`: settings, types and versions by dotted key. `data`: by split, the number of samples and their fingerprint.
    `rates`: the learning rate of some updates, [[step, rate], …], if the schedule is a function of the step.
    `accepted`: the changes made with --accept so far, [{"step", "key", "was", "is"}, …].
    """

    facts: Facts
    data: Mapping[str, Any]
    rates: Sequence[Sequence[float]] = ()
    accepted: Sequence[Mapping[str, Any]] = ()

    def state(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        state: dict[str, Any] = json.loads(json.dumps(vars(self), default=str))
        return state


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a training as its recipe or its script gave them.

    `requested`: the recipe that strategy and callbacks check and may refuse; a script's is made up of its arguments.
    `length`: None if only `fit` gets it. A proof changes `length`, `shuffle` and `drop_last`. `named_settings`: the
    settings of the parts that a script gave by name. `script_callbacks`: the callbacks that it made.
    """

    requested: Recipe
    is_script: bool = False
    length: Length | None
    shuffle: bool = True
    drop_last: bool
    named_settings: Mapping[str, Any] = field(default_factory=dict)
    script_callbacks: Sequence[Any] = ()

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that the user wrote; None for a script."""
        return None if self.is_script else self.requested

    @property
    def seed(self) -> int:
        return self.requested.train.seed

    @property
    def batch(self) -> int:
        """Samples of a global batch."""
        return self.requested.train.batch

    @property
    def scatters(self) -> bool:
        """Whether rank 0 reads the data for all ranks."""
        return self.requested.dataset.reading == "scatter"


def setup_facts(setup: TrainingSettings) -> dict[str, Any]:
    """Code, and the recipe or the settings of a script, by dotted key: known before the task is made."""
    if (recipe := setup.recipe) is not None:
        codes, modules = source_code.recipe_code(recipe), source_code.module_code()
        other_code = {key: code for key, code in modules.items() if code not in codes.values()}
        return {**codes, **other_code, **recipe_facts(recipe)}
    requested = setup.requested
    train = {
        "length": setup.length and str(setup.length), "batch": setup.batch,
        "micro_batches": requested.train.micro_batches, "shuffle": setup.shuffle, "drop_last": setup.drop_last,
        "seed": setup.seed, "batch_ramp": requested.train.batch_ramp and _as_texts(requested.train.batch_ramp),
    }  # fmt: skip
    settings = {
        "strategy": requested.strategy.settings, "train": train, "guard": _as_texts(requested.guard),
        "ema": _as_texts(requested.ema), "mix": _as_texts(requested.mix),
        "turns": {name: _as_texts(turn) for name, turn in requested.turns.items()},
        "evaluation": _as_texts(requested.evaluation),
        "dataset.reading": requested.dataset.reading, **setup.named_settings,
    }  # fmt: skip
    facts = {name: fact for key, value in settings.items() for name, fact in flat(key, value).items()}
    return {"code of the script": source_code.script_code(), **source_code.module_code(), **facts}


def _as_texts(settings: object | None) -> dict[str, str | None] | None:
    values = {} if settings is None else vars(settings)
    return {name: None if value is None else str(value) for name, value in values.items()} or None


def packages(mesh: Mesh) -> dict[str, Any]:
    """The versions that results depend on; Python's patch number is not one."""
    return {
        "package paddle_dp": f"{__version__} (its files: {source_code.package_crc():08x})",
        "package paddle": paddle.__version__,
        "package numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": mesh.computes_on,
    }


def threads(mesh: Mesh) -> dict[str, str]:
    """The number of threads with which this rank computes on a CPU: products are summed in as many parts, so the last
    bits depend on it. Machines may have different numbers of processors, so it may differ between ranks."""
    number = os.environ.get("OMP_NUM_THREADS")
    return {"threads": number} if number and mesh.device == "cpu" else {}


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe by dotted key, without the keys in MAY_DIFFER."""
    content = recipe.model_dump(mode="json")
    comparable = {key: value for key, value in content.items() if key not in MAY_DIFFER}
    order = {"order of turns": list(recipe.turns)} if recipe.turns else {}
    return {
        name: fact for key, value in comparable.items() for name, fact in flat(key, value).items()
    } | order


def flat(name: str, value: Any) -> dict[str, Any]:
    """{"train": {"batch": 64}} → {"train.batch": 64}; a path becomes {"path", "crc32"}."""
    if isinstance(value, Mapping):
        return {n: v for key, inner in value.items() for n, v in flat(f"{name}.{key}", inner).items()}
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        return {n: v for at, inner in enumerate(value) for n, v in flat(f"{name}.{at}", inner).items()}
    return {name: _path(value, content=not name.startswith("dataset.")) if isinstance(value, str) else value}


def _path(text: str, content: bool) -> Any:
    """The text, or, for an existing path, {"path", "crc32"}: the checksum of a file, if `content` is to be read."""
    path = os.path.expanduser(text)
    exists = os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path)))
    if not exists or os.sep not in path:
        return text
    return {"path": text, "crc32": source_code.file_crc(path) if content else None}


def script_arguments() -> dict[str, Any]:
    """The arguments of the running script, which may decide its global variables; not a notebook's."""
    has_file = hasattr(sys.modules.get("__main__"), "__file__")
    return {"arguments of the script": shlex.join(sys.argv[1:])} if has_file else {}


def callback_facts(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Types and settings of users' callbacks, which may change the result."""
    facts: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, Part):
            if code := source_code.code_of(callback):
                facts |= {
                    f"callback {callback.name}{key}": fact
                    for key, fact in flat("", callback.settings).items()
                }
                facts[f"code of callback {callback.name}"] = code
        elif not is_library(type(callback).__module__):
            kind = kind_of(callback)
            facts |= prefixed(f"callback {kind}", {"": kind, **Walker().settings_of(callback)})
    return facts
