from __future__ import annotations

import numpy as np
import pytest

from paddle_dp.checkpoint.pieces import Box, Piece, assemble, whole


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
    takes, missing = assemble(whole((4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (2, 3))])
    assert [number for number, _ in takes] == [0, 1]
    assert missing == [Box((2, 3), (2, 1))]
    assert str(missing[0]) == "[2:4, 3:4]"


def test_assemble_takes_replicated_elements_once():
    takes, missing = assemble(whole((4,)), [Box((0,), (4,)), Box((0,), (4,)), Box((1,), (2,))])
    assert (takes, missing) == ([(0, Box((0,), (4,)))], [])


@pytest.mark.parametrize("seed", range(20))
def test_any_box_comes_back_from_any_boxes_that_cover(seed):
    random = np.random.default_rng(seed)
    shape = tuple(int(n) for n in random.integers(1, 8, random.integers(0, 4)))
    array = random.standard_normal(shape)
    boxes = [_some_box(random, shape) for _ in range(random.integers(0, 12))]
    boxes.append(whole(shape))
    boxes = [boxes[i] for i in random.permutation(len(boxes))]
    pieces = [array[box.inside(whole(shape))] for box in boxes]
    target = _some_box(random, shape)
    result = np.full(target.shape, np.nan)
    takes, missing = assemble(target, boxes)
    for number, part in takes:
        assert np.isnan(result[part.inside(target)]).all(), "an element was taken twice"
        result[part.inside(target)] = pieces[number][part.inside(boxes[number])]
    assert not missing
    np.testing.assert_array_equal(result, array[target.inside(whole(shape))])


def _some_box(random: np.random.Generator, shape: tuple[int, ...]) -> Box:
    start = tuple(int(random.integers(0, n)) for n in shape)
    return Box(start, tuple(int(random.integers(1, n - o + 1)) for n, o in zip(shape, start, strict=True)))


def test_a_piece_knows_its_box_and_dtype():
    piece = Piece("w", (4, 3), (2, 0), np.zeros((2, 3), np.float32))
    assert (piece.box, piece.dtype) == (Box((2, 0), (2, 3)), "float32")
    assert Piece.whole("s", np.float64(1)).shape == ()


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
        Piece("w", shape, offset, array, dtype)
