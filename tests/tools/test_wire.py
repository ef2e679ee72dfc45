"""The cluster in a box: what it counts is what plan says, nothing is left of it, and its table tells what it read."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.units import LinkSpeed
from tests.house.programs import run_program, run_python
from tools.benchmark.compute import quick
from tools.benchmark.namespaces import Cluster, new_events
from tools.benchmark.wire import Bench
from tools.benchmark.wire_table import Row, bytes_table, picture, table
from tools.tables import read_csv, write_csv

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"),
    reason="nodes are network namespaces, which takes root and iproute2",
)
FAST, SLOW = (
    Row(
        layout="data 2", nodes=2, link=link, ms=ms, bound_ms=bound, exposed_ms=2 * ms, mb=25.3,
        formula_mb=25.26,
    )
    for link, ms, bound in (("20 Gbit/s", 90.0, 60.0), ("1 Gbit/s", 330.0, 220.0))
)  # fmt: skip


def test_a_line_of_the_table_has_every_link_and_its_bound() -> None:
    alone = Row(layout="the wire alone", nodes=2, link="1 Gbit/s", ms=202.4, mb=25.26, formula_mb=25.26)
    lines = table([FAST, SLOW, alone]).splitlines()
    assert lines[2] == "| data 2 | 2 | 90 | 60 | 1.50 | 330 | 220 | 1.50 |"
    assert lines[3] == "| the wire alone | 2 |  |  |  | 202 |  |  |"
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    counted = bytes_table([FAST, SLOW, alone]).splitlines()
    assert counted[2:] == [
        "| data 2 | 2 | 25.30 | 25.26 | 1.002 |",
        "| the wire alone | 2 | 25.26 | 25.26 | 1.000 |",
    ]


def test_rows_survive_their_file(tmp_path: Path) -> None:
    write_csv([FAST, replace(SLOW, bound_ms=None)], tmp_path / "rows.csv")
    first, second = read_csv(Row, tmp_path / "rows.csv")
    assert first == FAST and second.bound_ms is None and second.ratio is None


def test_the_picture_has_a_panel_for_each_link(tmp_path: Path) -> None:
    picture([FAST, SLOW], tmp_path / "wire.png")
    assert (tmp_path / "wire.png").read_bytes().startswith(b"\x89PNG")


def test_the_quickest_quarter_is_not_the_slow_rest() -> None:
    assert quick([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 99.0, 50.0]) == 3.0


@pytest.mark.parametrize(("links", "steps"), [(1, 36), (2, 18), (3, 12), (5, 12)])
def test_a_job_with_servers_is_long_enough_to_count_its_bytes(tmp_path: Path, links: int, steps: int) -> None:
    """A server's line comes while its values travel: over 8 steps their rate was 8 % too low."""
    bench = Bench(Cluster("none", 2), tmp_path, [LinkSpeed.parse("1 Gbit/s")] * links, 12)
    assert bench.steps_with(["strategy={use: parameter_server, servers: 1}"]) == steps
    assert bench.steps_with(["strategy={use: data_parallel}"]) == 12


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() == 0, reason="this user is root")
def test_without_root_one_sentence_says_so() -> None:
    done = run_python("tools/benchmark/wire.py", status=2)
    assert done.stderr.count("\n") == 1 and "root" in done.stderr


@pytest.mark.long
@needs_root
@pytest.mark.timeout(600)
def test_bytes_at_the_interface_are_the_formulas_and_nothing_is_left(tmp_path: Path) -> None:
    words = ["--links", "20 Gbit/s", "--steps", "8", "--only", "data_parallel", "tensor 2", "pipeline 2"]
    run_python("tools/benchmark/wire.py", *words, "--csv", tmp_path / "rows.csv", timeout=540)
    rows = read_csv(Row, tmp_path / "rows.csv")
    assert {row.link for row in rows} == {str(LinkSpeed.parse("20 Gbit/s"))} and len(rows) == 6
    assert [row.layout for row in rows if not 0.99 < row.mb / row.formula_mb < 1.05] == []
    left = run_program("ip", "netns", "list").stdout
    assert not [line for line in left.splitlines() if line.startswith("paddle-dp-")]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    step = '{"event": "step", "step": %d, "seconds_per_step": 0.5}\n'
    with metrics.open("w") as out, metrics.open() as file:
        out.write(step % 1 + (step % 2)[:20])
        out.flush()
        assert [event["step"] for event in new_events(file)] == [1]
        out.write((step % 2)[20:])
        out.flush()
        assert [event["step"] for event in new_events(file)] == [2]
