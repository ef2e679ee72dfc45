from __future__ import annotations

import numpy as np
import pytest

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.shards import (
    Box,
    TensorShard,
    assemble,
    check_complete,
    full_box,
    index_of,
    read_index,
)
from paddle_dp.errors import CheckpointError


def test_overlap_is_what_both_hold():
    assert Box((0, 0), (4, 4)).overlap(Box((2, 3), (5, 5))) == Box((2, 3), (2, 1))
    assert Box((0, 0), (4, 4)).overlap(Box((4, 0), (1, 4))) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())


def test_without_leaves_the_rest_once():
    outer, hole = Box((0, 0, 0), (4, 5, 6)), Box((1, 1, 1), (2, 3, 4))
    count = np.zeros(outer.shape, int)
    for box in [*outer.without(hole), hole]:
        count[box.inside(outer)] += 1
    assert (count == 1).all()


def test_without_a_box_elsewhere_is_all_of_it():
    assert Box((0,), (3,)).without(Box((3,), (3,))) == [Box((0,), (3,))]
    assert Box((0,), (0,)).without(Box((0,), (1,))) == []


def test_assemble_says_what_no_box_holds():
    takes, missing = assemble(full_box((4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (2, 3))])
    assert [number for number, _ in takes] == [0, 1]
    assert missing == [Box((2, 3), (2, 1))]
    assert str(missing[0]) == "[2:4, 3:4]"


def test_assemble_takes_replicated_elements_once():
    takes, missing = assemble(full_box((4,)), [Box((0,), (4,)), Box((0,), (4,)), Box((1,), (2,))])
    assert (takes, missing) == ([(0, Box((0,), (4,)))], [])


@pytest.mark.parametrize("seed", range(20))
def test_any_box_comes_back_from_any_boxes_that_cover(seed):
    random = np.random.default_rng(seed)
    shape = tuple(int(n) for n in random.integers(1, 8, random.integers(0, 4)))
    array = random.standard_normal(shape)
    boxes = [_some_box(random, shape) for _ in range(random.integers(0, 12))]
    boxes.append(full_box(shape))
    boxes = [boxes[i] for i in random.permutation(len(boxes))]
    shards = [array[box.inside(full_box(shape))] for box in boxes]
    target = _some_box(random, shape)
    result = np.full(target.shape, np.nan)
    takes, missing = assemble(target, boxes)
    for number, part in takes:
        assert np.isnan(result[part.inside(target)]).all(), "an element was taken twice"
        result[part.inside(target)] = shards[number][part.inside(boxes[number])]
    assert not missing
    np.testing.assert_array_equal(result, array[target.inside(full_box(shape))])


def _some_box(random: np.random.Generator, shape: tuple[int, ...]) -> Box:
    start = tuple(int(random.integers(0, n)) for n in shape)
    return Box(start, tuple(int(random.integers(1, n - o + 1)) for n, o in zip(shape, start, strict=True)))


def test_a_piece_knows_its_box_and_dtype():
    shard = TensorShard("w", (4, 3), (2, 0), np.zeros((2, 3), np.float32))
    assert (shard.box, shard.dtype) == (Box((2, 0), (2, 3)), "float32")
    assert TensorShard.full("s", np.float64(1)).global_shape == ()


@pytest.mark.parametrize(
    ("shape", "offset", "array", "dtype", "words"),
    [
        ((4,), (3,), np.zeros(2), "", "outside the whole tensor"),
        ((4,), (-1,), np.zeros(2), "", "outside the whole tensor"),
        ((4,), (0, 0), np.zeros(2), "", "offset"),
        ((4,), (0,), np.zeros(4, "f4"), "bfloat16", "cannot be saved as bfloat16"),
        ((1,), (0,), np.array(["x"]), "", "cannot be saved"),
        ((1,), (0,), np.array([None]), "", "cannot be saved"),
    ],
)
def test_an_impossible_piece_is_refused(shape, offset, array, dtype, words):
    with pytest.raises(ValueError, match=words):
        TensorShard("w", shape, offset, array, dtype)


def _indexes(folder, *ranks):
    for rank, shards in enumerate(ranks):
        pieces = {key: {**row, "sum": "0"} for key, row in index_of(shards)[1].items()}
        (folder / f"rank-{rank:05d}.json").write_bytes(json_codec.encode({"pieces": pieces, "own": {}}))
    return [read_index(folder, rank) for rank in range(len(ranks))]


def _rows(first, last, shape=(6, 2), dtype=np.float32):
    return TensorShard("w", shape, (first, 0), np.zeros((last - first, *shape[1:]), dtype))


def test_a_whole_tensor_keeps_its_name_as_key_and_a_piece_says_its_offset():
    keyed, _ = index_of([_rows(0, 6), TensorShard("v", (4,), (2,), np.zeros(2))])
    assert set(keyed) == {"w", "v@2"}


def test_one_rank_may_own_several_pieces_of_one_tensor(tmp_path):
    (names,) = check_complete(_indexes(tmp_path, [_rows(0, 2), _rows(2, 6)])).values()
    assert [row.key for row in names] == ["w@0,0", "w@2,0"]


def test_replicated_and_overlapping_pieces_are_legal(tmp_path):
    assert len(check_complete(_indexes(tmp_path, [_rows(0, 6)], [_rows(0, 6)], [_rows(1, 3)]))["w"]) == 3


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[(0, 2), (0, 2)]], r"two shards of w \[0:2, 0:2\]"),
        ([[(0, 2)], [(3, 6)]], r"no rank holds w\[2:3, 0:2\] of \(6, 2\)"),
        ([[(0, 3)], [(3, 6, (6, 2), np.float64)]], r"w is float32 \(6, 2\) on rank 0, .* on rank 1"),
        ([[(0, 3)], [(3, 7, (7, 2))]], r"w is float32 \(6, 2\) on rank 0, .* on rank 1"),
    ],
)
def test_pieces_that_make_no_whole_are_named(tmp_path, ranks, said):
    with pytest.raises(CheckpointError, match=said):
        check_complete(_indexes(tmp_path, *([_rows(*rows) for rows in pieces] for pieces in ranks)))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": [0]},
        {"offset": [-1, 0]},
        {"dtype": "object"},
        {"shape": None},
        {"size": ["x", 1]},
        {"sum": "x"},
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, change):
    row = {
        "name": "w",
        "dtype": "float32",
        "shape": [6, 2],
        "offset": [0, 0],
        "size": [6, 2],
        "sum": "0",
        **change,
    }
    (tmp_path / "rank-00000.json").write_bytes(json_codec.encode({"pieces": {"w": row}, "own": {}}))
    with pytest.raises((ValueError, TypeError)):
        read_index(tmp_path, 0)
