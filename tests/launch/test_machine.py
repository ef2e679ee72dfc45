"""Cores and MKL are found without importing paddle."""

from __future__ import annotations

import os

from paddle_dp.launch.machine import Machine, cores


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
