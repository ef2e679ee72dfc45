"""Distributed training for PaddlePaddle that is provably the single-device run, only faster.

The public names are imported when they are first used: importing paddle_dp does not import paddle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paddle_dp.version import __version__

if TYPE_CHECKING:  # for editors and type checkers
    from paddle_dp.assembly.trainer import Trainer as Trainer
    from paddle_dp.data import Batch as Batch
    from paddle_dp.data import Loader as Loader
    from paddle_dp.data import Sampler as Sampler
    from paddle_dp.learner import Learner as Learner
    from paddle_dp.learner import Precision as Precision
    from paddle_dp.mesh import Mesh as Mesh
    from paddle_dp.mesh import join as join
    from paddle_dp.recipe import Recipe as Recipe
    from paddle_dp.recipe import read_recipe as read_recipe
    from paddle_dp.train import Callback as Callback
    from paddle_dp.train import Progress as Progress

_MODULES: dict[str, str] = {
    "join": "paddle_dp.mesh",
    "Mesh": "paddle_dp.mesh",
    "Batch": "paddle_dp.data",
    "Loader": "paddle_dp.data",
    "Sampler": "paddle_dp.data",
    "Learner": "paddle_dp.learner",
    "Precision": "paddle_dp.learner",
    "Progress": "paddle_dp.train",
    "Callback": "paddle_dp.train",
    "Trainer": "paddle_dp.assembly.trainer",
    "Recipe": "paddle_dp.recipe",
    "read_recipe": "paddle_dp.recipe",
}

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paddle_dp' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
