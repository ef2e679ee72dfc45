"""The timeline of ranks without stages: what a film keeps, the picture, the trace; and on two ranks, all of it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from paddle import nn

from paddle_dp.callbacks._exchange_timeline import ExchangeTimeline, TimelineRow, draw, trace
from paddle_dp.exchange.paddle_reducer import ReducerBuckets
from paddle_dp.launch.recipe_rank import work
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.heartbeat import ExchangeTrace, Heartbeat, heartbeat
from paddle_dp.train import Refusal
from tests.ranks import run_ranks

ROWS = [
    TimelineRow(0, "work", "forward", 0.0, 0.01),
    TimelineRow(0, "work", "backward", 0.01, 0.03),
    TimelineRow(0, "given", "gradient 1", 0.02, 0.021),
    TimelineRow(0, "wait", "exchange", 0.03, 0.04),
    TimelineRow(1, "work", "backward", 0.0, 0.04),
    TimelineRow(1, "link", "", 0.02, 0.03),
]


def test_a_film_keeps_what_was_when_and_what_was_handed_over() -> None:
    beat, film = Heartbeat(), ExchangeTrace()
    beat.begin_tape(film)
    beat.enter("backward")
    began = time.monotonic()
    film.hand_over("gradient 3", began)
    with beat.waiting("others", ("all 0", 1, False)):
        time.sleep(0.01)
    beat.enter("update")
    beat.end_tape()
    phases = [phase for phase, start, stop in film.spans if stop > start]
    assert phases == ["start", "backward", "backward", "update"]
    # Without the wait, and by one reading of the clock: a busy machine shifts no span.
    assert all(a[2] <= b[1] for a, b in zip(film.spans, film.spans[1:], strict=False))
    assert [(what, start) for what, start, _ in film.handovers] == [("gradient 3", began)]
    assert film.waits[0][4] - film.waits[0][3] >= 0.01


def test_a_trace_has_a_process_for_each_rank_and_a_lane_for_each_kind() -> None:
    events = trace(ROWS, Degrees(data=2))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    served = trace(ROWS, Degrees(data=1, servers=1))["traceEvents"]
    assert {e["args"]["name"] for e in served if e["name"] == "process_name"} == {"server 0", "worker 0"}
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices[1:4] == [
        (0, 1, "backward", 10000.0, 20000.0),
        (0, 2, "gradient 1", 20000.0, 1000.0),
        (0, 1, "waits for others", 30000.0, 10000.0),
    ]
    assert slices[-1] == (1, 3, "message", 20000.0, 10000.0)


def test_the_picture_grows_with_the_ranks() -> None:
    from PIL import Image

    one, two = (
        Image.open(io.BytesIO(draw(rows, "mlp, step 3", Degrees(data=2)))) for rows in (ROWS[:4], ROWS)
    )
    assert two.height > 1.3 * one.height and two.width == one.width
    shown = two.convert("RGB")
    colours = {shown.getpixel((x, y)) for x in range(300, two.width, 40) for y in range(0, two.height, 8)}
    assert {(0xE0, 0x8A, 0x3C), (0x9C, 0xC5, 0xEB)} <= colours  # backward, forward


def record(path: str, overrides: list[str]) -> None:
    """What a rank of `paddle-dp train` does."""
    work("train", Path(path), overrides, {})


def test_the_buckets_of_paddle_s_reducer_are_handed_over_when_the_last_gradient_is_there() -> None:
    """Of two layers' weights and biases (0 to 3) in three buckets, of which the first holds what comes last: the others
    wait for it. In a backward that does not exchange nothing is told."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    model.group_indices, model.grad_need_sync = [[1, 2], [3], [0]], False
    settled: list[int] = []
    buckets, film = ReducerBuckets(model), ExchangeTrace(None, lambda: settled.append(1))
    heartbeat.begin_tape(film)
    try:
        model(paddle.ones([2, 4])).sum().backward()
        assert not film.handovers
        model.grad_need_sync = True
        model(paddle.ones([2, 4])).sum().backward()
    finally:
        heartbeat.end_tape()
    told = [what for what, *_ in film.handovers]
    assert buckets.buckets == [(0,), (3,), (1, 2)]
    assert told in (["bucket 0–2, 0.000244 MB"], ["bucket 0–1, 0.000104 MB", "bucket 2, 0.00014 MB"])
    assert all(start <= stop for _, start, stop in film.handovers)
    assert len(film.computed_at) == len(settled) == 1 and film.computed_at[0] <= film.handovers[-1][2]


@pytest.mark.parametrize(("ended", "reason"), [(24, "were measured for"), (12, "ended before its step 13")])
def test_a_window_without_a_record_says_why(
    ended: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ExchangeTimeline(SimpleNamespace(mesh=SimpleNamespace(is_main=True)), start=12, steps=3)
    at = [SimpleNamespace(progress=SimpleNamespace(step=step)) for step in range(ended + 1)]
    heartbeat.begin_tape(ExchangeTrace(None, lambda: None))
    try:
        callback.start(at[0])
        for moment in at[1:]:
            callback.step(moment)
    finally:
        heartbeat.end_tape()
    callback.end(at[-1])
    assert reason in capsys.readouterr().out


def test_an_update_that_a_rewind_undid_is_not_recorded() -> None:
    """The update, the load of the checkpoint and the next update were one step of it."""
    mesh = SimpleNamespace(device="cpu", sum=lambda numbers: numbers, gather=lambda rows: [rows])
    trainer = SimpleNamespace(learner=SimpleNamespace(exchange=SimpleNamespace(trace=lambda: None)))
    at = [SimpleNamespace(progress=SimpleNamespace(step=step), trainer=trainer) for step in range(5)]
    callback = ExchangeTimeline(SimpleNamespace(mesh=mesh), start=2, steps=9)
    refusal = Refusal(step=3, epoch=0, batch=2, samples=[], why="spike", action="rewind")
    callback.start(at[0])
    try:
        callback.step(at[2])
        assert heartbeat.tape is not None
        callback.refused(at[1], refusal)
        assert heartbeat.tape is None
        for moment in at[2:]:
            callback.step(moment)
    finally:
        heartbeat.end_tape()
    assert [step for step, _ in callback.recorded] == [3, 4]


@pytest.mark.long
@pytest.mark.parametrize(
    ("exchange", "given", "least"),
    [
        ("auto", "gradient", 4),  # weights and biases of its layers
        ("per_parameter", "bucket", 4),
        ("bucketed, comm_buffer_size: 20 KB, last_comm_buffer_size: 4 KB", "bucket", 2),
    ],
    ids=["pushed", "per_parameter", "bucketed"],
)
def test_of_two_ranks_backward_and_what_they_hand_over_are_seen(
    exchange: str, given: str, least: int, tmp_path: Path
) -> None:
    words = [
        f"output_dir={tmp_path}",
        "train.length=48 steps",
        f"strategy={{use: data_parallel, exchange: {exchange}}}",
    ]
    words += ["callbacks=[{use: timeline, start: 40, steps: 3}]"]
    run_ranks(record, 2, "configs/digits_mlp.yaml", words)
    events = [
        e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X"
    ]
    for rank in (0, 1):
        backward = [e for e in events if (e["pid"], e["name"]) == (rank, "backward")]
        handed = [e for e in events if e["pid"] == rank and e["name"].startswith(given)]
        assert backward and len(handed) >= least
        first, last = backward[0]["ts"], max(e["ts"] + e["dur"] for e in backward)
        assert all(first <= e["ts"] <= last for e in handed)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
