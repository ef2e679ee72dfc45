"""A task as facts: types and settings of its layers, loss, optimizer and schedule, and the settings of some parameters
only: parameter groups, learning rate factors, decay, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    kind_of,
    prefixed,
    tensors_of,
)
from paddle_dp.learner import Task

_MAX_NAMES_SHOWN = 3  # names of parameters in a value
_walk, settings_of = Walker().walk, Walker().settings_of


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


def unsaved_tensors(model: nn.Layer) -> dict[str, Any]:
    """The buffers that no checkpoint holds, by shape, dtype and checksum: a resumed run computes with new ones."""
    left_out = {id(tensor) for tensor in model.state_dict().values()}
    # A buffer with a gradient is made of weights in each forward: the weight of spectral norm, of weight norm.
    left_out |= {id(buffer) for buffer in model.buffers() if not buffer.stop_gradient}
    return _walk({f"model.{name}": b for name, b in model.named_buffers() if id(b) not in left_out})


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
