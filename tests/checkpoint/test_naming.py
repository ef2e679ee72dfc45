from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.checkpoint import UnusableError, checkpoints, step_name, step_of
from paddle_dp.errors import CheckpointError


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_name_says_its_step(step):
    assert step_of(Path("runs") / step_name(step)) == step


@pytest.mark.parametrize("name", ["step-1", "step-0000000x", "best", ".step-00000001.partial-1-ab"])
def test_another_name_is_refused(name):
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        step_of(Path(name))


def test_only_checkpoints_are_listed_oldest_first(tmp_path):
    there = ["step-00000009", "step-00000010", "step-99999999", "step-100000000"]
    for name in (*there[::-1], ".step-00000011.partial-1-ab", "notes", "step-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000012").write_text("a file")
    assert [p.name for p in checkpoints(tmp_path)] == there
    assert checkpoints(tmp_path / "absent") == []


def test_the_message_names_the_next_older_one(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / step_name(step)).mkdir()
    error = UnusableError(tmp_path / step_name(3), "so")
    assert str(error).endswith(f"so. Use the next older one: {tmp_path / step_name(2)}")
    assert "no older one" in str(UnusableError(tmp_path / step_name(1), "so"))
    assert str(UnusableError(tmp_path, "so")).endswith("Give another one.")
