"""What the matrix's second run of a layout is held to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.proof import Side
from paddle_dp.proof.trace_files import key_of
from tests.proof.sheets import write_sheet
from tools.verify_matrix import first_change, main


def side(folder: Path, gradient: float = 0.5, loss: float = 1.0, second_rank: float = 0.5) -> Side:
    """A side of two ranks, in the recipe's own precision."""
    for rank, value in enumerate((gradient, second_rank)):
        shard = {key_of("gradient", 1, "w"): TensorShard.full("w", np.array([value, float("nan")]))}
        write_sheet(folder, "own", rank, shard, {"rows": [{"loss": loss}]})
    told = {"failed": None, "rounds_to": None, "differences": [], "axes": {}, "memory": 0, "parameters": 1}
    (folder / "side.json").write_text(json.dumps(told))
    return Side(folder, 2)


def test_a_second_run_has_the_same_bits_or_the_first_other_one_is_named(tmp_path: Path) -> None:
    first = side(tmp_path / "a")
    assert first_change(first, side(tmp_path / "b")) == ""
    assert first_change(first, side(tmp_path / "c", 0.5 + 2**-53)) == "gradient|1|w (own, rank 0)"
    assert first_change(first, side(tmp_path / "d", second_rank=-0.5)) == "gradient|1|w (own, rank 1)"
    assert first_change(first, side(tmp_path / "e", loss=1.5)).startswith("losses or gradient norms (own")


def test_it_knows_the_layouts_of_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["verify_matrix.py", "--ranks", "2", "--only", "tensor 3"])
    with pytest.raises(SystemExit):
        main()
    assert re.search(
        r"no layout 'tensor 3'; there are: data 2; pipeline 2; .*tensor 2; ", capsys.readouterr().err
    )
