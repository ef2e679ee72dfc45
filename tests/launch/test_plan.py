"""What cannot be carried out is refused in one sentence; the rest gets its ranks and devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import RANK, RankDevices, check_memory, plan_of

CPU = Machine(cores=2)
BLIND = Machine(cores=2, kind="gpu")
GPU = Machine(cores=8, kind="gpu", devices=("0", "3"))
NPU = Machine(cores=8, kind="npu", devices=("0", "1"))


def job(**words) -> Job:
    return Job(recipe=Path("r.yaml"), **words)


@pytest.mark.parametrize(
    ("words", "machine", "device", "ranks", "devices"),
    [
        ({}, CPU, "auto", 1, ()),
        ({"ranks": 3}, CPU, "auto", 3, ()),
        ({}, GPU, "auto", 2, ("0", "3")),
        ({"ranks": 1}, GPU, "gpu", 1, ("0",)),
        ({"ranks": 4}, GPU, "cpu", 4, ()),
        ({"devices": (3,)}, GPU, "auto", 1, ("3",)),
        ({"devices": (3, 0), "ranks": 2}, GPU, "auto", 2, ("3", "0")),
        ({"ranks": 2}, BLIND, "auto", 2, ()),
        ({}, NPU, "auto", 2, ("0", "1")),
        ({"devices": (1,)}, NPU, "npu", 1, ("1",)),
        ({"ranks": 4}, NPU, "cpu", 4, ()),
    ],
)
def test_ranks_and_devices(words, machine, device, ranks, devices):
    found = plan_of(job(**words), machine, device)
    assert (found.ranks, found.devices) == (ranks, devices)


TWO = RankDevices(2, "two copies each take one")


@pytest.mark.parametrize(
    ("words", "machine", "devices"),
    [
        ({}, GPU, ("0", "3")),
        ({"ranks": 1}, NPU, ("0", "1")),
        ({"devices": (3, 0)}, GPU, ("3", "0")),
        ({}, CPU, ()),
    ],
)
def test_a_rank_of_several_devices_is_a_process_of_its_own_that_has_them_all(words, machine, devices):
    found = plan_of(job(**words), machine, each=TWO)
    assert (found.ranks, found.devices, found.alone) == (1, devices, not devices)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"ranks": 2}, "--ranks 2: only 2 GPUs can be seen here .*, and two copies each take one"),
        ({"devices": (3,)}, "--devices 3 names 1, and two copies each take one"),
        ({"devices": (3, 0), "ranks": 2}, "means 1 rank, but --ranks is 2"),
        ({"ranks": 1, "least_ranks": 1}, "Leave out MIN: in --ranks"),
    ],
)
def test_fewer_devices_than_a_rank_needs_are_refused(words, sentence):
    with pytest.raises(UsageError, match=sentence):
        plan_of(job(**words), GPU, each=TWO)


@pytest.mark.parametrize(
    ("words", "machine", "device", "sentence"),
    [
        ({"ranks": 0}, CPU, "auto", "--ranks 0: a job has 1 rank or more"),
        ({"ranks": 2, "least_ranks": 3}, CPU, "auto", "--ranks 3:2: give MIN:MAX, with MIN from 1 to MAX"),
        ({"ranks": 2, "least_ranks": 0}, CPU, "auto", "--ranks 0:2: give MIN:MAX"),
        ({"nodes": 2, "least_nodes": 3}, CPU, "auto", "--nodes 3:2: give MIN:MAX"),
        ({"ranks": 4, "least_ranks": 3}, GPU, "auto", "--ranks 4: only 2 GPUs can be seen here"),
        ({"restarts": -1}, CPU, "auto", "--restarts -1: give the number of restarts, 0 or more"),
        ({"devices": (0, 1)}, CPU, "auto", "the CPU package.*--ranks 2"),
        ({"devices": (0, 1), "ranks": 3}, GPU, "auto", "means 2 ranks, but --ranks is 3"),
        ({"devices": (0, 0)}, GPU, "auto", "name each GPU once"),
        ({"devices": ()}, GPU, "auto", "at least one"),
        ({"devices": (0, 7)}, GPU, "auto", "no GPU 7 here. Visible are: 0,3"),
        ({"devices": (0,)}, GPU, "cpu", "train.device is cpu"),
        ({"ranks": 3}, GPU, "auto", "only 2 GPUs"),
        ({}, CPU, "gpu", "has no GPU support"),
        ({}, BLIND, "gpu", "sees no GPU here"),
        ({}, CPU, "npu", "has no NPU support"),
        ({}, NPU, "gpu", "train.device is gpu, but the installed paddle computes on NPU 0,1"),
        ({"devices": (0,)}, GPU, "xpu", "train.device is xpu, but the installed paddle computes on GPU 0,3"),
        ({"devices": (2,)}, NPU, "auto", "there is no NPU 2 here. Visible are: 0,1"),
        ({"ranks": 3}, NPU, "auto", "only 2 NPUs can be seen here"),
        ({"nodes": 0}, CPU, "auto", "--nodes 0"),
        ({"nodes": 2, "node_rank": 0}, CPU, "auto", "needs --master HOST:PORT"),
        ({"nodes": 2, "master": "a", "node_rank": 0}, CPU, "auto", "give it as HOST:PORT"),
        ({"nodes": 2, "master": "a:99999", "node_rank": 0}, CPU, "auto", "give it as HOST:PORT"),
        ({"nodes": 2, "master": "a:1"}, CPU, "auto", "--node-rank is missing"),
        ({"nodes": 2, "master": "a:1", "node_rank": 2}, CPU, "auto", "--node-rank is 2.*up to 1"),
        ({"master": "a:1"}, CPU, "auto", "give --nodes N as well"),
        ({"node_rank": 1}, CPU, "auto", "give --nodes N as well"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, machine, device, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        plan_of(job(**words), machine, device)
    assert "\n" not in str(caught.value)


def test_only_a_world_of_one_needs_no_launcher():
    assert plan_of(job(), CPU).alone
    assert not plan_of(job(ranks=2), CPU).alone
    assert not plan_of(job(restarts=1), CPU).alone  # this process outlives its rank
    assert not plan_of(job(nodes=2, master="a:1", node_rank=0), CPU).alone


def test_more_ranks_than_the_memory_can_begin_are_refused():
    """Each imports Paddle, whatever the model."""
    many = plan_of(job(ranks=900), CPU)
    with pytest.raises(
        UsageError, match=r"--ranks 900: .* 112.5 GB together, and 4.0 GB .*--ranks to 32 at most"
    ):
        check_memory(many, 4 << 30)
    check_memory(many, 900 * RANK)
    check_memory(many, None)  # a system that does not say
    check_memory(plan_of(job(), CPU), 1)
    check_memory(plan_of(job(ranks=2), GPU), 1)  # as many as there are devices


@pytest.mark.parametrize(
    ("words", "waiting", "sentence"),
    [
        (
            {"restarts": 1},
            1,
            r", as does the launcher that waits .*, 0.6 GB .*--ranks to 3 at most, leave out --rest",
        ),
        (
            {"restarts": 1, "spares": True},
            4,
            r", as do the 4 that wait for a restart, 1.0 GB .* to 3 .* out --spares",
        ),
    ],
)
def test_processes_that_wait_for_a_restart_take_memory_too(words, waiting, sentence):
    plan = plan_of(job(ranks=4, **words), CPU)
    with pytest.raises(UsageError, match=sentence):
        check_memory(plan, (4 + waiting) * RANK - 1)
    check_memory(plan, (4 + waiting) * RANK)


@pytest.mark.parametrize(
    ("words", "servers", "ranks", "here", "devices"),
    [
        ({}, 1, 3, 1, ("0", "3")),  # a worker for each device
        ({"ranks": 2}, 1, 2, 1, ("0",)),
        ({"devices": (3,)}, 2, 3, 2, ("3",)),
        ({"devices": (3,), "ranks": 2}, 1, 2, 1, ("3",)),
        ({"ranks": 2, "nodes": 2, "master": "a:1", "node_rank": 0}, 1, 2, 1, ("0",)),
        ({"ranks": 2, "nodes": 2, "master": "a:1", "node_rank": 1}, 1, 2, 0, ("0", "3")),
        ({"ranks": 1, "nodes": 2, "master": "a:1", "node_rank": 0}, 1, 1, 1, ()),  # a machine of servers
    ],
)
def test_devices_are_the_workers_alone(words, servers, ranks, here, devices):
    found = plan_of(job(**words), GPU, "auto", RankDevices(servers=servers))
    assert (found.ranks, found.servers_here, found.devices) == (ranks, here, devices)


def test_more_workers_than_devices_are_refused_once_the_servers_are_known():
    assert plan_of(job(ranks=4), GPU, each=RankDevices(known=False)).ranks == 4
    with pytest.raises(UsageError, match=r"--ranks 4: only 2 GPUs .* each worker takes one"):
        plan_of(job(ranks=4), GPU, each=RankDevices(fewer="each worker takes one", servers=1))
    with pytest.raises(UsageError, match="means 1 rank and 1 without a device"):
        plan_of(job(devices=(3,), ranks=3), GPU, each=RankDevices(servers=1))
