"""Records of a VisualDL log: cut at a step without moving a byte, half records, an unwritable home."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.callbacks.dashboard import visualdl as records
from paddle_dp.callbacks.dashboard.visualdl import cut, framed, makers
from tests.house.programs import run_python


def log(*steps: int, tag: str = "train/loss") -> bytes:
    return b"".join(
        framed(makers().scalar(tag, float(s), s, 1700000000000).SerializeToString()) for s in steps
    )


def points(content: bytes) -> list[int]:
    return [value.id for _, value in records._read(content) if value.HasField("value")]


def test_what_came_later_is_gone_and_no_byte_has_moved() -> None:
    whole = log(10, 20, 300, 40_000)
    content, latest = cut(whole, 20)
    assert points(content) == [10, 20] and latest == {"train/loss": 20}
    assert len(content) == len(whole) and content.startswith(log(10, 20))
    assert points(content + log(30)) == [10, 20, 30]


def test_cutting_twice_is_cutting_once() -> None:
    content, _ = cut(log(1, 2, 3), 2)
    assert cut(content, 2)[0] == content


def test_the_row_in_the_table_of_runs_goes() -> None:
    row = framed(makers().hparam("name", {"lr": 0.1}, ["train/loss"], 0).SerializeToString())
    content, _ = cut(row + log(1), 5)
    assert points(content) == [1] and b"lr" not in content


@pytest.mark.parametrize("lost", [1, 7, 30])
def test_half_a_record_at_the_end_is_left_out(lost: int) -> None:
    assert points(cut(log(1, 2, 3)[:-lost], 9)[0]) == [1, 2]


def test_what_is_no_log_is_an_empty_log() -> None:
    assert cut(b"", 3) == (b"", {})
    assert cut(b"\x05\0\0\0\0\0\0\0hello and more", 3) == (b"", {})


@pytest.mark.parametrize(
    "size", [7, 8, 9, 10, *range(134, 142), 16_391, 16_392, 16_393, 16_394, 16_395, 70_000]
)
def test_a_blank_has_any_size_and_shows_nothing(size: int) -> None:
    blank = records._blank(size)
    assert len(blank) == size
    assert makers().Record.FromString(blank).values[0].WhichOneof("one_value") == "meta_data"


def test_a_home_that_cannot_be_written_is_not_needed(tmp_path: Path) -> None:
    code = "from paddle_dp.callbacks.dashboard.visualdl import makers; import os; makers().Record; "
    code += "print(os.environ['HOME'])"
    nowhere = "/proc/no-home"
    done = run_python("-W", "ignore", "-c", code, env={"HOME": nowhere}, timeout=60)
    assert done.stdout.strip().endswith(nowhere)


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-3, 1e39, -1e39, float("inf"), float("nan")])
@pytest.mark.parametrize("step", [0, 1, 127, 128, 300_000])
def test_a_point_has_the_bytes_that_protobuf_gives(value: float, step: int) -> None:
    tags = ("train/loss", "speed/waiting_for_data", "größe" * 40)
    wanted = [makers().scalar(tag, value, step, 1_700_000_000_123).SerializeToString() for tag in tags]
    assert list(records.points([(tag, value) for tag in tags], step, 1_700_000_000_123)) == wanted
