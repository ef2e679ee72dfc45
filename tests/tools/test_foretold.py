"""A played step is one that can be followed on paper, with the bytes of the plan; the table says what was measured."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.bound import Compute, WorkOrder, bound
from paddle_dp.plan.exchange import Between, sent
from paddle_dp.plan.layout import Layout, Weight
from paddle_dp.plan.legal import layouts
from paddle_dp.units import Recompute
from tools.benchmark import foretold
from tools.benchmark.forecast import block_shares
from tools.benchmark.foretold import choices, measured
from tools.benchmark.foretold_sites import RECIPES, Choice, Site, read_costs
from tools.benchmark.foretold_table import Row, picture, table, verdict
from tools.benchmark.link_events import Cost, Kind, Link, Play, Transfer
from tools.benchmark.overlap import windows
from tools.benchmark.step_events import STEPS, _Script, step_seconds
from tools.tables import read_csv, write_csv

# Tables, six blocks of two matrices, of which the tensor axis cuts one, and a head.
BLOCKS = [
    [Weight(name="token.weight", size=400, shape=(40, 10), cut=True)],
    *(
        [
            Weight(name=f"a{n}", size=400, shape=(20, 20), cut=True),
            Weight(name=f"b{n}", size=600, shape=(30, 20)),
        ]
        for n in range(6)
    ),
    [Weight(name="out", size=400, shape=(10, 40), cut=True)],
]
BETWEEN = Between(numbers=16 * 8 * 16)
COMPUTE = Compute(forward=2.0, backward=4.0, update=0.5)
FREE = Link(rate=1e12)


def layout(stage: int = 1, recompute: str = "none", virtual_stages: int = 1, **degrees: int) -> Layout:
    return Layout(
        degrees=Degrees(**degrees), sharding_stage=stage, virtual_stages=virtual_stages,
        pipeline_schedule="interleaved" if virtual_stages > 1 else "1f1b", recompute=Recompute.parse(recompute),
    )  # fmt: skip


def seconds(plan: Layout, link: Link = FREE, micro_batches: int = 4, compute: Compute = COMPUTE) -> float:
    return step_seconds(BLOCKS, plan, micro_batches, BETWEEN, compute, link)


EVERY = [
    layout(
        stage=stage,
        **{axis: degrees[axis] for axis in ("data", "sharding", "sequence", "pipeline", "tensor")},
    )
    for degrees in layouts(4)
    for stage in ((1, 2, 3) if degrees.sharding > 1 else (1,))
]


@pytest.mark.parametrize("plan", EVERY, ids=lambda plan: f"{plan.degrees}, stage {plan.sharding_stage}")
def test_every_layout_is_played_with_the_bytes_of_the_plan(plan: Layout) -> None:
    plan = replace(plan, accelerator=plan.degrees.data > 1)
    script = _Script(BLOCKS, plan, 4, BETWEEN, COMPUTE, FREE)
    for rank in script.ranks:
        played = sum(t.flows.get(rank, (0.0, 0.0))[0] for t in script.transfers.values()) / STEPS
        arithmetic = sum(each.bytes for each in sent(BLOCKS, plan, rank, 4, BETWEEN))
        if plan.sharding_stage == 2 and plan.degrees.data * plan.degrees.sequence > 1:
            assert played == pytest.approx(arithmetic, rel=0.01)
        else:
            assert played == pytest.approx(arithmetic)


# With stages or owners of unequal sizes, the bound of a pipeline takes the fullest for all.
ALIKE = [plan for plan in EVERY if plan.degrees.pipeline == 1 or plan.degrees.sharding == 1]


@pytest.mark.parametrize("plan", ALIKE, ids=lambda plan: f"{plan.degrees}, stage {plan.sharding_stage}")
def test_no_step_is_shorter_than_its_bound(plan: Layout) -> None:
    plan = replace(plan, accelerator=True)
    order = WorkOrder(micro_batches=4, stages=plan.degrees.pipeline)
    transfers = [sent(BLOCKS, plan, rank, 4, BETWEEN) for rank in range(4)]
    for rate in (1e3, 1e4, 1e5):
        shortest = max(bound(COMPUTE, each, rate, order) for each in transfers)
        assert seconds(plan, Link(rate=rate)) > 0.99 * shortest


def test_an_owner_lends_its_parameters_after_all_gradients_of_the_step_before() -> None:
    """Without it, ranks fetched for their next step while the owner of the largest weight still received: 12 % too few
    seconds."""
    blocks = [[Weight(name="large", size=16000, shape=(160, 100))], *BLOCKS]
    plan, order = layout(sharding=4, stage=3), WorkOrder(micro_batches=4)
    for rate in (1e3, 1e4, 1e5):
        link = Link(rate=rate)
        shortest = max(bound(COMPUTE, sent(blocks, plan, rank, 4, None), rate, order) for rank in range(4))
        assert step_seconds(blocks, plan, 4, None, COMPUTE, link) > 0.99 * shortest


def test_over_a_free_link_a_step_is_its_compute_and_a_pipelines_bubble() -> None:
    whole = COMPUTE.total
    for plan in (
        layout(data=2),
        layout(sharding=2),
        layout(sharding=2, stage=3),
        layout(tensor=2),
        layout(sequence=2),
    ):
        assert seconds(plan) == pytest.approx(whole, rel=1e-6)
    even = [BLOCKS[1], *BLOCKS[1:7], BLOCKS[1]]  # eight equal blocks
    steps = [
        step_seconds(
            even, layout(pipeline=4, virtual_stages=v), 8, BETWEEN, replace(COMPUTE, update=0.0), FREE
        )
        for v in (1, 2)
    ]
    assert steps == pytest.approx([6 * (1 + 3 / 8), 6 * (1 + 3 / 16)], rel=1e-6)


def test_gradients_travel_beside_backward_and_activations_do_not() -> None:
    size = 4 * 6800.0  # bytes of all gradients; a ring of two ranks sends as many
    slow = Link(rate=size / 20)  # 20 s
    late = seconds(layout(data=2), slow, 1)
    # The head's 1/16 of the products comes first; then the link is busy to the end.
    assert late == pytest.approx(2 + 4 * 400 / 6400 + 20 + 0.5, rel=1e-6)
    assert (
        seconds(layout(data=2), Link(rate=size / 2), 1) < 6.5 + 2 * 0.6
    )  # but for the first layers' all is hidden
    activations = 4 * 16 * 8 * 16 * (4 * 6 + 2)
    assert seconds(layout(tensor=2), Link(rate=activations / 10), 2) == pytest.approx(6.5 + 10, rel=1e-2)


def test_stage_3_moves_the_weights_of_neighbouring_layers_at_once() -> None:
    """Each layer has one owner. One after another, they would use one direction of a link at a time: an MLP's steps on
    the simulated accelerator were foretold 25 % too long."""
    blocks = [[Weight(name=f"{n}.weight", size=1000, shape=(10, 100))] for n in range(8)]
    plan, compute = layout(sharding=2, stage=3), Compute(forward=1e-3, backward=2e-3, update=0.0)
    for accelerator in (False, True):
        at_once = replace(plan, accelerator=accelerator)
        taken = step_seconds(blocks, at_once, 1, None, compute, Link(rate=4e3))
        moved = sum(each.bytes for each in sent(blocks, at_once, 0, 1, None))
        assert taken == pytest.approx(moved / 4e3, rel=1e-3), "as many bytes come as go, at the same time"


def test_a_layer_waits_for_the_chunk_of_its_own_use() -> None:
    """In a pipeline every use fetches: a layer that the next chunk fetches again waited for that one."""
    plan = replace(layout(sharding=2, pipeline=2, stage=3), accelerator=True)
    script = _Script(BLOCKS, plan, 4, BETWEEN, COMPUTE, Link(rate=1e4))
    for program in script.programs:
        waits = [op[1][0][0][2] for op in program if op[0] == "wait" and "fetch" in str(op[1])]
        step = waits[: len(waits) // STEPS]
        assert step == sorted(step) and len({*step}) > 2


def test_recomputed_blocks_run_forward_again() -> None:
    assert seconds(layout(data=2, recompute="full")) == pytest.approx(6.5 + 2 * 6000 / 6400, rel=1e-6)


def test_new_parameters_travel_beside_the_next_forward_on_accelerators_alone() -> None:
    large = [[replace(weight, size=1000 * weight.size) for weight in block] for block in BLOCKS]
    slow = Link(rate=4 * 6.8e6 / 4)
    plans = (replace(layout(sharding=2), accelerator=accelerator) for accelerator in (False, True))
    on_cpu, on_device = (step_seconds(large, plan, 4, BETWEEN, COMPUTE, slow) for plan in plans)
    assert on_device < on_cpu - 0.3


def test_a_pause_lets_a_burst_pass_and_a_message_has_its_latency() -> None:
    def ends(link: Link, sizes: list[float]) -> float:
        transfers = {
            n: Transfer(frozenset([0]), {0: (s, 0.0), 1: (0.0, s)}, "one") for n, s in enumerate(sizes)
        }
        sender = [*(("start", n) for n in transfers), ("mark", 0)]
        receiver = [*(("wait", n) for n in transfers), ("mark", 0)]
        return Play([sender, receiver], transfers, link).marks()[1][0]

    assert ends(Link(rate=10.0), [50.0, 50.0]) == pytest.approx(10.0)
    assert ends(Link(rate=10.0, burst=30.0), [50.0, 50.0]) == pytest.approx(7.0)
    costs: dict[Kind, list[Cost]] = {
        "send": [Cost(start=0.5, byte=0.2)]
    }  # slower than the link of 10 bytes a second
    assert ends(Link(rate=10.0, costs=costs), [50.0, 50.0]) == pytest.approx(21.0)
    assert ends(Link(rate=1.0, costs=costs), [50.0, 50.0]) == pytest.approx(101.0)
    link = Link(rate=1.0, costs={"send": [Cost(pause=1.0, start=2.0), Cost(pause=3.0, start=6.0, byte=1.0)]})
    assert [link.cost("send", pause, 2).start for pause in (0.5, 1.0, 2.0, 3.0, 9.0)] == [
        2.0, 2.0, 4.0, 6.0, 6.0,
    ]  # fmt: skip
    assert link.cost("send", 2.0, 2).byte == 0.5 and link.cost("all_reduce", 2.0, 2) == Cost()


def test_the_cost_of_an_exchange_is_of_as_many_ranks() -> None:
    """Two pairs of 4 ranks paid for exchanges among 4: a step was foretold 64 % too long."""
    costs: dict[Kind, list[Cost]] = {"all_reduce": [Cost(ranks=n, start=float(n)) for n in (2, 4)]}
    assert [Link(rate=1.0, costs=costs).cost("all_reduce", 0.0, n).start for n in (2, 3, 4, 8)] == [
        2,
        4,
        4,
        4,
    ]

    pairs = {
        n: Transfer(frozenset(n), dict.fromkeys(n, (1.0, 1.0)), "pairs", "all_reduce")
        for n in ((0, 1), (2, 3))
    }
    programs = [[("start", n), ("wait", n), ("mark", 0)] for n in pairs for _ in n]
    assert Play(programs, pairs, Link(rate=1e12, costs=costs)).marks() == [[pytest.approx(2.0)]] * 4


def test_each_kind_of_exchange_has_its_cost() -> None:
    """Of 8 blocks, of which 6 have two exchanges forward and backward, the first and the last one, 2 micro-batches."""

    def extra(kind: Kind, plan: Layout) -> float:
        return seconds(plan, replace(FREE, costs={kind: [Cost(start=1.0)]}), 2) - seconds(plan, FREE, 2)

    along = replace(layout(tensor=2), sequence_parallel=True)
    assert extra("all_reduce", layout(tensor=2)) == pytest.approx(2 * (6 * 4 + 2))
    assert extra("all_gather", layout(tensor=2)) == pytest.approx(0, abs=1e-6)
    assert [extra(kind, along) for kind in ("all_gather", "reduce_scatter")] == pytest.approx([52, 52])
    assert extra("all_to_all", layout(sequence=2)) == pytest.approx(2 * 6 * 8)
    # A rank hands over each of 14 gradients: of the last micro-batch, or of each.
    assert extra("push", layout(data=2)) == pytest.approx(14)
    assert [extra("push", layout(sharding=2, stage=stage)) for stage in (1, 2, 3)] == pytest.approx(
        [14, 28, 28]
    )
    assert 14 <= extra("fetch", layout(sharding=2, stage=3)) <= 2 * 14


def test_ranks_that_wait_for_each_other_are_no_step() -> None:
    transfers: dict[Any, Transfer] = {0: Transfer(frozenset([0, 1]), {0: (1.0, 1.0), 1: (1.0, 1.0)}, "one")}
    with pytest.raises(ValueError, match="wait for each other for ever"):
        Play([[("start", 0), ("wait", 0)], [("wait", 0)]], transfers, FREE).marks()


def test_tables_and_biases_have_no_products() -> None:
    assert block_shares(BLOCKS) == pytest.approx([0, *[1000 / 6400] * 6, 400 / 6400])
    assert block_shares([[Weight(name="a", size=3)]] * 2) == [0.5, 0.5]


# The table ------------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> Row:
    same = {
        "place": "device", "model": "gpt", "layout": "data 2", "ranks": 2, "link": "8 MB/s", "foretold": 1.0,
        "bound": 0.9, "measured": 1.05, "low": 1.0, "high": 1.1, "rounds": 3, "load": 0.0,
    }  # fmt: skip
    return Row(**{**same, **changes})


def test_every_layout_of_the_gpt_and_those_of_the_mlp_whose_bytes_are_counted() -> None:
    names = {
        model: [each.name for each in choices(RECIPES["device"][model], model, 2)] for model in ("gpt", "mlp")
    }
    stages = [f"sharding 2, stage {n}" for n in (1, 2, 3)]
    assert sorted(names["mlp"]) == sorted(["data 2", *stages])
    tensor = ["tensor 2", "tensor 2, sequence_parallel"]
    pipeline = ["pipeline 2", "pipeline 2, 2 stages a rank"]
    assert sorted(names["gpt"]) == sorted(["data 2", *stages, *tensor, *pipeline, "sequence 2"])


def test_a_threshold_is_of_long_steps_and_a_busy_machine_says_nothing() -> None:
    short, wrong = row(measured=0.05, foretold=0.1), row(foretold=1.2)
    assert verdict([row(), short]) == (
        [
            "device, 2 ranks: 2 steps, 1 of them of 100 ms or more: 4.8 % off in the mean, 4.8 % in the median, 4.8 % "
            "at most; 1 within 7 %. Beside them 0.0 processes wanted a processor"
        ],
        0,
    )
    assert verdict([row(), wrong])[1] == 1
    lines, status = verdict([row(), replace(wrong, load=9.0)])
    assert status == 3 and lines[-1] == "The machine was busy: no verdict."
    assert verdict([replace(wrong, place="namespaces"), replace(wrong, load=9.0)])[1] == 1
    assert verdict([replace(wrong, place="namespaces", foretold=1.15)])[1] == 0  # 9.5 %: at most 10 there
    cells = table([row()]).splitlines()[-1]
    assert cells == "| device | gpt | data 2 | 2 | 8 MB/s | 1000 | 1050 | 1000 … 1100 | -5 % | 900 |"


def test_rows_survive_their_file_and_are_drawn(tmp_path: Path) -> None:
    rows = [row(), row(place="namespaces", ranks=4)]
    write_csv(rows, tmp_path / "rows.csv")
    assert read_csv(Row, tmp_path / "rows.csv") == rows
    picture(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_go_through_all_layouts_and_a_failed_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    class Here(Site):
        name = "device"

        def steps(self, choice: Choice) -> list[float]:
            order.append(choice.name)
            if choice.name == "b":
                raise RuntimeError("it broke")
            return [float(len(order))]

        def rows(self, choice: Choice, times: Any, loads: Any) -> Any:
            yield choice.name, [*times]

    three = [Choice(model="gpt", ranks=2, name=name, words=()) for name in "abc"]
    failed: list[str] = []
    rows: list[Any] = [*measured(Here([]), three, 2, failed)]
    assert "".join(order) == "abcabc" and "gpt, b failed: it broke" in capsys.readouterr().err
    assert rows == [("a", [[1.0], [4.0]]), ("c", [[3.0], [6.0]])] and failed == ["device, gpt, b"] * 2


def test_a_place_that_is_not_here_is_skipped_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foretold, "why_not", lambda: "run it as root on Linux.")
    monkeypatch.setattr(foretold, "end_on_sigterm", lambda: None)
    monkeypatch.setattr("sys.argv", ["foretold.py", "--on", "namespaces", "--nodes", "2", "--models", "mlp"])
    assert foretold.main() == 2
    said = capsys.readouterr().err
    assert "namespaces, 2 ranks: skipped: run it as root on Linux." in said and "nothing was measured" in said


def test_the_first_line_of_a_jobs_metrics_does_not_count(tmp_path: Path) -> None:
    lines = [
        {"event": "start"},
        *({"event": "step", "step": n, "seconds_per_step": n / 4} for n in (4, 8, 12)),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [*windows(tmp_path / "metrics.jsonl")] == [2.0, 3.0]


def test_stage_2_waits_for_its_oldest_buckets_and_sends_the_rest_after_each_backward() -> None:
    """Without it, a slow link's buckets of one micro-batch travelled during the next: 15 % too few seconds."""
    plan = replace(layout(sharding=2, stage=2), accelerator=True)
    script = _Script(BLOCKS, plan, 2, BETWEEN, COMPUTE, Link(rate=1e3))
    step = itertools.takewhile(lambda op: op[0] != "mark", script.programs[0])
    ops = [(kind, key) for kind, key in step if kind in ("start", "wait") and "bucket" in key[0]]
    first_wait = next(i for i, (kind, _) in enumerate(ops) if kind == "wait")
    last_start = max(i for i, (kind, _) in enumerate(ops) if kind == "start")
    assert first_wait < last_start, "no bucket is waited for before the end of the step"


@pytest.mark.long
def test_each_kind_of_exchange_is_measured_between_two_ranks(tmp_path: Path) -> None:
    command = ["launch", "--ranks", "2", "--out", f"{tmp_path}/logs", "-m", "tools.benchmark.exchange_costs"]
    subprocess.run(
        [sys.executable, "-m", "paddle_dp", *command, f"{tmp_path}/costs.json", "cpu"],
        check=True,
        timeout=100,
    )
    costs = read_costs(tmp_path / "costs.json")
    assert {*costs} == {*get_args(Kind)}
    each = [cost for costs_of_kind in costs.values() for cost in costs_of_kind]
    handled = [
        *costs.pop("push"),
        *costs.pop("fetch"),
    ]  # differences of two times: other work may leave nothing
    exchanged = [cost for costs_of_kind in costs.values() for cost in costs_of_kind]
    assert len(handled) == 2 and all(0 <= cost.start < 0.1 for cost in handled)
    assert all(0 < cost.start < 0.1 for cost in exchanged) and sum(cost.byte for cost in each) > 0
