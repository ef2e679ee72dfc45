"""A probe and a few steps are measured on real ranks. Nothing here depends on a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.doctor.bench import Bench, ChildResult, bench_for
from paddle_dp.doctor.probe import SIZES, check_machine, measured_rates, measured_scaling
from paddle_dp.doctor.prove_rank import processor
from paddle_dp.errors import JobError, UsageError
from paddle_dp.launch.machine import Machine, cores
from tests.plan.test_probe import probe

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "digits_mlp.yaml"


@pytest.mark.long
@pytest.mark.processes
def test_two_ranks_measure_products_kernels_and_collectives(tmp_path: Path) -> None:
    with bench_for(2, "cpu", minutes=5.0) as bench:
        probe = measured_rates(bench, "bfloat16", [(16, 24, 8)])
        steps = measured_scaling(bench, RECIPE, [], batch=64, micro_batches=1)
    assert (probe.kind, probe.dtype, probe.ranks) == ("cpu", "float32", 2)  # CPUs emulate 16 bits
    assert {each.busy for each in (*probe.products, *probe.kernels)} == {1, 2}
    shapes = {(each.m, each.n, each.k, each.transpose) for each in probe.products}
    assert {(16, 24, 8, ""), (8, 24, 16, "x"), (16, 8, 24, "y")} <= shapes
    assert {(each.operation, each.bytes) for each in probe.collectives} == {
        (operation, size)
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for size in SIZES
    }
    for each in (*probe.products, *probe.kernels, *probe.collectives, *steps):
        assert 0 < each.low <= each.seconds <= each.high
    assert [(each.ranks, each.samples) for each in steps] == [(1, 64), (2, 64), (1, 32), (2, 32)]
    probe.write(tmp_path / "probe.json")
    assert json.loads((tmp_path / "probe.json").read_text())["versions"]["paddle"]


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (ChildResult(2, "", "loss.use: there is no part nope", 1.0), "nope"),
        (ChildResult(-15, "", "", 99.0, late=True), "give more --minutes"),
        (ChildResult(0, "", "", 1.0), "status 0"),  # it ended well and wrote nothing
    ],
)
def test_a_job_that_fails_says_why(
    result: ChildResult, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "verb", lambda self, *words, **variables: result)
    with bench_for(2, "cpu", minutes=1.0) as bench, pytest.raises(JobError, match=sentence):
        measured_scaling(bench, RECIPE, (), batch=64, micro_batches=1)


def test_runs_have_whole_micro_batches_and_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def noted(bench: Bench, subject: str, task: str, *arguments: str, advice: str) -> dict[str, Any]:
        assert "train.batch_ramp=null" in arguments  # else the first steps have fewer samples
        requests.append(arguments[1])
        return {"steps": []}

    monkeypatch.setattr(Bench, "measured", noted)

    def runs_of(ranks: int, batch: int, micro_batches: int) -> list[tuple[int, int]]:
        measured_scaling(Bench(ranks, "cpu", Path(), 0.0), RECIPE, (), batch, micro_batches)
        return [tuple(each) for each in json.loads(requests[-1])]

    assert runs_of(2, 64, 1) == [(1, 64), (2, 128), (1, 32), (2, 64)]
    assert runs_of(2, 6, 2) == [(1, 6), (2, 12)]  # 3 samples have no 2 micro-batches
    assert runs_of(2, 7, 1) == [(1, 7), (2, 14)]
    assert runs_of(1, 64, 1) == [(1, 64), (1, 32)]


def test_more_ranks_than_devices_are_not_measured_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    one_card = Machine(cores=8, kind="gpu", devices=("0",))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: one_card))
    with pytest.raises(UsageError, match="1 device can be seen"), bench_for(2, "auto", minutes=1.0):
        pass


def test_a_probe_of_another_machine_is_refused() -> None:
    here = replace(probe(), machine={"processor": processor(), "processors": cores(), "cards": []}, threads=1)
    bench = Bench(2, "cpu", Path(), 0.0, {"OMP_NUM_THREADS": "1"})
    check_machine(here, bench, Path("probe.json"))
    for change, sentence in (
        ({"machine": {**here.machine, "processor": "Z80"}}, "processor Z80, not"), ({"ranks": 4}, "ranks 4, not 2"),
        ({"kind": "gpu"}, "device gpu, not cpu"), ({"threads": 3}, "threads 3, not 1"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=sentence):
            check_machine(replace(here, **change), bench, Path("probe.json"))
