"""Optimizer states under names that are the same in every layout and process: optimizer/<parameter>/<accumulator>.

Paddle names a state after the parameter's name in this process and a counter ("linear_7.w_0_moment1_0"). It creates the
state at the first step that needs it, and refuses to load a state that lacks a parameter without a gradient so far.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.checkpoint.tensors import put
from paddle_dp.errors import CheckpointError
from paddle_dp.tensors import dtype_of

if TYPE_CHECKING:
    import paddle

Named = Iterable[tuple[str, "paddle.Tensor"]]

MASTER = "master_weight"
_COUNTED = re.compile(r"_(.+)_[0-9]+")


def optimizer_name(parameter: str, accumulator: str) -> str:
    """The layout-free name: ("fc1.weight", "moment1") → "optimizer/fc1.weight/moment1"."""
    return f"optimizer/{parameter}/{accumulator}"


def optimizer_tensors(optimizer: Any, named_parameters: Named) -> dict[str, paddle.Tensor]:
    """The live tensors of an optimizer's state by their layout-free names; empty before its first step.

    A parameter that never had a gradient has none. The schedule is not a tensor and is left out.
    """
    state = dict(optimizer.state_dict())
    state.pop("LR_Scheduler", None)
    masters = state.pop("master_weights", {})
    owners, tensors = {}, {}
    for name, parameter in named_parameters:
        owners[parameter.name] = name
        if parameter.name in masters:
            owners[masters[parameter.name].name] = name
            tensors[optimizer_name(name, MASTER)] = masters[parameter.name]
    for key, tensor in state.items():
        owner, accumulator = _split(key, owners)
        tensors[optimizer_name(owner, accumulator)] = tensor
    return tensors


def _split(key: str, owners: dict[str, str]) -> tuple[str, str]:
    """("linear_0.w_0_fp32_master_0_moment1_0") → ("fc1.weight", "moment1")."""
    # The longest name wins: a master weight's name starts with its parameter's name.
    for length in range(len(key), 0, -1):
        match = _COUNTED.fullmatch(key, length) if key[:length] in owners else None
        if match:
            return owners[key[:length]], match[1]
    raise CheckpointError(
        f"The optimizer holds '{key}', which belongs to none of the model's parameters. If a layer was replaced after "
        "the optimizer had been made, make another one of the model's present parameters, and another Trainer with it."
    )


def load_optimizer(
    optimizer: Any,
    named_parameters: Named,
    read: Callable[[str, paddle.Tensor], np.ndarray],
    names: Collection[str],
) -> None:
    """Loads the state `read(name, tensor)` of all `names` that belong to this optimizer.

    `read` returns this rank's part of it, in the shape of `tensor`, which is to hold it. A parameter without a saved
    state has none afterwards. The next step is bitwise the saved optimizer's. Raises CheckpointError for the state of
    another optimizer or model. float64 is rounded into float32 tensors.
    """
    named = list(named_parameters)
    saved = {name for name in names if name.startswith("optimizer/")}
    owners = {name.removeprefix("optimizer/").rpartition("/")[0] for name in saved}
    _create_states(optimizer, [p for name, p in named if name in owners])
    _forget_states(optimizer, [p for name, p in named if name not in owners])
    tensors = optimizer_tensors(optimizer, named)
    kind = type(optimizer).__name__
    for name in sorted(saved - tensors.keys()):
        raise CheckpointError(
            f"The checkpoint holds {name}, which {kind} does not keep: another optimizer saved it."
        )
    # For a master that was not saved `read` has the weight.
    for name in sorted(n for n in tensors.keys() - saved if not n.endswith(f"/{MASTER}")):
        raise CheckpointError(f"{kind} keeps {name}, which the checkpoint lacks: another optimizer saved it.")
    for name, tensor in tensors.items():
        array = read(name, tensor)
        if {str(array.dtype), dtype_of(tensor)} == {"float32", "float64"}:  # of another train.precision
            array = array.astype(dtype_of(tensor))
        put(tensor, array, name)


def count_kinds(optimizer: Any) -> set[str]:
    """The kinds of states that are one number for a parameter of several (a step count), by the states of a parameter
    of two numbers, which a copy of the optimizer creates. Empty if it cannot create them."""
    from paddle.base import framework

    kinds = set()
    for member in getattr(optimizer, "members", [optimizer]):
        trial = copy(member)
        trial._accumulators, trial._accumulators_holder = defaultdict(dict), {}
        trial._already_create_accumulator, trial._opti_name_list = set(), []
        try:
            _create_states(trial, [framework.EagerParamBase(shape=[2], dtype="float32", name="two_numbers")])
        except Exception:  # noqa: BLE001 - a user's optimizer may know its own parameters only
            continue
        kinds |= {
            kind for kind, states in trial._accumulators.items() if any(s.size == 1 for s in states.values())
        }
    return kinds


def _create_states(optimizer: Any, parameters: list[paddle.Tensor]) -> None:
    """Creates the states of these parameters now, as the first step would.

    Uses Paddle's private `_create_accumulators` (3.0 to 3.3). The public `set_state_dict` before the first step would
    have to guess the counters in the names, and fails for a parameter that gets its first gradient later.
    """
    from paddle.base import framework

    if parameters:
        optimizer._create_accumulators(framework.default_main_program().global_block(), parameters)


def _forget_states(optimizer: Any, parameters: list[paddle.Tensor]) -> None:
    """Removes the states of parameters that got their first gradient after the checkpoint to which a running training
    rewinds. The next step creates them again."""
    masters = optimizer.state_dict().get("master_weights", {})
    for parameter in parameters:
        names = {parameter.name}
        if parameter.name in masters:
            names.add(masters.pop(parameter.name).name)
        for states in optimizer._accumulators.values():
            for name in names:
                states.pop(name, None)
        optimizer._already_create_accumulator.discard(parameter.name)
