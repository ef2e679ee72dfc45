"""A training as facts: settings, code, versions and types of objects, to compare ranks and to keep in checkpoints.

Code is a checksum of the imported modules that belong to no library, and of a notebook's cells. Settings include those
of some parameters only: parameter groups, learning rate factors, decay, clipping.
"""

from __future__ import annotations

import glob
import inspect
import json
import os
import platform
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.incubate.optimizer import DistributedFusedLamb
from paddle.optimizer import AdamW, Lamb, Optimizer
from paddle.optimizer.lr import LRScheduler

from paddle_dp.core.parameter_groups import group_decay
from paddle_dp.core.updates import ByParameter
from paddle_dp.identity.walk import (
    PADDLE_ATTRIBUTES,
    Walker,
    checksum,
    hooks_of,
    is_library,
    kind_of,
    prefixed,
    tensors_of,
)
from paddle_dp.learner import Task
from paddle_dp.mesh import Mesh
from paddle_dp.part import Part
from paddle_dp.part.call import Call
from paddle_dp.recipe import BatchRamp, Ema, EvaluationSettings, Guard, Mix, Recipe, TurnSettings
from paddle_dp.units import Length
from paddle_dp.version import __version__

_MAX_NAMES_SHOWN = 3  # names of parameters in a value
_MAX_VALUE_CHARS = 100  # characters of a value in a message
_walk, settings_of = Walker().walk, Walker().settings_of


def parameter_facts(task: Task) -> dict[str, Any]:
    """The parameters that each setting applies to, by their names in the model, without defaults.

    Paddle's parameter names count up in a process, so they cannot be compared.
    """
    named = [(name, p) for name, p in task.model.named_parameters() if not p.stop_gradient]
    factors = {name: p.optimize_attr.get("learning_rate", 1.0) for name, p in named}
    facts: dict[str, Any] = {
        "rate_factors": _values({name: factor for name, factor in factors.items() if factor != 1.0}),
        "own_decays": _values({name: decay for name, p in named if (decay := group_decay(p)) is not None}),
        "not_clipped": summarize_names([name for name, p in named if not p.need_clip]),
        "regularizers": _values(
            {
                name: [kind_of(p.regularizer), _walk(_public(vars(p.regularizer)))]
                for name, p in named
                if p.regularizer is not None
            }
        ),
    }
    if isinstance(task.optimizer, Optimizer):
        facts |= _by_function(task.optimizer, named)
        facts |= _groups(task.optimizer, {id(p): name for name, p in named})
    return {key: value for key, value in facts.items() if value is not None}


def _by_function(optimizer: Any, named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The results of AdamW's and Lamb's functions for each parameter."""
    is_decayed: Callable[[str], bool] | None = None
    is_excluded: Callable[[Any], bool] | None = None
    rate_ratio: Callable[[Any], float] | None = None
    if isinstance(optimizer, AdamW):
        is_decayed, rate_ratio = optimizer._apply_decay_param_fun, optimizer._lr_ratio
    elif isinstance(optimizer, ByParameter):
        is_decayed = optimizer._apply_decay_param_fun
    elif isinstance(optimizer, (Lamb, DistributedFusedLamb)):
        is_excluded = optimizer._exclude_from_weight_decay_fn
    return {
        "decayed": is_decayed and (summarize_names([n for n, p in named if is_decayed(p.name)]) or "none"),
        "not_decayed": is_excluded and (summarize_names([n for n, p in named if is_excluded(p)]) or "none"),
        "rate_ratios": rate_ratio and _values({n: float(rate_ratio(p)) for n, p in named}),
    }


def _groups(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The settings and parameters of each parameter group; without groups, the parameters if some are missing."""
    if not any(isinstance(group, dict) for group in optimizer._param_groups):
        updated = [names.get(id(p), p.name) for p in optimizer._param_groups if not p.stop_gradient]
        return {} if {*updated} == {*names.values()} else {"parameters": summarize_names(updated) or "none"}
    facts: dict[str, Any] = {}
    for number, group in enumerate(optimizer._param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        group_facts = {
            **_walk(settings),
            "parameters": summarize_names([names.get(id(p), p.name) for p in group["params"]]),
        }
        for key in ("grad_clip", "weight_decay"):
            if (component := settings.get(key)) is not None and key not in group_facts:
                group_facts |= {key: [kind_of(component), _walk(_public(vars(component)))]}
        facts |= {f"groups.{number}.{key}": value for key, value in group_facts.items()}
    return facts


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lstrip("_"): value for name, value in values.items()}


def summarize_names(names: Sequence[str]) -> str | None:
    """ "2 (CRC-32 0a1b2c3d): fc.weight, fc.bias"; None for none."""
    if not names:
        return None
    shown = ", ".join(names[:_MAX_NAMES_SHOWN]) + ", …" * (len(names) > _MAX_NAMES_SHOWN)
    return f"{len(names)} ({checksum(chr(10).join(names))}): {shown}"


def _values(values: Mapping[str, Any]) -> str | None:
    """ "2 (CRC-32 0a1b2c3d): fc.weight 0.5, fc.bias 0.5"; None for none."""
    return summarize_names([f"{name} {value}" for name, value in values.items()])


MODULE_PREFIX = "code of module "
_MAX_FILE_BYTES = 2**28  # bytes; a larger file is not read for its checksum
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON_MODULES = {"sitecustomize", "usercustomize"}


def file_crc(file: str | None) -> str | None:
    """ "CRC-32 0a1b2c3d"; None if there is no file, or it is too large to read."""
    if file is None or not os.path.isfile(file) or os.path.getsize(file) > _MAX_FILE_BYTES:
        return None
    return checksum(Path(file).read_bytes())


def module_code() -> dict[str, str]:
    """{"code of module net": "CRC-32 0a1b2c3d"} for each imported file outside installed packages."""
    checksums, main = {}, sys.modules.get("__main__")
    for name, module in sorted(sys.modules.items()):
        file = str(getattr(module, "__file__", None))
        if module is main or name in _PYTHON_MODULES or is_library(name) or not file.endswith(".py"):
            continue
        if not _INSTALLED & {*Path(file).parts} and (crc := _module_crc(file, os.path.getmtime(file))):
            checksums[f"{MODULE_PREFIX}{name}"] = crc
    return checksums


@cache
def _module_crc(file: str, changed: float) -> str | None:
    return file_crc(file)


def script_code() -> str | None:
    """The checksum of the script's file, or else of the functions and classes that a notebook's cells defined."""
    main = sys.modules.get("__main__")
    return file_crc(vars(main).get("__file__")) or _defined_in(main) if main else None


def _defined_in(module: ModuleType) -> str | None:
    """The checksum of the sources of a module's functions and methods; None without any."""
    members = [member for _, member in sorted(vars(module).items())]
    methods = [vars(kind)[name] for kind in members if isinstance(kind, type) for name in sorted(vars(kind))]
    sources = []
    for function in (*members, *methods):
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            with suppress(OSError):  # it was not made by a cell
                sources.append(inspect.getsource(function))
    return checksum("".join(sources)) if sources else None


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
        codes = recipe_code(recipe)
        other_code = {key: code for key, code in module_code().items() if code not in codes.values()}
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
    return {"code of the script": script_code(), **module_code(), **facts}


def _as_texts(
    settings: Guard | Ema | Mix | EvaluationSettings | BatchRamp | TurnSettings | None,
) -> dict[str, str | None] | None:
    values = {} if settings is None else vars(settings)
    return {name: None if value is None else str(value) for name, value in values.items()} or None


def packages(mesh: Mesh) -> dict[str, Any]:
    """The versions that results depend on; Python's patch number is not one."""
    return {
        "package paddle_dp": f"{__version__} (its files: {_sources():08x})",
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


def recipe_code(recipe: Recipe) -> dict[str, str]:
    """The checksum of each part's file, if it has one."""
    components = (
        recipe.model, *_datasets(recipe.dataset), recipe.loss, recipe.optimizer, recipe.schedule, recipe.strategy,
        *(component for turn in recipe.turns.values() for component in (turn.loss, turn.optimizer)),
    )  # fmt: skip
    return {f"code of {p.shelf} {p.name}": code for p in components if p is not None and (code := code_of(p))}


def _datasets(dataset: Part) -> Iterator[Part]:
    """Yields the data set, and each one of a mixture."""
    yield dataset
    for source in getattr(dataset.config, "sources", ()):
        if isinstance(nested := getattr(source, "dataset", None), Part):
            yield from _datasets(nested)


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
    return {"path": text, "crc32": file_crc(path) if content else None}


def task_facts(task: Task) -> dict[str, Any]:
    """Types and settings of model, loss, optimizer, schedule and every layer, and settings of single parameters."""
    facts = _layer_facts("model", task.model)
    objects = {"loss": task.loss.function, "optimizer": task.optimizer, "schedule": task.schedule}
    facts |= {name: None if thing is None else kind_of(thing) for name, thing in objects.items()}
    layers = task.model.named_sublayers(include_self=True)
    if frozen := summarize_names([name or "the model" for name, layer in layers if not layer.training]):
        facts["layers in evaluation mode"] = frozen
    if isinstance(loss := task.loss.function, nn.Layer):
        facts |= _layer_facts("loss", loss, without=task.model)
    else:
        facts |= prefixed("loss", settings_of(loss))
    if task.schedule is None and (schedule := schedule_of(task)) is not None:
        facts |= prefixed("schedule of the optimizer", {"": kind_of(schedule), **settings_of(schedule)})
    settings = {**_optimizer_settings(task.optimizer, task.schedule), **parameter_facts(task)}
    return facts | prefixed("schedule", settings_of(task.schedule)) | prefixed("optimizer", settings)


def schedule_of(task: Task) -> Any:
    """The task's schedule, or the one inside a finished optimizer; None for a constant rate."""
    rate = task.optimizer._learning_rate if isinstance(task.optimizer, Optimizer) else None
    return task.schedule or (rate if isinstance(rate, LRScheduler) else None)


def _layer_facts(prefix: str, root: nn.Layer, without: nn.Layer | None = None) -> dict[str, Any]:
    """Types and settings of all layers by name, except the layers of `without`. With `without`, for a loss, tensors are
    settings, too; a model's tensors are learned."""
    facts: dict[str, Any] = {}
    known = {id(layer) for layer in without.sublayers(include_self=True)} if without is not None else set()
    for name, layer in root.named_sublayers(include_self=True):
        if id(layer) not in known:
            tensors = tensors_of(layer) if without is not None else {}
            settings = {"": kind_of(layer), **settings_of(layer), **tensors, **hooks_of(layer)}
            facts |= prefixed(f"{prefix}.{name}".rstrip("."), settings)
    return facts


def unsaved_tensors(model: nn.Layer) -> dict[str, Any]:
    """The buffers that no checkpoint holds, by shape, dtype and checksum: a resumed run computes with new ones."""
    left_out = {id(tensor) for tensor in model.state_dict().values()}
    # A buffer with a gradient is made of weights in each forward: the weight of spectral norm, of weight norm.
    left_out |= {id(buffer) for buffer in model.buffers() if not buffer.stop_gradient}
    return _walk({f"model.{name}": b for name, b in model.named_buffers() if id(b) not in left_out})


@cache
def _sources() -> int:
    """The checksum of all files of this package: in a clone the version alone is not enough."""
    folder, crc = Path(__file__).parent.parent, 0
    for file in sorted(folder.rglob("*.py")):
        crc = zlib.crc32(file.read_bytes(), zlib.crc32(str(file.relative_to(folder)).encode(), crc))
    return crc


def code_of(component: Part) -> str | None:
    """The checksum of the part's source file; None for parts of this package and Paddle: their versions are facts."""
    config = type(component.config)
    kind: Any = config.called if issubclass(config, Call) else config
    if (kind.__module__ or "").partition(".")[0] in ("paddle_dp", "paddle"):
        return None
    try:
        return file_crc(inspect.getsourcefile(kind))
    except TypeError:
        return None


def script_arguments() -> dict[str, Any]:
    """The arguments of the running script, which may decide its global variables; not a notebook's."""
    has_file = hasattr(sys.modules.get("__main__"), "__file__")
    return {"arguments of the script": shlex.join(sys.argv[1:])} if has_file else {}


def callback_facts(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Types and settings of users' callbacks, which may change the result."""
    facts: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, Part):
            if code := code_of(callback):
                facts |= {
                    f"callback {callback.name}{key}": fact
                    for key, fact in flat("", callback.settings).items()
                }
                facts[f"code of callback {callback.name}"] = code
        elif not is_library(type(callback).__module__):
            kind = kind_of(callback)
            facts |= prefixed(f"callback {kind}", {"": kind, **settings_of(callback)})
    return facts


def _optimizer_settings(optimizer: Any, schedule: Any) -> dict[str, Any]:
    """The settings of a finished Paddle optimizer, which keeps them under private names, or of a function's closure."""
    if not isinstance(optimizer, Optimizer):
        return settings_of(optimizer)
    attributes = vars(optimizer)
    settings = _walk(_public({n: v for n, v in attributes.items() if n not in PADDLE_ATTRIBUTES}))
    for name in ("_grad_clip", "regularization"):
        if (component := attributes.get(name)) is not None:
            inner = _walk({name.lstrip("_"): _public(vars(component))})
            settings |= {name.lstrip("_"): kind_of(component), **inner}
    return settings if schedule is not None else {**settings, "learning_rate": optimizer.get_lr()}
