"""The picture of a plan shows what the screen says: a bar for each row, as long as its seconds, its whisker the bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.plan.devices import DEVICES
from paddle_dp.verbs import plan_picture
from paddle_dp.verbs.layout_plan import RecipePlan
from paddle_dp.verbs.plan_picture import draw_plan

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "llama_7b.yaml"
SHRUNK = ("model.depth=6", "train.batch=64", "train.micro_batches=2", "train.length=1000 steps")


def figure_of(monkeypatch: pytest.MonkeyPatch, ranks: list[int], *settings: str) -> tuple[RecipePlan, Any]:
    drawn: list[Any] = []
    monkeypatch.setattr(plan_picture, "png_of", lambda figure: drawn.append(figure) or b"")
    plan = RecipePlan.make(RECIPE, [*SHRUNK, *settings], ranks, DEVICES["a100-80"])
    draw_plan(plan)
    return plan, drawn[0]


def lengths(axes: Any) -> list[float]:
    """The length of each row's stacked bar, from the top."""
    rows: dict[float, float] = {}
    for patch in axes.patches:
        rows[patch.get_y()] = rows.get(patch.get_y(), 0.0) + patch.get_width()
    return [rows[y] for y in sorted(rows)]


def test_bars_are_as_long_as_seconds_and_whiskers_are_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, figure = figure_of(monkeypatch, [8])
    (ranking,) = plan.rankings
    rows = [*ranking.with_chosen(), *ranking.unforetold]
    assert len(rows) > 8 and ranking.unforetold
    assert lengths(figure.axes[0]) == pytest.approx([row.seconds for row in rows])
    spans = [line.get_xdata() for line in figure.axes[0].lines if len({*line.get_ydata()}) == 1]
    assert len(spans) == len(rows)
    for (low, high), row in zip(spans, rows, strict=True):
        assert low == row.low and high == pytest.approx(min(row.high, 10 * row.low))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name.startswith("→") for name in names].count(True) == 1
    chosen = ranking.chosen
    assert chosen is not None and names[rows.index(chosen)].startswith(f"→ {chosen.choice}\n")


def test_several_numbers_of_cards_are_bars_of_card_seconds_and_a_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, figure = figure_of(monkeypatch, [1, 2, 4, 8])
    chosen = [ranking.chosen for ranking in plan.rankings if ranking.chosen]
    assert lengths(figure.axes[0]) == pytest.approx(
        [n * c.seconds for n, c in zip([1, 2, 4, 8], chosen, strict=True)]
    )
    curve = figure.axes[1].lines[0]
    assert [*curve.get_xdata()] == [1, 2, 4, 8]
    assert [*curve.get_ydata()] == pytest.approx([100 * each.peak_share for each in chosen])


def test_a_file_is_written_also_where_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.png"
    with pytest.raises(SystemExit) as end:
        main(["plan", str(RECIPE), "--ranks", "1", "--png", str(file)])
    assert end.value.code == 0
    assert file.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [file]
    assert "21 legal layouts fits" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["", "absent/plan.png"])
def test_a_picture_in_no_folder_is_refused_before_a_recipe_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(
            [
                "plan", str(RECIPE), "--ranks", "8", "--png", str(tmp_path / name), "--write",
                str(tmp_path / "new"),
            ]
        )  # fmt: skip
    assert (
        end.value.code == 2
        and "give the name of a .png file in a folder that exists" in capsys.readouterr().err
    )
    assert not [*tmp_path.iterdir()]
