"""Quantities are read from their text, print as it, and refuse what has no unit."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, ValidationError

from paddle_dp.units import (
    Bytes,
    Compress,
    Count,
    Duration,
    Every,
    Fraction,
    Length,
    LinkSpeed,
    Positive,
    Probability,
    Recompute,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Length, "3 epochs", Length(3, "epochs")),
        (Length, "1 epoch", Length(1, "epochs")),
        (Length, "0.5 epochs", Length(0.5, "epochs")),
        (Length, "1_000steps", Length(1000, "steps")),
        (Length, " 2e3 steps ", Length(2000, "steps")),
        (Every, "50 steps", Every(50, "steps")),
        (Bytes, "25 MB", Bytes(25 * 2**20)),
        (Bytes, "1.5 KB", Bytes(1536)),
        (Duration, "250 ms", Duration(0.25)),
        (Duration, "2 min", Duration(120)),
    ],
)
def test_a_quantity_is_read_from_its_text(kind: type, text: str, value: object) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        (Length, 3, "'3' has no unit: write a quantity like '3 epochs' (units: epoch, epochs, step, steps)"),
        (Length, "3 parsecs", "is not a quantity like '3 epochs'"),
        (Length, "-3 steps", "is not a quantity"),
        (Length, True, "'True' is not a quantity"),
        (Length, None, "is not a quantity"),
        (Length, "1.5 steps", "a number of steps is whole"),
        (Length, "1e999 steps", "too large"),
        (Bytes, "1e308 TB", "too large"),
        (LinkSpeed, "1e308 Gbit/s", "too large"),
        (Every, "x", "like '50 steps'"),
        (Every, "0 steps", "1 or more"),
        (Every, "0.5 epochs", "whole number"),
        (Bytes, "25 mb", "units: B, KB, MB, GB, TB"),
        (Duration, "2 days", "like '120 s'"),
    ],
)
def test_what_is_no_quantity_is_told_with_an_example(kind: type, text: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(").replace(")", r"\)")):
        kind.parse(text)


@pytest.mark.parametrize(
    "text", ["3 epochs", "1 epoch", "1 step", "0 steps", "123456789 steps", "0.3333333333333333 epochs"]
)
def test_a_length_prints_as_exactly_its_text(text: str) -> None:
    assert str(Length.parse(text)) == text


@pytest.mark.parametrize("count", [0, 1, 1000, 1024, 1234567, 25 * 2**20, 3 * 2**39, 2**40 + 1])
def test_bytes_print_exactly(count: int) -> None:
    assert Bytes.parse(str(Bytes(count))).count == count


def test_bytes_print_in_the_unit_a_person_would_choose() -> None:
    assert [str(Bytes(n)) for n in (512, 1536, 25 * 2**20, 2**30)] == ["512 B", "1.5 KB", "25 MB", "1 GB"]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 120.0, 1234567.8, 1e-7])
def test_a_duration_prints_exactly(seconds: float) -> None:
    assert Duration.parse(str(Duration(seconds))).seconds == seconds


def test_a_length_in_steps() -> None:
    assert Length.parse("3 epochs").steps(10) == 30
    assert Length.parse("0.25 epochs").steps(10) == 2
    assert Length.parse("7 steps").steps(10) == 7


def test_due() -> None:
    assert [step for step in range(1, 10) if Every.parse("3 steps").due_at_step(step)] == [3, 6, 9]
    assert [epoch for epoch in range(1, 7) if Every.parse("2 epochs").due_at_epoch(epoch)] == [2, 4, 6]
    assert not Every.parse("3 steps").due_at_epoch(3)
    assert not Every.parse("1 epoch").due_at_step(1)


def test_megabytes() -> None:
    assert Bytes.parse("512 KB").megabytes == 0.5


def test_recompute_is_a_word_or_every_so_many_blocks() -> None:
    for text in ("none", "full", "selective", "every 2 blocks"):
        assert str(Recompute.parse(text)) == text
    assert Recompute.parse("every 1 block") == Recompute.parse("full") == Recompute(1)
    for wrong in ("every 0 blocks", "every 2 steps", "some", 2):
        with pytest.raises(ValueError, match="is not one of none, full, selective, 'every 2 blocks'"):
            Recompute.parse(wrong)


class Model(BaseModel):
    length: Length = Length(1, "epochs")
    every: Every | None = None
    batch: Positive = 1
    workers: Count = 0
    momentum: Probability = 0.9
    share: Fraction = 1.0


def test_a_quantity_validates_itself_in_pydantic() -> None:
    model = Model(length="2 steps", every=Every(5, "steps"))
    assert model.length == Length(2, "steps")
    assert Model.model_validate_json(model.model_dump_json()) == model
    assert model.model_dump(mode="json")["every"] == "5 steps"


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"workers": -1}, {"momentum": 1.0}, {"share": 0.0}, {"length": 3}, {"every": "often"}],
)
def test_bounds_hold_in_pydantic(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Model(**wrong)


def test_an_editor_is_told_an_example() -> None:
    assert Model.model_json_schema()["properties"]["length"]["examples"] == ["3 epochs"]


def test_a_links_speed_is_counted_as_networks_do() -> None:
    assert LinkSpeed.parse("10 Gbit/s").bytes_per_second == 1.25e9
    assert (
        str(LinkSpeed.parse("25 GB/s")) == "200 Gbit/s" and str(LinkSpeed.parse("300 Mbit/s")) == "300 Mbit/s"
    )
    for text in ("10 Gbit", "0 Gbit/s", "10 gbps"):
        with pytest.raises(ValueError, match="10 Gbit/s"):
            LinkSpeed.parse(text)


@pytest.mark.parametrize(
    ("text", "found", "shown"),
    [
        ("none", Compress(), "none"),
        ("float16", Compress("float16"), "float16"),
        ("power_sgd", Compress("power_sgd", 4, 10), "power_sgd rank 4"),
        ("power_sgd rank 2 after 0 steps", Compress("power_sgd", 2, 0), "power_sgd rank 2 after 0 steps"),
        ("power_sgd after 100 steps", Compress("power_sgd", 4, 100), "power_sgd rank 4 after 100 steps"),
    ],
)
def test_compression_reads_back_as_it_is_shown(text, found, shown):
    assert Compress.parse(text) == Compress.parse(shown) == found and str(found) == shown
    assert re.fullmatch(Compress.pattern(), text) and re.fullmatch(Compress.pattern(), shown)
    for wrong in ("float16 after 3 steps", "power_sgd rank 0", "power_sgd after ten steps"):
        with pytest.raises(ValueError, match="is not one of"):
            Compress.parse(wrong)
