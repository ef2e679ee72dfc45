"""Which parameters are trained is decided when a model is placed: exchange, norm and checkpoints go by it."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddle_dp.errors import UsageError


class Trainable:
    """Notices a parameter that was frozen or unfrozen since the model was placed on several ranks."""

    def __init__(self, named: Iterable[tuple[str, paddle.Tensor]]):
        self._placed = [(name, parameter, parameter.stop_gradient) for name, parameter in named]

    def check(self, may_freeze: bool) -> None:
        """Raises UsageError for a parameter that is trained now and was not, and, unless `may_freeze`, for one that is
        not and was."""
        for name, parameter, frozen in self._placed:
            if parameter.stop_gradient == frozen or (may_freeze and not frozen):
                continue
            if frozen:
                raise UsageError(
                    f"parameter '{name}' was unfrozen after the model was placed, so its gradient would not be "
                    "all-reduced, and the ranks would drift apart. End the training here, unfreeze it before the model "
                    "is given to Trainer.of, and resume with accept=['frozen']."
                )
            raise UsageError(
                f"parameter '{name}' was frozen after the model was placed, and paddle.DataParallel waits for its "
                "gradient. Set strategy.find_unused_parameters=true, or strategy.use=hybrid."
            )
