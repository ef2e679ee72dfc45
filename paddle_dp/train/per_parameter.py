"""What an optimizer does with some parameters and not with others: groups, factors of the rate, decay, clipping."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddle.optimizer import Optimizer

from paddle_dp.parallel import Task
from paddle_dp.train.settings import described, kind_of

_SHOWN = 3  # names of parameters in a value


def parameter_facts(task: Task) -> dict[str, Any]:
    """By setting, which parameters of the model it is for, by their names in the model; what is usual is left out.

    Paddle's names of parameters count up in a process, so the model's are told.
    """
    named = [(name, p) for name, p in task.model.named_parameters() if not p.stop_gradient]
    factors = {name: getattr(p, "optimize_attr", {}).get("learning_rate", 1.0) for name, p in named}
    facts: dict[str, Any] = {
        "rate_factors": _values({name: factor for name, factor in factors.items() if factor != 1.0}),
        "not_clipped": _names([name for name, p in named if not getattr(p, "need_clip", True)]),
        "regularizers": _values(
            {
                name: [kind_of(r), described(_public(vars(r)))]
                for name, p in named
                if (r := getattr(p, "regularizer", None)) is not None
            }
        ),
    }
    if isinstance(task.optimizer, Optimizer):
        facts |= _by_function(task.optimizer, named)
        facts |= _groups(task.optimizer, {id(p): name for name, p in named})
    return {key: value for key, value in facts.items() if value is not None}


def _by_function(optimizer: Any, named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What the functions of AdamW and Lamb say of each parameter."""
    decays: Callable[[str], bool] | None = getattr(optimizer, "_apply_decay_param_fun", None)
    leaves_out: Callable[[Any], bool] | None = getattr(optimizer, "_exclude_from_weight_decay_fn", None)
    ratio: Callable[[Any], float] | None = getattr(optimizer, "_lr_ratio", None)
    return {
        "decayed": decays and (_names([n for n, p in named if decays(p.name)]) or "none"),
        "not_decayed": leaves_out and (_names([n for n, p in named if leaves_out(p)]) or "none"),
        "rate_ratios": ratio and _values({n: float(ratio(p)) for n, p in named}),
    }


def _groups(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Of each parameter group, its settings and its parameters; of an ungrouped optimizer, its parameters."""
    if not any(isinstance(group, dict) for group in optimizer._param_groups):
        held = [names.get(id(p), p.name) for p in optimizer._param_groups if not p.stop_gradient]
        return {} if {*held} == {*names.values()} else {"parameters": _names(held) or "none"}
    facts: dict[str, Any] = {}
    for number, group in enumerate(optimizer._param_groups):
        own = {key: value for key, value in group.items() if key != "params"}
        told = {**described(own), "parameters": _names([names.get(id(p), p.name) for p in group["params"]])}
        for key in ("grad_clip", "weight_decay"):
            if (part := own.get(key)) is not None and key not in told:
                told |= {key: [kind_of(part), described(_public(vars(part)))]}
        facts |= {f"groups.{number}.{key}": value for key, value in told.items()}
    return facts


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lstrip("_"): value for name, value in values.items()}


def _names(names: Sequence[str]) -> str | None:
    """«2 (CRC-32 0a1b2c3d): fc.weight, fc.bias»; None for none."""
    if not names:
        return None
    shown = ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
    return f"{len(names)} (CRC-32 {zlib.crc32(chr(10).join(names).encode()):08x}): {shown}"


def _values(values: Mapping[str, Any]) -> str | None:
    """«2 (CRC-32 0a1b2c3d): fc.weight 0.5, fc.bias 0.5»; None for none."""
    return _names([f"{name} {value}" for name, value in values.items()])
