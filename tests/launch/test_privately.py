"""What Paddle's launcher is not told, it cannot write down; its ranks have it all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paddle_dp.launch.privately import VARIABLE, for_launcher, in_the_open

GIVEN = {
    "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PADDLE_NNODES": "1", "LC_ALL": "C", "NPU_VISIBLE_DEVICES": "0",
    "SECRET_TOKEN": "hunter2", "AWS_ACCESS_KEY_ID": "x", "MY_DATA": "ä \n1", "PADDLE_DP_MKL": "off",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("PATH", True), ("LD_PRELOAD", True), ("PADDLE_DP_JOB", True), ("PWD", True), ("HTTPS_PROXY", False),
        ("WANDB_API_KEY", False), ("HF_TOKEN", False), ("PADDLE_HUB_TOKEN", False), ("PYTHON_KEYRING_PASS", False),
        ("PYTHONPATH", True), ("DATABASE_URL", False), ("CUDA_VISIBLE_DEVICES", True), ("NCCL_DEBUG", True),
    ],
)  # fmt: skip
def test_the_launcher_has_what_a_start_needs(name: str, may: bool) -> None:
    assert in_the_open(name) is may


def test_a_process_takes_what_waits_for_it_and_its_children_inherit_it() -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    code = "import os, sys; from paddle_dp.launch.privately import take; take(); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", code, sys.executable, "-c", show]
    with for_launcher({**GIVEN, "PYTHONPATH": os.getcwd()}) as visible:
        assert {*visible} == {*GIVEN, "PYTHONPATH", VARIABLE} - {
            "SECRET_TOKEN",
            "AWS_ACCESS_KEY_ID",
            "MY_DATA",
        }
        assert "hunter2" not in json.dumps(visible)
        done = subprocess.run(words, env=visible, capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)
    assert {name: told.get(name) for name in GIVEN} == GIVEN and VARIABLE not in told
    assert not os.path.exists(visible[VARIABLE])
