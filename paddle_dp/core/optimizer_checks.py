"""Checks and adapts an optimizer that was built before the model was placed: it must update this rank's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import UsageError

Parameters = list[paddle.Tensor]


def check_within(optimizer: Any, loss: Any, model: nn.Layer) -> None:
    """Raises UsageError if a finished optimizer or a loss has a parameter that is not the model's: its gradient would
    not be exchanged, and no checkpoint would save it. Call it before the model is placed."""
    known = {id(parameter) for parameter in model.parameters()}
    parameters_by_owner: dict[str, Parameters] = {"optimizer": [], "loss": []}
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        parameters_by_owner["optimizer"] = parameters_of(optimizer)
    if isinstance(loss, nn.Layer):
        parameters_by_owner["loss"] = [p for p in loss.parameters() if not p.stop_gradient]
    for owner, parameters in parameters_by_owner.items():
        if foreign := [p for p in parameters if id(p) not in known]:
            raise UsageError(
                f"{owner}: its parameter '{foreign[0].name}' {list(foreign[0].shape)} is not one of the model's "
                f"({type(model).__name__}). Make whatever learns a sublayer of the model, and the optimizer of "
                "model.parameters()."
            )


def check_not_wrapper(optimizer: Any) -> None:
    """Raises UsageError for a wrapped optimizer (paddle.incubate.LookAhead): its state_dict has neither the inner one's
    moments nor its counter, so a resumed run would differ (3.3.1). Also for L-BFGS, which computes the loss several
    times per update."""
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        raise UsageError(
            "optimizer: LBFGS computes the loss several times in one update, and an update here is made from one "
            "forward and backward. Choose another, such as adamw."
        )
    if isinstance(getattr(optimizer, "inner_optimizer", None), paddle.optimizer.Optimizer):
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} keeps another optimizer inside, whose state no checkpoint would "
            f"hold. Give that one ({type(optimizer.inner_optimizer).__name__}) itself."
        )


def check_ungrouped(optimizer: Any, setting: str) -> None:
    """Raises UsageError for an optimizer with parameter groups; `setting` is the recipe's key that needs one list."""
    if _is_grouped(optimizer):
        raise UsageError(
            f"optimizer: {setting} assigns one list of parameters to the ranks, and {type(optimizer).__name__} has "
            f"parameter groups. Give it all parameters in one list, or leave {setting} out."
        )


def leave_frozen_out(optimizer: Any) -> None:
    """Removes frozen parameters from an optimizer's list: they have no update that a rank could own."""
    keep(optimizer, [parameter for parameter in optimizer._parameter_list if not parameter.stop_gradient])


def keep(optimizer: Any, parameters: Parameters) -> None:
    """Restricts an optimizer without groups to these parameters."""
    optimizer._parameter_list = optimizer._param_groups = parameters


def check_dense(model: nn.Layer) -> None:
    """Raises UsageError for an embedding with sparse gradients: exchange, norm and scaling here need dense ones."""
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.Embedding) and layer._sparse:
            raise UsageError(
                f"model: layer {name} is an Embedding with sparse=True, whose gradient is rows of a table; ranks "
                "exchange whole gradients only. Make it with sparse=False."
            )


def check_single_dtype(model: nn.Layer) -> None:
    """Raises UsageError if some trained parameters are float64 and others narrower: Paddle's clip and optimizers take
    one dtype (3.3.1)."""
    trained = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    wide = [name for name, p in trained if p.dtype == paddle.float64]
    if 0 < len(wide) < len(trained):
        raise UsageError(
            f"model: parameter {wide[0]} is float64, and others are not; Paddle's clip and optimizers take one dtype. "
            "Create it with dtype='float32', or compute all in float64: train.precision=float64."
        )


def give_parameters(optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> None:
    """Replaces the optimizer's parameters with this rank's parameters of `model`, matched by name.

    A sharded layer has new parameters, and a pipeline stage has only some; the optimizer would continue to update the
    whole model's, which no forward uses.
    """
    here = {parameter.name: parameter for parameter in model.parameters()}

    def local(parameters: Iterable[paddle.Tensor]) -> Parameters:
        return [here[p.name] for p in parameters if p.name in here]

    if _is_grouped(optimizer):
        for group in (*optimizer._parameter_list, *optimizer._param_groups):
            group["params"] = local(group["params"])
    else:
        keep(optimizer, local(optimizer._parameter_list))


def _is_grouped(optimizer: Any) -> bool:
    return bool(optimizer._parameter_list) and isinstance(optimizer._parameter_list[0], dict)


def parameters_of(optimizer: Any) -> Parameters:
    """The parameters that an optimizer updates, grouped or not."""
    groups = groups_of(optimizer)
    return list(optimizer._parameter_list or ()) if groups is None else [p for group in groups for p in group]


def groups_of(optimizer: Any) -> list[Parameters] | None:
    """The parameters of each of an optimizer's groups; None if it has one list."""
    if not _is_grouped(optimizer):
        return None
    return [list(group["params"]) for group in optimizer._param_groups]
