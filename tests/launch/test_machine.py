"""Cores and MKL are found without importing paddle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dp.launch.machine import Machine, cores, mkl_type


def test_cores_are_this_process_s_own():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores() == len(before)


def test_a_machine_knows_its_devices_and_their_kind():
    here = Machine.here({"CUSTOM_DEVICE_ROOT": ""})
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
