"""The variables of ranks that the job starts itself: numbers, the store's address, and devices for workers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.launch.command import Job, Meeting
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import RankDevices, plan_of
from paddle_dp.launch.rank_launcher import environments
from paddle_dp.mesh.environment import Environment


@pytest.mark.parametrize(("kind", "hides"), [("gpu", "CUDA_VISIBLE_DEVICES"), ("npu", "CUSTOM_DEVICE_ROOT")])
def test_a_server_sees_no_device_and_workers_have_one_each(kind: str, hides: str) -> None:
    machine = Machine(cores=4, kind=kind, devices=("0", "3"))
    plan = plan_of(Job(recipe=Path("r.yaml"), devices=(3, 0)), machine, "auto", RankDevices(servers=1))
    server, *workers = environments(plan, {"A": "b"}, Path("logs"))
    assert server[hides] == "" and f"FLAGS_selected_{kind}s" not in server
    assert [worker[f"FLAGS_selected_{kind}s"] for worker in workers] == ["1", "0"]
    assert all(worker["A"] == "b" and hides not in worker for worker in workers)
    assert [Environment.read(one).rank for one in (server, *workers)] == [0, 1, 2]


def test_ranks_of_the_second_node_are_counted_on_and_meet_at_the_first() -> None:
    job = Job(recipe=Path("r.yaml"), ranks=2, nodes=3, master="10.0.0.1:9", node_rank=1)
    plan = plan_of(job, Machine(cores=4), each=RankDevices(servers=1))
    plan = replace(plan, meeting=Meeting(master="10.0.0.1:77", host="10.0.0.2"))
    found = environments(plan, {}, Path("logs"))
    places = [Environment.read(one) for one in found]
    assert [(p.rank, p.ranks, p.local_rank, p.master) for p in places] == [
        (2, 6, 0, "10.0.0.1:77"), (3, 6, 1, "10.0.0.1:77")
    ]  # fmt: skip
    assert all(one["PADDLE_CURRENT_ENDPOINT"].startswith("10.0.0.2:") for one in found)
    assert all(one["PADDLE_NNODES"] == "3" for one in found)
