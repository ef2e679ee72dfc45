"""Refuses arguments of `Trainer.of` by their type: objects that train or exchange by themselves, and wrong types.

A foreign type is known by its name, so nothing is imported that the script has not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import paddle

from paddle_dp.errors import UsageError
from paddle_dp.part.config import show
from paddle_dp.recipe import Ema, EvaluationSettings, Guard, Load, LoaderSettings, Mix

_SLICED = "of which each rank has a part alone. Build the whole model of plain layers, and let strategy="
_INDICES = (
    "a {kind} gives indices, not samples. Give the data set, and batch=…, the global batch size: ranks share the "
    "batches by themselves."
)
_SAMPLERS = {"paddle.io.dataloader.batch_sampler.": _INDICES, "paddle.io.dataloader.sampler.": _INDICES}
# argument → {the beginning of a class's dotted name: a sentence}; the first row that fits holds.
_FOREIGN: dict[str, dict[str, str]] = {
    "model": {
        "paddle.hapi.model.Model": "a paddle.Model has a training loop of its own. Give its network, model.network; "
        "what prepare() and fit() take are arguments of Trainer.of (docs/coming-from/fleet.md).",
        "paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers.PipelineLayer": "it is a PipelineLayer, "
        f"{_SLICED}{{'use': 'hybrid', 'pipeline': 2}} cut its blocks=[…] into stages.",
        "paddle.distributed.fleet.layers.mpu.": f"it is a {{kind}}, {_SLICED}{{'use': 'hybrid', 'tensor': 2}} "
        "cut it by cuts={…} (docs/parallelism.md).",
        "paddle.distributed.fleet.utils.sequence_parallel_utils.": f"it is a {{kind}}, {_SLICED}"
        "{'use': 'hybrid', 'tensor': 2, 'sequence_parallel': True} cut it by cuts={…}.",
        "paddle.distributed.": "it is wrapped in {kind}. Give the model itself, and the optimizer its parameters: the "
        "trainer makes the exchange.",
    },
    "optimizer": {
        "paddle.distributed.": "a {kind} exchanges gradients itself. Leave the call that makes it out, such as "
        "fleet.distributed_optimizer(…), and give the optimizer within: the trainer makes the exchange.",
        "paddle.incubate.optimizer.modelaverage.": "a ModelAverage averages weights, and updates none. Give the "
        "optimizer that does; an average is ema={'decay': 0.999}.",
    },
    "train": _SAMPLERS,
    "test": _SAMPLERS,
    "strategy": {
        "paddle.distributed.fleet.": "a {kind} is fleet's. Give settings such as {'use': 'hybrid', 'tensor': 2}: "
        "docs/coming-from/fleet.md has a table from its settings to the keys here.",
    },
    "callbacks": {
        "paddle.hapi.callbacks.": "{kind} is a callback of paddle.Model. Here a callback is a word, such as "
        "'early_stop', 'checkpoint' or 'dashboard' (paddle-dp parts callbacks), or an object of a class derived from "
        "paddle_dp.Callback (docs/add-a-part.md).",
    },
}
_SETTINGS = "settings such as"
# argument → (its types, the same in words); None means that the argument is left out.
_TAKES: dict[str, tuple[tuple[Any, ...], str]] = {
    "model": ((paddle.nn.Layer,), "a paddle.nn.Layer"),
    "train": ((object,), "a data set, with len(d) and d[i] → (input, target)"),
    "batch": ((object,), "the global batch, in samples"),
    "optimizer": (
        (paddle.optimizer.Optimizer, Callable, str, Mapping, list, tuple),  # several are refused elsewhere
        "an optimizer of paddle.optimizer, its class, a function of (learning rate, named parameters), or a word such "
        "as 'adamw'",
    ),
    "loss": ((Callable, str, Mapping), "a function of (outputs, targets), or a word such as 'cross_entropy'"),
    "schedule": (
        (paddle.optimizer.lr.LRScheduler, str, Mapping),
        f"a scheduler of paddle.optimizer.lr, or {_SETTINGS} {{'use': 'constant', 'learning_rate': 0.1}}",
    ),
    "strategy": ((str, Mapping), f"a word, or {_SETTINGS} {{'use': 'hybrid', 'tensor': 2}}"),
    "adapter": ((str, Mapping), f"{_SETTINGS} {{'use': 'lora', 'match': ['*.q']}}"),
    "collate_fn": ((Callable,), "a function of a list of samples"),
    "loader": ((LoaderSettings, Mapping), f"{_SETTINGS} {{'num_workers': 4}}"),
    "load": ((Load, Mapping, str, PathLike), f"a path, or {_SETTINGS} {{'path': …, 'strict': False}}"),
    "guard": ((Guard, Mapping), f"{_SETTINGS} {{'non_finite': 'skip'}}"),
    "ema": ((Ema, Mapping), f"{_SETTINGS} {{'decay': 0.999}}"),
    "mix": ((Mix, Mapping), f"{_SETTINGS} {{'mixup': 0.2}}"),
    "evaluation": ((EvaluationSettings, Mapping), f"{_SETTINGS} {{'samples': 10000}}"),
}
_CLASSES = (
    "optimizer",
    "collate_fn",
    "train",
)  # arguments that may be a class, or whose class has another sentence


def check_types(arguments: Mapping[str, Any], required: list[str]) -> None:
    """Raises UsageError for the first argument that is foreign or of a wrong type, and for required ones that lack."""
    for name, value in arguments.items():
        for each in value if name == "callbacks" and isinstance(value, (list, tuple)) else (value,):
            _refuse_foreign(name, each, f"Trainer.of.{name}")
        kinds, takes = _TAKES.get(name, ((object,), ""))
        is_class = isinstance(value, type) and takes and name not in _CLASSES
        if value is not None and (is_class or not isinstance(value, kinds)):
            raise UsageError(f"Trainer.of.{name} takes {takes}, not {_described(value)}.")
    if missing := [name for name in required if arguments.get(name) is None]:
        raise UsageError(f"Trainer.of needs {missing[0]}=…: {_TAKES[missing[0]][1]}.")


def check_layers(model: paddle.nn.Layer) -> None:
    """Raises UsageError for a model with a layer that exchanges by itself, or of which each rank has a part alone."""
    for name, layer in model.named_sublayers():
        if getattr(
            layer, "is_mp", True
        ):  # False: fleet's layer on one rank of its axis, which is a plain one
            _refuse_foreign("model", layer, f"Trainer.of.model.{name}")


def _refuse_foreign(argument: str, value: Any, key: str) -> None:
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]
    for beginning, sentence in _FOREIGN.get(argument, {}).items():
        if any(name.startswith(beginning) for name in names):
            raise UsageError(f"{key}: {sentence.replace('{kind}', type(value).__name__)}")


def _described(value: Any) -> str:
    """A wrong value in a message."""
    if isinstance(value, type):
        return f"the class {value.__name__}: give an object, {value.__name__}(…)"
    if isinstance(value, (bool, int, float, str, list, tuple, Mapping)):
        return show(value) if isinstance(value, str) else repr(value)[:60]
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
