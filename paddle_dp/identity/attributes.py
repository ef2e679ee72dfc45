"""Python attributes with state that no checkpoint holds: of models, losses, schedules and optimizers, including a
user-defined optimizer's state outside its state_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import paddle
from paddle import nn

from paddle_dp.identity.walk import Walker, attributes_of, is_library

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
        self._optimizer, self._parameters = optimizer, parameters
        self._is_known = type(optimizer).__module__.partition(".")[0] in (
            "paddle",
            "paddle_dp",
        )  # all is saved
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
        for parameter in self._parameters:
            for name, value in getattr(parameter, "__dict__", {}).items():
                if name != "main_grad":  # fleet's gradient
                    facts[f"{parameter.name}.{name}"] = walker.walk({name: value})
        return facts


class Attributes:
    """Reads the attributes of objects when it is created, and lists those that training has changed since.

    `owners`: objects by their name in messages; objects of library classes are left out.
    """

    def __init__(self, owners: Mapping[str, Any]):
        modules = {
            n: o.__module__ if isinstance(o, FunctionType) else type(o).__module__ for n, o in owners.items()
        }
        self._owners = {name: owner for name, owner in owners.items() if not is_library(modules[name])}
        self._initial = self._facts()

    def changed(self) -> list[str]:
        """ "model.layers.0.calls", "loss.warm": the attributes that have changed or are new."""
        return _changed(self._initial, self._facts())

    def _facts(self) -> _Facts:
        facts: _Facts = {}
        for label, owner in self._owners.items():
            has_state = hasattr(owner, "state_dict") and not isinstance(owner, nn.Layer)
            saved = owner.state_dict() if has_state else {}
            for name, value in attributes_of(owner).items():
                if name not in saved:
                    facts[f"{label}.{name}"] = Walker(state=True).walk({name: value})
        return facts


def _changed(before: _Facts, after: _Facts) -> list[str]:
    """The attributes with other facts, or new ones."""
    return [name for name, facts in after.items() if facts != before.get(name, {})]
