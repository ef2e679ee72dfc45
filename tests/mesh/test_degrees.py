"""Coordinates and groups are those of fleet, by arithmetic."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import paddle_dp.report
from paddle_dp.figures import COLOURS
from paddle_dp.mesh.degrees import (
    AXES,
    GRADIENT_AXES,
    MODEL_AXES,
    RANK_FACTS,
    REPLICA_AXES,
    SAMPLE_AXES,
    Degrees,
)
from paddle_dp.strategies.hybrid import Config

EIGHT = Degrees(data=2, pipeline=2, tensor=2)


def test_ranks_are_the_product():
    assert EIGHT.ranks == 8
    assert Degrees().ranks == 1
    assert (EIGHT.dp_size, Degrees(data=2, sharding=3).dp_size) == (2, 6)


def test_neighbours_in_rank_are_neighbours_on_the_tensor_axis():
    assert EIGHT.group(0, "tensor") == [0, 1]
    assert EIGHT.group(5, "pipeline") == [5, 7]
    assert EIGHT.group(5, "data") == [1, 5]


def test_a_group_along_several_axes_is_where_no_other_coordinate_differs():
    assert EIGHT.group(5, "data", "tensor") == [0, 1, 4, 5]
    assert EIGHT.groups("data", "tensor") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert Degrees(data=2, servers=2).groups("data") == [(0,), (1,), (2, 3)]


def test_fleets_own_topology_agrees():
    topology = pytest.importorskip("paddle.distributed.fleet").base.topology.CommunicateTopology
    names = ["data", "pipe", "sharding", "sep", "model"]
    degrees = Degrees(data=2, pipeline=3, sharding=2, sequence=1, tensor=2)
    theirs = topology(names, [degrees[axis] for axis in AXES])
    for rank in range(degrees.ranks):
        assert list(theirs.get_coord(rank)) == list(degrees.coords(rank).values())


def test_rank_is_the_inverse_of_coords():
    for degrees in (EIGHT, Degrees(data=3, sharding=2, sequence=2)):
        assert [degrees.rank(degrees.coords(rank)) for rank in range(degrees.ranks)] == list(
            range(degrees.ranks)
        )


def test_ranks_of_a_tensor_or_pipeline_group_read_the_same():
    for rank in range(8):
        for axis in ("tensor", "pipeline"):
            assert {EIGHT.dp_rank(peer) for peer in EIGHT.group(rank, axis)} == {EIGHT.dp_rank(rank)}
        assert len({EIGHT.dp_rank(peer) for peer in EIGHT.group(rank, "data")}) == 2


def test_each_axis_reads_other_samples_or_works_on_the_same_ones():
    assert SAMPLE_AXES == ("data", "sharding")
    assert MODEL_AXES == ("pipeline", "sequence", "tensor")
    assert REPLICA_AXES == ("data", "sequence")
    assert GRADIENT_AXES == ("data", "sharding", "sequence")


def test_an_axis_has_a_degree_and_a_setting() -> None:
    assert {field.name for field in fields(Degrees)} == {*AXES, "servers"}
    assert {*AXES} < {field.name for field in fields(Config)}


def test_an_axis_has_a_colour_of_its_own_the_same_in_pictures_and_pages() -> None:
    colours = [facts.colour for facts in RANK_FACTS.values()]
    assert len({*colours}) == len(colours) and max(colours) < len(COLOURS)
    style = (Path(paddle_dp.report.__path__[0]) / "page.css").read_text()
    assert tuple(re.findall(r"--c\d: (#\w+);", style)[: len(COLOURS)]) == COLOURS


def test_it_prints_what_it_splits():
    assert EIGHT.split_axes == ("data", "pipeline", "tensor")
    assert str(EIGHT) == "data 2 × pipeline 2 × tensor 2"
    assert str(Degrees()) == "one process"
    assert (EIGHT.readers, Degrees(data=3).readers) == ("2 groups of ranks", "3 ranks")


def test_a_degree_is_one_or_more():
    with pytest.raises(ValueError, match="tensor: 0 is less than 1"):
        Degrees(tensor=0)
