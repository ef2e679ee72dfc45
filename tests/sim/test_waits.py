"""How often the host waits for the device in a training, and where: only at steps that a callback reads."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from paddle_dp.train.measurements import AFTER, STEPS
from tests.house.training import build_trainer, settle
from tests.ranks import ROOT, run_ranks
from tests.sim.recipes import GPT

READ = 6  # a callback reads the numbers after every sixth update
# The first epoch has new shapes: of full batches, and of the short one at its end. Stages tell each other of them.
SETTLED = 4
ONE_READ = 2  # Paddle waits twice when a tensor is read, whatever its size

KINDS = ("stream", "device", "event", "copy to the host")  # as in device/waits.h


class Waits:
    """While it is entered, `lines` counts each wait under "file:line function": the innermost of this repository, but
    not of the mesh, which says what others ask it to."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libsim.so"))
        self._listen = library.sim_listen
        self._told = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._hear)
        self._off = ctypes.cast(None, type(self._told))
        self.lines: Counter[str] = Counter()

    def __enter__(self) -> Waits:
        self._listen(self._told)
        return self

    def __exit__(self, *exception: object) -> None:
        self._listen(self._off)

    def _hear(self, kind: int) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_told(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            self.lines[f"{KINDS[kind]}: not from this repository"] += 1
            return
        file = Path(frame.f_code.co_filename).relative_to(ROOT)
        self.lines[f"{KINDS[kind]}: {file}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    @staticmethod
    def _is_told(file: str) -> bool:
        # An environment may stand in the clone.
        ours = file.startswith(str(ROOT)) and "site-packages" not in file
        return ours and not file.startswith(str(ROOT / "paddle_dp" / "mesh"))


def fit(folder: str, overrides: list[str]) -> dict[str, dict[str, int]]:
    """In a rank: trains as a recipe does, and returns the waits between two updates, by step."""
    from paddle_dp.train.callback import Callback, Moment
    from paddle_dp.units import Every

    seen, by_step = Waits(), {}

    class Note(Callback):
        reads = False

        def step(self, moment: Moment) -> None:
            by_step[moment.progress.step] = dict(seen.lines)
            seen.lines.clear()

    class Read(Callback):
        every = Every.parse(f"{READ} steps")

        def step(self, moment: Moment) -> None:
            assert moment.numbers["loss"] > 0

    trainer = build_trainer(GPT, folder, *overrides)
    trainer.add(Note())
    trainer.add(Read())
    with seen:
        trainer.fit()
    settle(trainer)
    return by_step


def waits(folder: Path, *overrides: str) -> list[dict[int, dict[str, int]]]:
    """Of each of two ranks, once the training has settled: the steps, and what was waited for in each."""
    schedule = "schedule={use: cosine, learning_rate: 0.003, warmup: 4 steps}"
    of_ranks = run_ranks(fit, 2, str(folder), [schedule, *overrides])
    return [{int(step): found for step, found in one.items() if int(step) > SETTLED} for one in of_ranks]


def lines(found: dict[str, int]) -> set[str]:
    """What was waited for, and where, without the lines' numbers."""
    return {f"{kind}: {at.partition(':')[0]}" for kind, _, at in (line.partition(": ") for line in found)}


def unmeasured(step: int, found: dict[str, int], last: int = 20) -> dict[str, int]:
    """Without the waits of a step that is measured: between its parts for the device, for no stream or event more."""
    began = min(AFTER, last // 3)
    if step not in range(began + 1, began + STEPS + 2):  # one more: the last is told of after its update
        return found
    return {line: count for line, count in found.items() if not line.startswith("device: ")}


def assert_waits_for_readers_alone(of_ranks: list[dict[int, dict[str, int]]], last: int = 20) -> None:
    for by_step in of_ranks:
        assert list(by_step) == list(range(SETTLED + 1, last + 1))
        for step, found in by_step.items():
            read = step % READ == 0 or step == last
            found = unmeasured(step, found, last)
            assert lines(found) == ({"stream: paddle_dp/core/loss.py"} if read else set()), (step, found)
            assert sum(found.values()) == (ONE_READ if read else 0), (step, found)


@pytest.mark.parametrize(
    "strategy",
    [
        "strategy={use: data_parallel}",
        *(
            pytest.param(strategy, marks=pytest.mark.long)
            for strategy in (
                *(f"strategy={{use: hybrid, sharding: 2, sharding_stage: {stage}}}" for stage in (1, 2, 3)),
                *(f"strategy.{axis}=2" for axis in ("data", "tensor", "sequence", "pipeline")),
                "strategy={use: data_parallel, recompute: full}",
                "strategy={use: hybrid, tensor: 2, sequence_parallel: true}",
                "loss.ignore_index=3",
            )
        ),
    ],
)  # fmt: skip
def test_a_step_that_no_callback_reads_waits_for_nothing(tmp_path: Path, strategy: str) -> None:
    """Loader, forward, backward, exchange, clip, update, schedule, requests to stop; dropout, and short batches."""
    assert_waits_for_readers_alone(waits(tmp_path, strategy))


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "strategy", ["{use: data_parallel}", "{use: hybrid, sharding: 2, sharding_stage: 3}"]
)
def test_nor_does_one_in_bfloat16(
    tmp_path: Path, strategy: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")
    precision = f"train.precision={{dtype: bfloat16, level: {level}}}"
    assert_waits_for_readers_alone(waits(tmp_path, f"strategy={strategy}", precision))


@pytest.mark.long
def test_in_float16_each_update_reads_once_whether_a_gradient_overflowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is an update at all is the host's choice: Paddle's optimizers leave it to no device."""
    monkeypatch.setenv("SIM_NAME", "npu")
    for by_step in waits(tmp_path, "strategy={use: data_parallel}", "train.precision=float16"):
        for step, found in by_step.items():
            if step % READ and step != 20:
                found = unmeasured(step, found)
                assert lines(found) == {"stream: paddle_dp/learner/learner.py"}
                assert sum(found.values()) == ONE_READ


def read() -> dict[str, int]:
    """In a rank: the waits of reading a number once."""
    import paddle

    from paddle_dp.mesh import join

    join()
    x = paddle.ones([3]) * 2
    with Waits() as seen:
        x.tolist()
    return dict(seen.lines)


def test_a_wait_is_told_with_its_line() -> None:
    (found,) = run_ranks(read, 1)
    assert list(found.values()) == [ONE_READ]
    assert lines(found) == {"stream: tests/sim/test_waits.py"}
