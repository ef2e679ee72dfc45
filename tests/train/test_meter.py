"""Speed in samples, and in tokens where samples are texts; what is not training is left out."""

from __future__ import annotations

import time
from typing import Any

import paddle
import pytest

from paddle_dp.data import Batch, MicroBatch
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.transport import traffic
from paddle_dp.train.meter import Meter, reader_averages, tokens


def batch(inputs: Any) -> Batch:
    return Batch(micro_batches=(MicroBatch(inputs, inputs, len(inputs)),), samples=8, index=0, epoch=0)


@pytest.mark.parametrize(
    ("inputs", "length"),
    [
        (paddle.zeros([2, 128], "int64"), 128),
        (paddle.zeros([2, 128], "int32"), 128),
        (paddle.zeros([2, 128]), 0),  # rows of numbers
        (paddle.zeros([2], "int64"), 0),
        (paddle.zeros([2, 3, 4, 4], "uint8"), 0),  # pictures
        ({"tokens": paddle.zeros([2, 128], "int64"), "positions": paddle.zeros([2, 128], "int64")}, 128),
        ({"image": paddle.zeros([2, 128], "int64")}, 0),
        ((paddle.zeros([2, 128], "int64"), paddle.zeros([2, 1])), 0),
    ],
)
def test_rows_of_whole_numbers_are_texts(inputs: Any, length: int) -> None:
    assert tokens(batch(inputs)) == length


def test_what_is_sent_is_counted_for_a_step_and_not_in_pauses() -> None:
    meter = Meter(Mesh.alone(), sends=True)
    with meter.paused():
        traffic.all_reduced(1e6, 2)
    for _ in range(4):
        traffic.all_reduced(600, 3)
        meter.add(8, 0.0)
    assert meter.read()["sent"] == pytest.approx(800)  # 2(n - 1)/n of 600
    assert meter.read()["sent"] == 0
    assert "sent" not in Meter(Mesh.alone()).read()


def test_tokens_are_the_samples_times_their_length_and_pauses_do_not_count() -> None:
    meter = Meter(Mesh.alone())
    with meter.paused():
        time.sleep(1.0)
    meter.add(8, 0.0)
    meter.add(8, 0.0)
    read = meter.read(batch(paddle.zeros([2, 100], "int64")))
    assert read["tokens_per_second"] == pytest.approx(100 * read["samples_per_second"])
    assert read["samples_per_second"] > 16 / 1.0
    assert "tokens_per_second" not in meter.read()


def test_a_server_shows_what_its_workers_see() -> None:
    rows: list[dict[str, float]] = [
        {"samples_per_second": 9.0, "waiting": 0.0, "memory": 1.0},
        {"samples_per_second": 9.1, "waiting": 0.2, "memory": 7.0, "tokens_per_second": 90.0},
        {"samples_per_second": 9.1, "waiting": 0.4, "memory": 6.0},  # of which this one had no sample
    ]
    found = reader_averages(rows, [1, 2])
    assert found == {
        "samples_per_second": 9.0, "waiting": pytest.approx(0.3), "memory": 7.0, "tokens_per_second": 90.0,
    }  # fmt: skip
    assert "tokens_per_second" not in reader_averages([rows[0], rows[2]], [1])
