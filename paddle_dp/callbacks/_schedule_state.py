"""The state of a user's schedule, which a checkpoint must be able to hold."""

from __future__ import annotations

from paddle_dp.checkpoint import json_codec
from paddle_dp.errors import UsageError
from paddle_dp.train import Moment


def refuse_unsaved(moment: Moment) -> None:
    """Raises UsageError for a schedule whose state is not plain JSON: the first checkpoint would end the training."""
    schedule = moment.trainer.learner.rate.schedule
    try:
        json_codec.encode(None if schedule is None else schedule.state_dict(), "schedule")
    except TypeError as error:
        raise UsageError(
            f"{error}. Let its state_dict() have numbers, strings, lists, and dicts with strings as keys."
        ) from None
