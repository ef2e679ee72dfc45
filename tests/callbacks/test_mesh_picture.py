"""The mesh as a picture: every rank once, in the frames of its coordinates, and nothing outside of the paper."""

from __future__ import annotations

import io

import pytest

from paddle_dp.callbacks.dashboard.mesh_picture import BOX, Frame, _with_servers, draw, frame
from paddle_dp.mesh.degrees import AXES, Degrees

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
    return frame(degrees, [axis for axis in AXES if degrees[axis] > 1], {})


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_every_rank_stands_in_the_frames_of_its_seats(degrees: Degrees) -> None:
    found = ranks(whole(degrees))
    assert len(found) == degrees.ranks
    for rank in range(degrees.ranks):
        coords = degrees.coords(rank)
        assert found[f"rank {rank}"] == tuple(f"{axis} {coords[axis]}" for axis in AXES if degrees[axis] > 1)


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


def test_servers_stand_above_the_ranks_that_compute() -> None:
    degrees = Degrees(data=3, servers=2)
    found = ranks(_with_servers(2, whole(degrees)))
    assert found == {
        "rank 0": ("servers",), "rank 1": ("servers",),
        **{f"rank {2 + n}": (f"data {n}",) for n in range(3)},
    }  # fmt: skip
    assert draw(degrees, "servers").startswith(b"\x89PNG")
