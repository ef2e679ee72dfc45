"""Cores, GPUs and MKL are found without importing paddle."""

from __future__ import annotations

import os
import sys

import pytest

from paddle_dp.errors import InstallError
from paddle_dp.launch import machine
from paddle_dp.launch.machine import Machine, cores, paddle_has_cuda, visible_gpus


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


def test_cores_are_this_process_s_own():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores() == len(before)


def test_without_cuda_in_paddle_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr(machine, "paddle_has_cuda", lambda: False)
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0,1"}).gpus == ()
    monkeypatch.setattr(machine, "paddle_has_cuda", lambda: True)
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "0,1"}).gpus == ("0", "1")


@pytest.mark.parametrize(("line", "cuda"), [("'False'", False), ("'12.6'", True)])
def test_paddle_s_version_file_says_whether_it_has_cuda(tmp_path, monkeypatch, line, cuda):
    (tmp_path / "paddle" / "version").mkdir(parents=True)
    (tmp_path / "paddle" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "paddle" / "version" / "__init__.py").write_text(
        f"nccl_version = '0'\ncuda_version     = {line}\n"
    )
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paddle_has_cuda.__wrapped__() is cuda


def test_no_paddle_is_a_sentence_that_says_which_to_install(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match="PaddlePaddle is not installed"):
        paddle_has_cuda.__wrapped__()
