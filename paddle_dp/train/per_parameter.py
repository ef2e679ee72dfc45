"""The settings that apply to some parameters only: parameter groups, learning rate factors, decay, clipping."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddle.incubate.optimizer import DistributedFusedLamb
from paddle.optimizer import AdamW, Lamb, Optimizer

from paddle_dp.parallel import Task
from paddle_dp.parallel.parameter_groups import own_decay
from paddle_dp.train.settings import described, kind_of

_SHOWN = 3  # names of parameters in a value


def parameter_facts(task: Task) -> dict[str, Any]:
    """By setting, the parameters that it applies to, by their names in the model; defaults are left out.

    Paddle's own parameter names count up in a process, so they cannot be compared.
    """
    named = [(name, p) for name, p in task.model.named_parameters() if not p.stop_gradient]
    factors = {name: p.optimize_attr.get("learning_rate", 1.0) for name, p in named}
    facts: dict[str, Any] = {
        "rate_factors": _values({name: factor for name, factor in factors.items() if factor != 1.0}),
        "own_decays": _values({name: own for name, p in named if (own := own_decay(p)) is not None}),
        "not_clipped": names_told([name for name, p in named if not p.need_clip]),
        "regularizers": _values(
            {
                name: [kind_of(p.regularizer), described(_public(vars(p.regularizer)))]
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
    elif isinstance(optimizer, (Lamb, DistributedFusedLamb)):
        is_excluded = optimizer._exclude_from_weight_decay_fn
    return {
        "decayed": is_decayed and (names_told([n for n, p in named if is_decayed(p.name)]) or "none"),
        "not_decayed": is_excluded and (names_told([n for n, p in named if is_excluded(p)]) or "none"),
        "rate_ratios": rate_ratio and _values({n: float(rate_ratio(p)) for n, p in named}),
    }


def _groups(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The settings and the parameters of each parameter group; without groups, the parameters if not all are there."""
    if not any(isinstance(group, dict) for group in optimizer._param_groups):
        updated = [names.get(id(p), p.name) for p in optimizer._param_groups if not p.stop_gradient]
        return {} if {*updated} == {*names.values()} else {"parameters": names_told(updated) or "none"}
    facts: dict[str, Any] = {}
    for number, group in enumerate(optimizer._param_groups):
        own = {key: value for key, value in group.items() if key != "params"}
        of_group = {
            **described(own),
            "parameters": names_told([names.get(id(p), p.name) for p in group["params"]]),
        }
        for key in ("grad_clip", "weight_decay"):
            if (part := own.get(key)) is not None and key not in of_group:
                of_group |= {key: [kind_of(part), described(_public(vars(part)))]}
        facts |= {f"groups.{number}.{key}": value for key, value in of_group.items()}
    return facts


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lstrip("_"): value for name, value in values.items()}


def names_told(names: Sequence[str]) -> str | None:
    """«2 (CRC-32 0a1b2c3d): fc.weight, fc.bias»; None for none."""
    if not names:
        return None
    shown = ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
    return f"{len(names)} (CRC-32 {zlib.crc32(chr(10).join(names).encode()):08x}): {shown}"


def _values(values: Mapping[str, Any]) -> str | None:
    """«2 (CRC-32 0a1b2c3d): fc.weight 0.5, fc.bias 0.5»; None for none."""
    return names_told([f"{name} {value}" for name, value in values.items()])
