"""A parameter server whose workers do not wait for one another: its clocks, its updates, what it refuses."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from paddle_dp.strategies.parameter_server import ParameterServer
from paddle_dp.strategies.parameter_server.async_server import MESSAGE, AsyncServer, StalenessTracker
from tests.parity import ADAMW, RECIPE, train
from tests.ranks import run_ranks

ASYNC = "{use: parameter_server, servers: 1, mode: async, staleness: 4}"


def test_a_worker_runs_ahead_of_the_slowest_by_the_staleness_and_then_waits() -> None:
    clocks = StalenessTracker(staleness=2)
    assert clocks.want(1, 0) == [1]  # and computes for long
    for batch in (0, 1, 2):
        assert clocks.want(2, batch) == [2] and clocks.leave(2) == []
    assert clocks.want(2, 3) == [] and clocks.waits == 1
    assert clocks.leave(1) == [2]  # the slow one has pushed
    assert clocks.want(1, 3) == [1]


def test_nobody_waits_for_a_worker_that_is_gone_nor_for_one_that_computes_nothing() -> None:
    clocks = StalenessTracker(staleness=1)
    assert clocks.want(1, 0) == [1]
    assert clocks.want(2, 5) == [] and clocks.want(3, 2) == []
    assert sorted(clocks.gone(1)) == [2, 3]
    clocks.leave(2)
    assert clocks.leave(3) == [] and clocks.want(2, 50) == [2]


def test_the_slowest_never_waits() -> None:
    clocks = StalenessTracker(staleness=1)
    assert clocks.want(1, 9) == [1] and clocks.want(2, 10) == [2] and clocks.want(3, 0) == [3]


def test_unequal_shares_in_any_order_make_as_many_updates_as_global_batches() -> None:
    shares = [17 / 50, 17 / 50, 16 / 50] * 40
    random.Random(0).shuffle(shares)
    made: list[int] = []
    server: Any = SimpleNamespace(
        _began={}, _batch_fraction=0.0, oldest=0, updates=0, _make_update=lambda: made.append(1)
    )
    for part in shares:
        AsyncServer._add(server, 1, bytearray(MESSAGE.size), part, 0)
    assert len(made) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ema={decay: 0.9}"], "ema averages weights"),
        (["guard={non_finite: skip}"], "guard.non_finite lets all ranks judge"),
        (["train.precision=float16"], "float16"),
        (["callbacks=[{use: checkpoint, async: true}]"], "a checkpoint that is written in the background"),
    ],
)
def test_what_lets_workers_wait_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(strategy=ASYNC, model="gpt", optimizer=ADAMW, dropout="exact"))
    recipe = read_recipe(path, words)
    with pytest.raises(UsageError, match=said):
        recipe.strategy.refuse(recipe, 3, "cpu")


def test_batch_norm_over_all_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="lets workers wait for one another"):
        read_part("strategies", {"use": "parameter_server", "mode": "async", "sync_batch_norm": True})


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "servers"), [(3, 1), (4, 2)])
def test_it_makes_one_update_of_each_global_batch_whosever_shares_they_are(
    tmp_path: Path, ranks: int, servers: int
) -> None:
    strategy = f"{{use: parameter_server, servers: {servers}, mode: async}}"
    reports = run_ranks(trained, ranks, str(tmp_path), strategy)
    for report in reports[:servers]:
        assert report["updates"] == 10 and report["oldest"] <= 5
    assert reports[0]["counted"] == 10 and all(0 < report["counted"] <= 10 for report in reports)
    resumed = run_ranks(train, ranks, str(tmp_path), strategy, "12 steps", resume=True)
    assert len(resumed[0]["rows"]) == 2


def trained(folder: str, strategy: str) -> dict[str, Any]:
    """What a server has done of 10 steps."""
    servers: list[AsyncServer] = []
    begin = AsyncServer.__init__

    def noted(server: AsyncServer, *arguments: Any) -> None:
        begin(server, *arguments)
        servers.append(server)

    AsyncServer.__init__ = noted  # type: ignore[method-assign]
    counted = len(train(folder, strategy)["rows"])
    return {"counted": counted} | {name: getattr(s, name) for s in servers for name in ("updates", "oldest")}


def test_a_loss_over_the_samples_of_all_workers_is_refused_in_a_script_too() -> None:
    """Of which no recipe says what its loss is: workers waited for one another's samples, of other shares."""
    config = read_part("strategies", {"use": "parameter_server", "mode": "async"}).config
    task = SimpleNamespace(loss=SimpleNamespace(compares="ranks"))
    with pytest.raises(UsageError, match=r"set loss\.across=rank"):
        ParameterServer(config, SimpleNamespace(dp_size=2)).place(task)  # type: ignore[arg-type]
