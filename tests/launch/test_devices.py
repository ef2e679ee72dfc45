"""Which devices the installed Paddle can use is found without importing it into a job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paddle_dp.errors import InstallError
from paddle_dp.launch import devices
from paddle_dp.launch.devices import (
    ask_paddle,
    built_for,
    detect,
    plugins,
    visible_gpus,
    visible_in,
    visible_xpus,
)


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
    monkeypatch.setattr(devices, "built_for", lambda: kind)
    seen = detect({"CUDA_VISIBLE_DEVICES": "0,1", "CUSTOM_DEVICE_ROOT": ""})
    assert seen == (("gpu", ("0", "1")) if kind == "gpu" else ("cpu", ()))


def test_a_plugin_s_devices_come_first(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "built_for", lambda: "gpu")
    monkeypatch.setattr(devices, "ask_paddle", lambda root: ("npu", 2))
    variables = {"CUDA_VISIBLE_DEVICES": "0", "CUSTOM_DEVICE_ROOT": str(tmp_path)}
    assert detect(variables) == ("gpu", ("0",)), "a folder without a library is no plugin"
    (tmp_path / "libnpu.so").touch()
    assert plugins(variables) == str(tmp_path)
    assert detect(variables) == ("npu", ("0", "1"))
    assert detect({**variables, visible_in("npu"): "5,7"}) == ("npu", ("5", "7"))
    monkeypatch.setattr(devices, "ask_paddle", lambda root: ("npu", 0))
    assert detect(variables) == ("gpu", ("0",)), "a plugin without a device"


@pytest.mark.parametrize(
    ("answer", "seen"),
    [('["npu:0", "npu:1"]', ("npu", 2)), ("[]", ("cpu", 0)), ('a word\n["sim:0"]', ("sim", 1))],
)
def test_paddle_is_asked_in_a_process_of_its_own(monkeypatch, answer, seen):
    done = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n", stderr="")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: done)
    assert ask_paddle.__wrapped__("/plugins") == seen


def test_a_plugin_that_cannot_be_loaded_is_named(monkeypatch):
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="undefined symbol: phi")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: done)
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
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match="PaddlePaddle is not installed"):
        built_for.__wrapped__()
