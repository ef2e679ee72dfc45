"""The benchmark of collectives: its arithmetic, its table, and one small run."""

from __future__ import annotations

import csv

import pytest

from tests.house.programs import run_python
from tools.benchmark.allreduce import Measured, picture, share, spoken, table, through_a_socket
from tools.tables import write_csv

ROWS = [
    Measured(operation="memory copy", ranks=1, size=1 << 20, seconds=1e-4),
    Measured(operation="socket", ranks=2, size=1 << 20, seconds=4e-4),
    Measured(operation="all_reduce", ranks=4, size=1 << 20, seconds=1e-3),
    Measured(operation="all_gather", ranks=4, size=1 << 20, seconds=1e-3),
]


def test_a_ring_sends_two_shares_of_an_all_reduce_and_one_of_its_halves():
    assert share("all_reduce", 4) == pytest.approx(1.5)
    assert share("all_reduce", 2) == 1.0
    assert share("reduce_scatter", 4) == share("all_gather", 4) == pytest.approx(0.75)
    assert share("broadcast", 4) == 1.0
    row = ROWS[2]
    assert row.algorithm == pytest.approx(1.048576e9)
    assert row.bus == pytest.approx(1.5 * row.algorithm)


def test_the_table_has_each_row_beside_a_socket():
    lines = list(table(ROWS))
    assert len(lines) == 2 + len(ROWS)
    assert lines[4] == "| all_reduce | 4 | 1 MB | 1 ms | 1.049 GB/s | 1.573 GB/s | 1.50 | 0.60 |"
    assert spoken(512) == "512 B" and spoken(8 << 10) == "8 KB"


def test_csv_and_picture(tmp_path):
    write_csv(ROWS, tmp_path / "a.csv", "algorithm", "bus")
    with (tmp_path / "a.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["operation"] for row in rows] == [row.operation for row in ROWS]
    assert float(rows[2]["bus"]) == pytest.approx(ROWS[2].bus)
    pytest.importorskip("matplotlib")
    picture(ROWS, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.processes
def test_a_socket_carries_messages():
    assert 0 < through_a_socket(1 << 20) < 1


@pytest.mark.long
def test_a_small_run_prints_every_operation(tmp_path):
    words = ["--ranks", "2", "--sizes", "1KB,64KB", "--csv", tmp_path / "a.csv"]
    done = run_python("tools/benchmark/allreduce.py", *words, timeout=120)
    assert len(done.stdout.splitlines()) == 2 + 2 * 2 + 2 * 4
