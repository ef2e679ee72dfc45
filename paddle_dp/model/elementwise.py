"""Checks whether an optimizer may update only a part of a model.

Slices of parameters (tensor) need an optimizer that computes element by element; some of the parameters (sharding,
pipeline) need one that computes parameter by parameter.
"""

from __future__ import annotations

from typing import Any

from paddle import optimizer as optimizers
from paddle.incubate.optimizer import DistributedFusedLamb, LarsMomentumOptimizer

from paddle_dp.errors import UsageError

# By exact type: a subclass may override `step`.
_ELEMENTWISE = {
    optimizers.SGD, optimizers.Momentum, optimizers.Adam, optimizers.AdamW, optimizers.Adamax, optimizers.NAdam,
    optimizers.RAdam, optimizers.Adagrad, optimizers.Adadelta, optimizers.RMSProp, optimizers.ASGD,
    optimizers.Rprop,
}  # fmt: skip
# Subclasses included: a layer's rate uses a norm over its parameter (Lamb, LARS), or products run over all (L-BFGS).
_BY_FULL_PARAMETER = (optimizers.Lamb, DistributedFusedLamb, LarsMomentumOptimizer, optimizers.LBFGS)
# Optimizers that compute parameter by parameter.
_BY_PARAMETER = {*_ELEMENTWISE, optimizers.Lamb}


def check_elementwise(optimizer: Any, tensor: int) -> list[str]:
    """Sentences about possible differences from one process if `tensor` ranks update slices: one for a user-defined
    optimizer, none for Paddle's elementwise ones.

    Raises UsageError for an optimizer that takes a norm over a parameter: over a slice it is another number.
    """
    name = type(optimizer).__name__
    if tensor == 1 or type(optimizer) in _ELEMENTWISE:
        return []
    if isinstance(optimizer, _BY_FULL_PARAMETER):
        raise UsageError(
            f"strategy.tensor={tensor}: optimizer {name} takes norms over whole parameters, and each rank would take "
            "them over its slices, so it would learn something else than one process. Choose an optimizer that "
            "computes element by element (such as adamw), or set strategy.tensor=1: sharding, pipeline and data keep "
            "parameters whole."
        )
    return [
        f"optimizer {name}: whether it computes element by element is not known, and under strategy.tensor it sees "
        "slices of parameters: `paddle-dp verify` tells"
    ]


def check_by_parameter(optimizer: Any, **degrees: int) -> list[str]:
    """A sentence about a user-defined optimizer if axes give each rank some of the parameters to update; none for
    Paddle's, which compute parameter by parameter. `degrees`: by axis."""
    split_axes = [axis for axis, degree in degrees.items() if degree > 1]
    if not split_axes or type(optimizer) in _BY_PARAMETER:
        return []
    return [
        f"optimizer {type(optimizer).__name__}: whether an update of a parameter looks at other parameters is not "
        f"known, and under strategy.{split_axes[0]} each rank updates some of them: `paddle-dp verify` tells"
    ]
