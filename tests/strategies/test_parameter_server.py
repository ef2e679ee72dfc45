"""A parameter server in step against one process: servers and workers, bits, what each holds, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.data import Sampler
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.part import read_part
from paddle_dp.plan.layout import Weight, rank_memories
from paddle_dp.plan.memory import Widths
from paddle_dp.strategies.parameter_server import ServerLayout
from paddle_dp.strategies.parameter_server.served import ServedPlacement
from tests.parity import QUICK, assert_same, assert_same_weights, train, train_each, truth
from tests.ranks import run_ranks

TWO_AND_TWO = Degrees(data=2, servers=2)


def strategy(servers: int, **more: Any) -> str:
    words = "".join(f", {key}: {value}" for key, value in more.items())
    return f"{{use: parameter_server, servers: {servers}{words}}}"


def test_servers_are_the_first_ranks_and_read_nothing() -> None:
    degrees = Degrees(data=3, servers=2)
    assert degrees.ranks == 5 and degrees.dp_size == 3
    assert [degrees.dp_rank(rank) for rank in range(5)] == [-1, -1, 0, 1, 2]
    assert [degrees.reads(rank) for rank in range(5)] == [False, False, True, True, True]
    assert Mesh(ranks=5, degrees=degrees).hub == 0 and Mesh(ranks=3, degrees=Degrees(data=3)).hub is None
    assert [degrees.coords(rank)["server"] for rank in range(5)] == [0, 1, -1, -1, -1]
    assert [degrees.rank(degrees.coords(rank)) for rank in range(5)] == list(range(5))
    assert [degrees.role(rank) for rank in (1, 2)] == ["server 1", "worker 0"]
    assert str(degrees) == "2 servers, 3 workers" and degrees.readers == "3 workers"
    assert [*degrees.facts] == ["data", "servers"]
    assert Degrees(**degrees.as_dict()) == degrees and "servers" not in Degrees(data=2).as_dict()


def test_a_server_has_a_batch_without_micro_batches() -> None:
    sampler = Sampler(30, 8, dp_rank=-1, dp_size=2, micro_batches=2)
    assert sampler.batches == 4 and sampler.cuts(8) == sampler.reads(0, 0) == []
    assert sampler.samples_of_rank(-1, 2) == 0


@pytest.mark.parametrize("server", [None, 0, 1])
def test_one_rank_counts_and_workers_have_copies(server: int | None) -> None:
    placement, at = ServedPlacement(server=server), [TWO_AND_TWO.coords(rank) for rank in range(4)]
    assert [placement.is_main_replica(each) for each in at] == [rank == (server or 0) for rank in range(4)]
    if server is not None:
        assert [placement.is_updated_at(each) for each in at] == [rank == server for rank in range(4)]
        assert [placement.is_stored_at(each) for each in at] == [rank in (server, 2, 3) for rank in range(4)]


def test_parts_are_balanced_by_size_and_add_up() -> None:
    sizes = [400, 300, 300, 200, 100]
    blocks = [
        [Weight(name=f"w{n}", size=size) for n, size in enumerate(sizes)],
        [Weight(name="f", size=7, frozen=True)],
    ]
    layout = ServerLayout(degrees=TWO_AND_TWO, widths=Widths.for_states(2))
    assert layout.served(blocks) == [600, 700] and sum(layout.served(blocks)) == sum(sizes)
    first, second, worker = rank_memories(blocks, layout)
    assert [m.state.optimizer for m in (first, second, worker)] == [8 * 600, 8 * 700, 0]
    assert [m.parameters for m in (first, second, worker)] == [607, 707, 1307]


def test_ranks_without_a_worker_are_refused() -> None:
    config = read_part("strategies", {"use": "parameter_server", "servers": 2}).config
    with pytest.raises(UsageError, match=r"strategy.servers=2 leaves no worker on 2 ranks.*--ranks 3"):
        config._check_workers(2)
    config._check_workers(3)


@pytest.mark.parametrize(
    ("servers", "workers", "how"),
    [
        (1, 2, QUICK),
        *(pytest.param(s, w, {}, marks=pytest.mark.long) for s, w in ((1, 1), (1, 3), (2, 1), (2, 2))),
    ],
)
def test_it_learns_what_one_process_learns(
    tmp_path: Path, servers: int, workers: int, how: dict[str, Any]
) -> None:
    """Unequal shares, two micro-batches, AdamW, its decay, a clip by the norm over all servers."""
    many = run_ranks(train, servers + workers, str(tmp_path), strategy(servers), **how)
    assert_same(many, truth(**how))
    assert [found["memory"]["optimizer"] > 0 for found in many] == [True] * servers + [False] * workers
    assert sum(found["memory"]["parameters"] for found in many[:servers]) == many[-1]["memory"]["parameters"]


@pytest.mark.long
def test_two_runs_have_the_same_bits_and_so_has_one_that_was_resumed(tmp_path: Path) -> None:
    once, again = zip(*run_ranks(train_each, 4, str(tmp_path), [strategy(2)] * 2), strict=True)
    run_ranks(train, 4, str(tmp_path / "cut"), strategy(2), "4 steps")
    resumed = run_ranks(train, 4, str(tmp_path / "cut"), strategy(2), resume=True)
    assert once[0]["rows"] == again[0]["rows"] and once[0]["rows"][4:] == resumed[0]["rows"]
    for other in (again, resumed):
        assert_same_weights(other[0]["saved"], once[0]["saved"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "{use: single}"), (4, strategy(2))),
        ((3, strategy(1)), (4, strategy(2))),
        ((3, strategy(2)), (2, "{use: data_parallel}")),
        ((4, strategy(2)), (2, "{use: hybrid, sharding: 2, sharding_stage: 3}")),
        ((2, "{use: hybrid, tensor: 2}"), (3, strategy(1))),
    ],
)
def test_a_checkpoint_resumes_in_any_other_layout(tmp_path: Path, before: Any, after: Any) -> None:
    run_ranks(train, before[0], str(tmp_path), before[1], "4 steps")
    resumed = run_ranks(train, after[0], str(tmp_path), after[1], resume=True)
    one = truth()
    assert_same(resumed, {**one, "rows": one["rows"][4:]})


@pytest.mark.long
def test_averages_and_products_in_16_bits_are_those_of_one_process(tmp_path: Path) -> None:
    more: tuple[str, ...] = ("ema={decay: 0.9}",)
    assert_same(
        run_ranks(train, 3, str(tmp_path / "ema"), strategy(1), "4 steps", more=more),
        truth("4 steps", more=more),
    )
    more = ("train.precision={dtype: bfloat16, level: O2}",)
    many = run_ranks(train, 3, str(tmp_path / "low"), strategy(1), "4 steps", more=more)
    np.testing.assert_allclose(many[0]["rows"], truth("4 steps", more=more)["rows"], rtol=1e-2)
