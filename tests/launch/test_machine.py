"""This machine's cores, MKL, devices and free memory, which are known without importing paddle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.errors import InstallError
from paddle_dp.kernel_kills import KernelKills
from paddle_dp.launch import machine
from paddle_dp.launch.machine import (
    Machine,
    ask_paddle,
    available_memory,
    built_for,
    cores,
    detect,
    mkl_type,
    plugins,
    visible_gpus,
    visible_in,
    visible_xpus,
)


def test_cores_are_this_process_s_own():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores() == len(before)


def test_a_machine_knows_its_devices_and_their_kind(monkeypatch):
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", "")
    here = Machine.here()
    assert here.cores >= 1 and (here.kind == "cpu") == (not here.devices)


AVX512 = "avx512f avx512cd avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("vendor", "flags", "told"),
    [
        ("AuthenticAMD", f"fpu avx2 {AVX512}", "7"),
        (
            "AuthenticAMD",
            f"fpu avx2 {AVX512.replace('avx512dq ', '')}",
            "5",
        ),  # "7" would be an illegal instruction
        ("AuthenticAMD", "fpu avx2", "5"),
        ("AuthenticAMD", "fpu avx", None),
        ("GenuineIntel", f"fpu avx2 {AVX512}", None),
    ],
)
def test_mkl_is_told_what_an_amd_processor_can_do(tmp_path: Path, vendor: str, flags: str, told: str | None):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\nbugs\t\t: avx2\n")
    assert mkl_type(tmp_path / "cpuinfo") == told
    assert mkl_type(tmp_path / "missing") is None


@pytest.fixture
def driver(tmp_path):
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    return tmp_path


def test_gpus_are_those_that_cuda_may_see(driver):
    assert visible_gpus({}, driver) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, 3"}, driver) == ("1", "3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, driver) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, driver) == ()


def test_xpus_are_those_that_the_launcher_takes(tmp_path):
    for name in ("xpu0", "xpu1", "xpuctrl"):
        (tmp_path / name).touch()
    assert visible_xpus({}, tmp_path) == ("0", "1")
    assert visible_xpus({"XPU_VISIBLE_DEVICES": "1", "XPULINK_VISIBLE_DEVICES": "0"}, tmp_path) == ("0",)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_without_a_plugin_paddle_s_own_kind_counts(monkeypatch, kind):
    monkeypatch.setattr(machine, "built_for", lambda: kind)
    seen = detect({"CUDA_VISIBLE_DEVICES": "0,1", "CUSTOM_DEVICE_ROOT": ""})
    assert seen == (("gpu", ("0", "1")) if kind == "gpu" else ("cpu", ()))


def test_a_plugin_s_devices_come_first(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "built_for", lambda: "gpu")
    monkeypatch.setattr(machine, "ask_paddle", lambda root: ("npu", 2))
    variables = {"CUDA_VISIBLE_DEVICES": "0", "CUSTOM_DEVICE_ROOT": str(tmp_path)}
    assert detect(variables) == ("gpu", ("0",)), "a folder without a library is no plugin"
    (tmp_path / "libnpu.so").touch()
    assert plugins(variables) == str(tmp_path)
    assert detect(variables) == ("npu", ("0", "1"))
    assert detect({**variables, visible_in("npu"): "5,7"}) == ("npu", ("5", "7"))
    monkeypatch.setattr(machine, "ask_paddle", lambda root: ("npu", 0))
    assert detect(variables) == ("gpu", ("0",)), "a plugin without a device"


@pytest.mark.parametrize(
    ("answer", "seen"),
    [('["npu:0", "npu:1"]', ("npu", 2)), ("[]", ("cpu", 0)), ('a word\n["sim:0"]', ("sim", 1))],
)
def test_paddle_is_asked_in_a_process_of_its_own(monkeypatch, answer, seen):
    done = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n", stderr="")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    assert ask_paddle.__wrapped__("/plugins") == seen


def test_a_plugin_that_cannot_be_loaded_is_named(monkeypatch):
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="undefined symbol: phi")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(InstallError, match=r"in /plugins cannot be loaded: undefined symbol: phi"):
        ask_paddle.__wrapped__("/plugins")


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("cuda_version = 'False'\nxpu_xre_version = 'False'", "cpu"),
        ("cuda_version     = '12.6'", "gpu"),
        ("cuda_version = 'False'\nxpu_xre_version  = '5.0'", "xpu"),
    ],
)
def test_paddle_s_version_file_says_what_it_was_built_for(tmp_path, monkeypatch, lines, kind):
    (tmp_path / "paddle" / "version").mkdir(parents=True)
    (tmp_path / "paddle" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "paddle" / "version" / "__init__.py").write_text(f"nccl_version = '0'\n{lines}\n")
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert built_for.__wrapped__() == kind


def test_no_paddle_is_a_sentence_that_says_which_to_install(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match="PaddlePaddle is not installed"):
        built_for.__wrapped__()


GB = 2**30


@pytest.fixture
def system(tmp_path):
    def make(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


MACHINE = {"proc__meminfo": f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"}


def test_a_machine_gives_what_linux_calls_available(system):
    assert available_memory(system(**MACHINE)) == 8 * GB


def test_a_group_gives_what_it_has_left_and_what_it_caches(system):
    group = {"proc__self__cgroup": "0::/job/step\n"}
    group |= {
        "sys__fs__cgroup__job__memory.max": f"{4 * GB}\n",
        "sys__fs__cgroup__job__memory.current": f"{3 * GB}\n",
    }
    group |= {"sys__fs__cgroup__job__memory.stat": f"anon 1\ninactive_file {GB}\n"}
    group |= {
        "sys__fs__cgroup__job__step__memory.max": "max\n",
        "sys__fs__cgroup__job__step__memory.current": "1\n",
    }
    assert available_memory(system(**MACHINE, **group)) == 2 * GB


def test_a_system_that_tells_nothing_is_not_asked(tmp_path):
    assert available_memory(tmp_path) is None


def test_whether_the_kernel_has_lately_ended_a_process_for_want_of_memory(system):
    def counted(count):
        return system(proc__vmstat=f"oom_kill_disable 7\noom_kill {count}\nnr_free_pages 1\n")

    kernel = KernelKills(counted(3))
    kernel.look(100.0)
    assert kernel.lately() is False
    counted(4)
    assert kernel.lately() is True
    kernel.look(103.0), kernel.look(107.0)
    assert kernel.lately() is True  # a rank's end is seen a moment later
    kernel.look(114.0)
    assert kernel.lately() is False  # that was another one
    assert KernelKills(system(proc__vmstat="nr_free_pages 1\n")).lately() is None
