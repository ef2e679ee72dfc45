"""The templates for clusters: syntax, what they rely on, and what they do where a cluster's programs are played."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.house.programs import ROOT, run_program

CLUSTER = ROOT / "tools" / "cluster"
SCRIPTS = [CLUSTER / "slurm.sbatch", CLUSTER / "ssh.sh"]
RECIPE = "tests/faults/faulty.yaml"


@pytest.mark.processes
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_bash(script):
    assert run_program("bash", "-n", script).stderr == ""


def test_slurm_asks_for_what_the_page_says():
    text = SCRIPTS[0].read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))
    assert (asked["ntasks-per-node"], asked["signal"], asked["open-mode"]) == ("1", "USR1@120", "append")
    assert "requeue" in asked and int(asked["nodes"]) > 1


def played(folder: Path, **programs: str) -> dict[str, str]:
    """An environment in which these programs are the given bash scripts."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("status", "saved", "saves", "turn", "requeued"),
    [
        (75, True, False, 1, True), (75, False, True, 1, True), (75, True, True, 100, False),
        (1, True, False, 1, False), (1, True, True, 1, True), (137, False, True, 1, True),
        (137, False, False, 1, False),
        (138, True, False, 1, True), (138, False, False, 1, False),
        (2, True, True, 1, False), (0, False, True, 1, False),
    ],
)  # fmt: skip
def test_slurm_is_asked_to_go_on_from_a_checkpoint(tmp_path, status, saved, saves, turn, requeued):
    """After a stop, and after a lost task or the time limit's signal where there is something to go on from."""
    said = tmp_path / "said"
    newer = f'mkdir -p "{tmp_path}/a run/checkpoints/step-00000009"; ' if saves else ""
    environment = played(
        tmp_path / "bin",
        scontrol=f'echo "$@" >> {said}',
        srun=f'"$@"; {newer}exit {status}',
        **{"paddle-dp": f'printf "%s " "$@" >> {said}; echo >> {said}'},
    )
    out = tmp_path / "a run"
    (out / "checkpoints" / "step-00000004").mkdir(parents=True) if saved else None
    slurm = {
        "SLURM_JOB_ID": "42",
        "SLURM_RESTART_COUNT": str(turn),
        "OUT": str(out),
    }
    command = ("bash", SCRIPTS[0], "r.yaml", "train.batch=64")
    run_program(*command, env={**environment, **slurm}, timeout=20, status=status)
    lines = said.read_text().splitlines()
    resume = "--resume " if saved else ""
    assert lines[0] == f"train r.yaml train.batch=64 --nodes auto --output-dir {out} {resume}"
    assert lines[1:] == (["requeue 42"] if requeued else [])


def test_kubernetes_has_what_the_nodes_need():
    service, job = YAML(typ="safe", pure=True).load_all((CLUSTER / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    assert (
        service["spec"]["selector"] == {"job-name": name}
        and service["spec"]["publishNotReadyAddresses"] is True
    )
    pod: dict[str, Any] = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    (script,) = container["args"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--master {name}-0.{pod['subdomain']}:{port}" in script and '"$JOB_COMPLETION_INDEX"' in script
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["NODES"] == str(spec["completions"]) and (ROOT / variables["RECIPE"]).exists()
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(2,): "FailJob", (75,): "Ignore"}
    (taken_away,) = [rule for rule in spec["podFailurePolicy"]["rules"] if "onPodConditions" in rule]
    # Kubernetes before 1.35 requires the status.
    assert taken_away["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
