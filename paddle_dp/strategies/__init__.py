"""The shelf of strategies: one a file or folder, its file name the word after `strategy: {use: …}`.

A strategy places a model on the mesh and returns a learner; `learner` computes the updates. Nothing in the package
imports this folder: `part` finds its files by name. A strategy in a user's package is derived from `StrategyConfig`.
"""

from paddle_dp.strategies._base import StrategyConfig

__all__ = ["StrategyConfig"]
