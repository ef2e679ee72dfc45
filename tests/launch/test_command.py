"""argv and environment are pure: what a job is started with can be read without starting it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from paddle_dp.launch.command import (
    Job,
    LaunchPlan,
    Meeting,
    argv,
    environment,
    headline,
    launcher,
    settings,
)
from paddle_dp.launch.machine import Machine

CPU = Machine(cores=8, mkl_type="7")
GPU = Machine(cores=8, kind="gpu", devices=("0", "1", "2"))


def plan(
    machine: Machine = CPU, ranks: int = 2, devices: tuple[str, ...] = (), nodes: int = 1, meeting=None, **job
) -> LaunchPlan:
    return LaunchPlan(
        job=Job(recipe=Path("r.yaml"), **job), machine=machine, ranks=ranks, devices=devices, nodes=nodes,
        node=job.get("node_rank") or 0, meeting=meeting,
    )  # fmt: skip


def test_ranks_on_the_cpu_are_started_by_the_launcher_with_their_own_log_folder():
    words = argv(plan(overrides=("a.b=1", "c=2")), Path("x/attempt-004"))
    assert words[:4] == [sys.executable, "-u", "-m", "paddle.distributed.launch"]
    assert words[4:10] == ["--nproc_per_node", "2", "--log_dir", "x/attempt-004", "--job_id", "attempt-004"]
    assert words[10:12] == ["--host", "127.0.0.1"]
    assert words[12].endswith("paddle_dp/launch/recipe_rank.py")
    assert words[13:] == ["-c", "r.yaml", "--entry-point", "train", "-o", "a.b=1", "-o", "c=2"]
    assert "--devices" not in words  # on a CPU the launcher raises ValueError


def test_devices_and_nodes_are_passed_on():
    meeting = Meeting(master="10.0.0.1:9701", host="10.0.0.2", interface="eth0")
    words = argv(plan(GPU, devices=("0", "2"), nodes=2, meeting=meeting, node_rank=1), Path("logs"))
    for pair in ("--devices 0,2", "--nnodes 2", "--master 10.0.0.1:9701", "--rank 1", "--host 10.0.0.2"):
        assert pair in " ".join(words)
    keys = (meeting, meeting, replace(meeting, key=b"other"))
    ids = [launcher(plan(GPU, nodes=2, meeting=each), Path("logs"))[9] for each in keys]
    assert ids[0] == words[9] == ids[1] != ids[2]  # two jobs may have chosen one port


def test_the_run_folder_is_an_override_that_yaml_reads_as_text():
    job = Job(recipe=Path("r.yaml"), overrides=("a=1",), output_dir=Path("runs/yes: no"))
    assert job.all_overrides == ("a=1", 'output_dir="runs/yes: no"')
    assert job.options["output_dir"] == "runs/yes: no"


def test_leftovers_of_other_jobs_are_dropped_and_ours_are_kept():
    inherited = {
        "PATH": "/bin", "PADDLE_NNODES": "2", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2", "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1", "POD_IP": "1.2.3.4", "FLAGS_selected_gpus": "0", "FLAGS_benchmark": "1",
        "CUDA_VISIBLE_DEVICES": "", "PADDLE_DP_MKL": "off", "PADDLE_DP_TTY": "/dev/tty",
    }  # fmt: skip
    found = environment(plan(), inherited)
    assert found.keys() & inherited.keys() == {"PATH", "FLAGS_benchmark", "PADDLE_DP_MKL"}


def test_a_job_cannot_inherit_what_another_was_told():
    found = environment(plan(resume="newest", extra={"k": 1}), {"PADDLE_DP_OPTIONS": '{"resume": "other"}'})
    assert json.loads(found["PADDLE_DP_OPTIONS"]) == {"resume": "newest", "output_dir": None, "k": 1}


def test_threads_are_the_ranks_share_of_the_cores_and_never_none():
    assert settings(plan(ranks=2), {})["OMP_NUM_THREADS"] == "4"
    assert settings(plan(ranks=16), {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in settings(plan(), {"OMP_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS" not in settings(plan(GPU, devices=("0", "1")), {})


def test_mkl_gets_its_word_on_amd_only_and_can_be_left_out():
    assert settings(plan(), {})["MKL_DEBUG_CPU_TYPE"] == "7"
    assert "MKL_DEBUG_CPU_TYPE" not in settings(plan(), {"PADDLE_DP_MKL": "off"})
    assert "MKL_DEBUG_CPU_TYPE" not in settings(plan(Machine(cores=2)), {})


def test_malloc_keeps_what_it_frees_on_cpus_unless_somebody_has_set_it():
    assert int(settings(plan(), {})["MALLOC_MMAP_THRESHOLD_"]) == 32 << 20
    assert "MALLOC_MMAP_THRESHOLD_" not in settings(plan(), {"MALLOC_MMAP_THRESHOLD_": "1"})
    assert "MALLOC_MMAP_THRESHOLD_" not in settings(plan(GPU, devices=("0", "1")), {})


def test_gloo_stays_on_this_machine_unless_there_are_others():
    assert settings(plan(), {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in settings(plan(), {"GLOO_SOCKET_IFNAME": "eth1"})
    assert "GLOO_SOCKET_IFNAME" not in settings(plan(nodes=2), {})
    meeting = Meeting(master="10.0.0.1:1", host="10.0.0.2", interface="eth0")
    nodes = plan(nodes=2, meeting=meeting)
    for name, interface in (("GLOO_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_IFNAME", "=eth0")):
        assert environment(nodes, {})[name] == interface
        assert environment(nodes, {name: "ib0"})[name] == "ib0"


def test_the_nodes_secret_is_none_of_the_ranks_business():
    given = {"PADDLE_DP_SECRET": "abc", "PADDLE_DP_MKL": "off"}
    assert "PADDLE_DP_SECRET" not in environment(plan(), given)


def test_gpus_are_seen_by_those_who_use_them():
    seen = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert environment(plan(GPU, devices=("0", "1")), seen)["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert environment(plan(GPU, ranks=1, devices=("2",)), seen)["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment(plan(GPU, ranks=1), seen)["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(plan(GPU, ranks=2), seen)["CUDA_VISIBLE_DEVICES"] == "all"
    xpu = replace(GPU, kind="xpu")
    assert "CUDA_VISIBLE_DEVICES" not in environment(
        plan(xpu, devices=("0", "1")), {"CUDA_VISIBLE_DEVICES": ""}
    )


def test_a_plugin_s_devices_are_seen_by_those_who_use_them():
    npu = Machine(cores=8, kind="npu", devices=("4", "5"))
    given = {"CUSTOM_DEVICE_ROOT": "/plugins", "FLAGS_selected_npus": "0"}
    assert environment(plan(npu, devices=("4", "5")), given)["CUSTOM_DEVICE_ROOT"] == "/plugins"
    assert environment(plan(npu), given)["CUSTOM_DEVICE_ROOT"] == ""
    alone = environment(plan(npu, ranks=1, devices=("5",)), given)
    assert (alone["CUSTOM_DEVICE_ROOT"], alone["FLAGS_selected_npus"]) == ("/plugins", "1")
    assert headline(plan(npu, devices=("4", "5")), {}, Path("r")) == "2 ranks on NPU 4,5 · r"
    assert (
        headline(plan(replace(npu, kind="sim"), devices=("4",), ranks=1), {}, Path("r"))
        == "1 rank on sim 4 · r"
    )


def test_one_line_says_how_it_runs():
    line = headline(plan(), environment(plan(), {}), Path("runs/x"))
    assert line == "2 ranks on CPU · 4 threads each · runs/x"
    assert headline(plan(GPU, devices=("0", "2")), {}, Path("r")) == "2 ranks on GPU 0,2 · r"
    few = replace(GPU, cores=1)  # an engine has bound the job to one
    assert "GPU 0,2 · they share 1 core, and take turns" in headline(
        plan(few, devices=("0", "2")), {}, Path("r")
    )
    assert headline(plan(nodes=3, node_rank=1), {}, Path("r")) == "node 1 of 3, 2 ranks here on CPU · r"
    assert "1 thread ·" in headline(plan(ranks=1), {"OMP_NUM_THREADS": "1"}, Path("r"))
