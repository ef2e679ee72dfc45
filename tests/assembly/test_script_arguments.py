"""Which arguments of Trainer.of need one another."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_dp.assembly.script_arguments import built_schedule
from paddle_dp.errors import UsageError
from paddle_dp.part import read_part
from paddle_dp.part.shelf import names
from paddle_dp.recipe.train_schema import Train
from paddle_dp.units import Length

TRAIN = Train(length=Length(1, "epochs"), batch=8)
SETTINGS: dict[str, dict[str, Any]] = {"milestones": {"milestones": ["2 steps"]}}


@pytest.mark.parametrize("name", names("schedules"))
def test_a_schedule_needs_a_length_if_its_rates_depend_on_it(name: str) -> None:
    """Two that are not spread over the training were refused without one."""
    value = {"use": name, "learning_rate": 0.1, **SETTINGS.get(name, {})}
    rate = read_part("schedules", value).config.rate
    short, long = (
        [rate(step, steps=steps, steps_per_epoch=4, batch=8) for step in range(9)] for steps in (9, 90)
    )
    if short == long:
        assert built_schedule(value, 0, 4, TRAIN)() == short[0]
    else:
        with pytest.raises(UsageError, match="spread over the whole training"):
            built_schedule(value, 0, 4, TRAIN)


def test_a_scheduler_of_paddle_needs_none() -> None:
    value = {"use": "paddle.optimizer.lr.StepDecay", "learning_rate": 0.1, "step_size": 3}
    assert built_schedule(value, 0, 4, TRAIN)() == 0.1
