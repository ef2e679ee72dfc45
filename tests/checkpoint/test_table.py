from __future__ import annotations

import numpy as np
import pytest

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.pieces import Piece
from paddle_dp.checkpoint.table import check_whole, read_table, table_of
from paddle_dp.errors import CheckpointError


def _tables(folder, *ranks):
    for rank, pieces in enumerate(ranks):
        (folder / f"rank-{rank:05d}.json").write_bytes(
            json_codec.encode({"pieces": table_of(pieces)[1], "own": {}})
        )
    return [read_table(folder, rank) for rank in range(len(ranks))]


def _rows(first, last, shape=(6, 2), dtype=np.float32):
    return Piece("w", shape, (first, 0), np.zeros((last - first, *shape[1:]), dtype))


def test_a_whole_tensor_keeps_its_name_as_key_and_a_piece_says_its_offset():
    keyed, _ = table_of([_rows(0, 6), Piece("v", (4,), (2,), np.zeros(2))])
    assert set(keyed) == {"w", "v@2"}


def test_one_rank_may_own_several_pieces_of_one_tensor(tmp_path):
    (names,) = check_whole(_tables(tmp_path, [_rows(0, 2), _rows(2, 6)])).values()
    assert [row.key for row in names] == ["w@0,0", "w@2,0"]


def test_the_same_piece_twice_on_one_rank_is_refused():
    with pytest.raises(CheckpointError, match=r"two pieces of w \[0:2, 0:2\]"):
        table_of([_rows(0, 2), _rows(0, 2)])


def test_replicated_and_overlapping_pieces_are_legal(tmp_path):
    assert len(check_whole(_tables(tmp_path, [_rows(0, 6)], [_rows(0, 6)], [_rows(1, 3)]))["w"]) == 3


def test_a_part_that_no_rank_holds_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no rank holds w\[2:3, 0:2\] of \(6, 2\)"):
        check_whole(_tables(tmp_path, [_rows(0, 2)], [_rows(3, 6)]))


@pytest.mark.parametrize("other", [_rows(3, 6, dtype=np.float64), _rows(3, 7, shape=(7, 2))])
def test_ranks_that_disagree_about_a_tensor_are_named(tmp_path, other):
    with pytest.raises(CheckpointError, match=r"w is float32 \(6, 2\) on rank 0, .* on rank 1"):
        check_whole(_tables(tmp_path, [_rows(0, 3)], [other]))


@pytest.mark.parametrize(
    "change", [{"offset": [0]}, {"offset": [-1, 0]}, {"dtype": "object"}, {"shape": None}, {"size": ["x", 1]}]
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, change):
    row = {"name": "w", "dtype": "float32", "shape": [6, 2], "offset": [0, 0], "size": [6, 2], **change}
    (tmp_path / "rank-00000.json").write_bytes(json_codec.encode({"pieces": {"w": row}, "own": {}}))
    with pytest.raises((ValueError, TypeError)):
        read_table(tmp_path, 0)
