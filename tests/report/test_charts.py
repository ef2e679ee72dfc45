"""Charts: points where the numbers are, few of them, round ticks, and text that cannot become markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from paddle_dp.report.charts import HEIGHT, LEFT, WIDTH, Curve, line_chart, short_number, thinned, ticks


def svg(chart: str) -> ET.Element:
    return ET.fromstring(re.search(r"<svg.*</svg>", chart, re.S)[0])  # type: ignore[index]


def positions(chart: str) -> list[tuple[float, float]]:
    line = svg(chart).find("polyline")
    assert line is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_points_are_where_their_numbers_are() -> None:
    first, middle, last = positions(
        line_chart("loss", [Curve(label="loss", points=[(0, 1), (50, 2), (100, 3)])])
    )
    assert (
        first[0] == LEFT
        and last[0] == WIDTH - 12
        and middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.1)
    )
    assert first[1] > middle[1] > last[1] and middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.1)


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    curve = thinned(Curve(label="loss", points=[(x, 9.0 if x == 77_777 else 1.0) for x in range(100_000)]))
    assert len(curve.points) == 240 and max(high for _, high in curve.bounds) == 9.0
    assert max(y for _, y in curve.points) < 1.1
    assert len(line_chart("loss", [curve])) < 15_000


@pytest.mark.parametrize(
    "points",
    [[(0, 0)], [(1, 5.0), (1, 5.0)], [(0, 1e-300), (1, 1e300)], [(0, -9e299), (1, 9e299)], [(0, 1e15), (1, 1e15 + 1)],
     [(5, -3.0), (6, 0.0)]],
)  # fmt: skip
def test_any_finite_numbers_stay_in_the_picture(points: list[tuple[float, float]]) -> None:
    for element in svg(line_chart("x", [Curve(label="x", points=points, dots=True)])).iter("circle"):
        assert 0 <= float(element.attrib["cx"]) <= WIDTH and 0 <= float(element.attrib["cy"]) <= HEIGHT


def test_numbers_of_many_sizes_get_a_logarithmic_axis() -> None:
    points = [(0.0, 1000.0), (1.0, 1.0), (2.0, 0.001)]
    chart = line_chart("norm", [Curve(label="norm", points=points)])
    (_, high), (_, middle), (_, low) = positions(chart)
    assert "(logarithmic)" in chart and middle == pytest.approx((low + high) / 2, abs=0.2)
    assert "(logarithmic)" not in line_chart("lr", [Curve(label="lr", points=points)], may_be_log=False)


def test_ticks_are_round() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.93, 1.0) == pytest.approx([0.94, 0.96, 0.98, 1.0])
    assert [short_number(n) for n in (0.25, 1200, 12_000, 3_400_000, 0.00001)] == [
        "0.25", "1200", "12k", "3.4M", "1e-05",
    ]  # fmt: skip


def test_labels_are_escaped_and_a_chart_without_points_is_none() -> None:
    chart = line_chart("<b>", [Curve(label='"><script>', points=[(0, 1)])], marks=[(0, "<i>")])
    assert "<script" not in chart and "<b>" not in chart and "<i>" not in chart
    assert line_chart("x", [Curve(label="x", points=[])]) == ""
