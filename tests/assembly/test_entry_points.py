"""The files that a command's ranks leave: whole, or as they were."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from paddle_dp.assembly.entry_points import report
from paddle_dp.train.evaluation import Evaluation


def test_an_evaluation_replaces_its_file_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Evaluation(numbers={"loss": 0.5}, samples=8)
    report(result, tmp_path, 7, tmp_path, 1)
    before = (tmp_path / "evaluation.json").read_text()
    assert '"loss": 0.5' in before
    write_text = Path.write_text

    def full_disk(path: Path, text: str) -> None:
        write_text(path, text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report(result, tmp_path, 7, tmp_path, 1)
    assert (tmp_path / "evaluation.json").read_text() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "evaluation.json"]


def test_an_evaluation_of_averaged_weights_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen and the file had the numbers of the average as if they were the model's."""
    for ema, label in ((False, "step-7: loss 0.5"), (True, "step-7, averaged weights (ema): loss 0.5")):
        report(Evaluation(numbers={"loss": 0.5}, samples=8), tmp_path / "step-7", 7, tmp_path, 1, ema)
        assert label in capsys.readouterr().out
        content = json.loads((tmp_path / "evaluation.json").read_text())
        assert content["step"] == 7 and content.get("weights") == ("ema" if ema else None)
