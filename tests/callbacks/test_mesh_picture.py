"""The mesh as a picture: every rank once, in the frames of its coordinates, and nothing outside of the paper;
samples as pictures: any layout, any range, and what is no picture."""

from __future__ import annotations

import io

import numpy as np
import pytest

from paddle_dp.callbacks._pictures import picture
from paddle_dp.callbacks.dashboard.mesh_picture import BOX, Frame, _with_idle, draw, frame
from paddle_dp.mesh.degrees import Degrees

MESHES = [
    Degrees(),
    Degrees(data=2),
    Degrees(pipeline=4),
    Degrees(data=2, pipeline=2, tensor=2),
    Degrees(data=32),
    Degrees(data=2, pipeline=2, sharding=2, sequence=2, tensor=2),
]


def ranks(this: Frame, coords: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Each rank's text with the names of the frames around it."""
    if not this.content:
        return {this.text: coords}
    inner = (*coords, this.text) if this.text else coords
    return {text: names for _, _, part in this.content for text, names in ranks(part, inner).items()}


def whole(degrees: Degrees) -> Frame:
    return frame(degrees, degrees.split_axes, {})


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_every_rank_stands_in_the_frames_of_its_seats(degrees: Degrees) -> None:
    found = ranks(whole(degrees))
    assert len(found) == degrees.ranks
    for rank in range(degrees.ranks):
        coords = degrees.coords(rank)
        assert found[f"rank {rank}"] == tuple(f"{axis} {coords[axis]}" for axis in degrees.split_axes)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_what_is_inside_is_inside_and_nothing_overlaps(degrees: Degrees) -> None:
    def look(this: Frame) -> None:
        corners = [(x, y, x + part.width, y + part.height) for x, y, part in this.content]
        for n, (x, y, right, low) in enumerate(corners):
            assert x >= 0 and y >= 0 and right <= this.width + 1e-9 and low <= this.height + 1e-9
            for a, b, c, d in corners[:n]:
                assert c <= x or right <= a or d <= y or low <= b
        for _, _, part in this.content:
            look(part)

    look(whole(degrees))


def test_it_is_a_picture_that_a_screen_holds() -> None:
    from PIL import Image

    for degrees in (Degrees(), Degrees(data=2, pipeline=4, tensor=8)):
        picture = Image.open(io.BytesIO(draw(degrees, f"{degrees.ranks} ranks: {degrees}")))
        assert 500 < picture.width <= 1800 and 100 < picture.height <= 1600
        assert len(picture.convert("RGB").getcolors(maxcolors=10**7)) > 20
    assert BOX[0] > BOX[1]


@pytest.mark.parametrize("words", [3, 30])
def test_a_long_title_is_not_cut(words: int) -> None:
    """The figure of two ranks is narrow."""
    from PIL import Image

    drawn = np.asarray(
        Image.open(io.BytesIO(draw(Degrees(data=2), words * "name of a long run "))).convert("L")
    )
    assert (drawn[:40] < 128).any() and (drawn[:, -4:] == 255).all()


def test_servers_stand_above_the_ranks_that_compute() -> None:
    degrees = Degrees(data=3, servers=2)
    found = ranks(_with_idle(degrees, whole(degrees)))
    assert found == {
        "rank 0": ("servers",), "rank 1": ("servers",),
        **{f"rank {2 + n}": (f"data {n}",) for n in range(3)},
    }  # fmt: skip
    assert draw(degrees, "servers").startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(80, 90), (1, 80, 90), (3, 80, 90), (4, 80, 90), (80, 90, 1), (80, 90, 3)])
def test_every_layout_is_shown_upright(shape: tuple[int, ...]) -> None:
    sample = np.zeros(shape, "float32")
    sample[(0, 5) if shape[0] == 80 else (slice(None), 0, 5)] = 1.0
    shown = picture(sample)
    assert shown is not None and shown.shape == (80, 90, 3) and shown.dtype == np.uint8
    assert shown[0, 5].tolist() == [255, 255, 255] and shown[5, 0].tolist() == [0, 0, 0]


def test_normalized_numbers_fill_the_range() -> None:
    shown = picture(np.linspace(-2, 2, 64 * 64).reshape(64, 64))
    assert shown is not None and shown.min() == 0 and shown.max() == 255


def test_small_ones_are_enlarged_by_whole_pixels() -> None:
    shown = picture(np.eye(8))
    assert shown is not None and shown.shape == (64, 64, 3)
    assert (shown[:8, :8] == 255).all() and (shown[:8, 8:16] == 0).all()


def test_one_grey_is_black_and_nan_is_no_trouble() -> None:
    flat = picture(np.full((64, 64), 7.0))
    assert flat is not None and not flat.any()
    holes = np.ones((64, 64))
    holes[0, 0] = np.nan
    assert picture(holes) is not None


NO_PICTURES = [np.zeros(64), np.zeros((7, 8, 9)), np.zeros((0, 8)), "text", 3, np.zeros((2, 2), "U1")]


@pytest.mark.parametrize("sample", NO_PICTURES)
def test_what_is_no_picture_is_none(sample: object) -> None:
    assert picture(sample) is None
