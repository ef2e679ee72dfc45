"""The table of faults itself: what it prints, how a page is rewritten, and that a difference of one bit is told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from paddle_dp.checkpoint import Checks, Snapshot, TensorShard, save
from paddle_dp.mesh import Mesh
from tests.faults.lost import Lost, different
from tests.faults.table import Row, lines_of, rows_of, write

PAGE = """# A page

| fault | phase | noticed after | first cause named | orphans | data lost |
|---|---|---|---|---|---|
| old | data | 1.0 s | yes | 0 | 0 |
| again | data | 9.0 s | NO | 3 | – |

The end.
"""


def test_rows_get_the_orphans_of_their_test():
    row = Row(fault="again", seconds=2.04, named=True, phase="data", lost="0, from step 4")
    call = SimpleNamespace(nodeid="test", user_properties=[("fault", row.state())])
    end = SimpleNamespace(nodeid="test", user_properties=[("fault", row.state()), ("orphans", 2)])
    assert lines_of(rows_of([call, end]))[2:] == ["| again | data | 2.0 s | yes | 2 | 0, from step 4 |"]
    assert lines_of(rows_of([call]))[2].split(" | ")[4] == "?"
    assert "| 1.0 s | – |" in str(Row(fault="nobody is left", seconds=1, named=None))


def test_a_page_keeps_the_rows_that_were_not_measured_now(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    write([Row(fault="again", seconds=2, named=True), Row(fault="new", seconds=3, named=True)], page)
    lines = page.read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[4:7]] == ["| old", "| again", "| new"]
    assert lines[5] == "| again | – | 2.0 s | yes | ? | – |" and lines[-1] == "The end."


def test_one_bit_is_a_loss(tmp_path):
    folders = []
    for number, value in enumerate((1.0, np.nextafter(np.float32(1), np.float32(2)))):
        weight = np.array([value, 2], "float32")
        state = {"progress": {"step": 4}}
        tensors = {
            "model/w": TensorShard.full("model/w", weight),
            "model/b": TensorShard.full("model/b", weight[1:]),
        }
        checks = Checks(agreed=True, finite=True, step=4)
        snapshot = Snapshot(tensors=tensors, state=state, checks=checks)
        folders.append(save(snapshot, tmp_path / str(number), Mesh()))
    assert (different(folders[0], folders[0]), different(*folders)) == (0, 1)
    assert str(Lost(damaged=0, tensors=1, step=4)) == "1 tensors differ"
