"""A Config's sizes as config.json."""

from __future__ import annotations

from types import SimpleNamespace

from paddle_dp.recipe.hf_config import written


def test_nested_groups_are_written_as_they_were_read() -> None:
    """ "rope.scaling" was one key of the file."""
    table = {"architecture": "Deep", "sizes": {"rope.scaling.factor": "factor", "rope.theta": "theta"}}
    config = SimpleNamespace(hugging_face=table, factor=2, theta=3)
    assert written(config)["rope"] == {"scaling": {"factor": 2}, "theta": 3}
