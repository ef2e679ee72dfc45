"""Manifests of three kinds are valid by their schemas, for 1 to 64 nodes, and say what the nodes rely on.

schemas/: the CRDs of JobSet (08dfbdf) and Volcano (ed72c7c) without descriptions and pods. Pods are checked by
kubernetes-validate, where it is installed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from paddle_dp.cli.app import main
from paddle_dp.cluster.kubernetes import jobset, kubernetes, volcano
from paddle_dp.cluster.request import ClusterRequest, checked, name_of
from paddle_dp.errors import UsageError
from paddle_dp.recipe import read_recipe
from tests.house.programs import ROOT, run_program

SCHEMAS = Path(__file__).with_name("schemas")
RECIPE = ROOT / "configs" / "digits_mlp.yaml"
NODES = (1, 4, 64)
KUBERNETES = ("1.29", "1.31", "1.37")


def request(**more: Any) -> ClusterRequest:
    return ClusterRequest(
        **{"recipe": RECIPE, "name": "digits", "nodes": 4, "settings": ('name="a b"\nc',), **more}
    )


def read(text: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all(text))


def strict(schema: Any) -> Any:
    """A CRD's schema that also refuses fields it does not know, as the API server warns of."""
    if isinstance(schema, dict):
        named = schema.get("properties")
        if isinstance(named, dict) and not named.keys() <= {"apiVersion", "kind", "metadata"}:
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema = {key: value for key, value in schema.items() if key not in ("type", "anyOf")}
        return {key: strict(value) for key, value in schema.items()}
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def mistakes(manifest: Any, schema: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    found = jsonschema.Draft7Validator(strict(schema)).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def schema_of(kind: str) -> Any:
    return json.loads((SCHEMAS / f"{kind}.json").read_text())


@pytest.mark.parametrize("nodes", NODES)
def test_a_jobset_and_a_job_of_volcano_fit_their_schemas(nodes: int) -> None:
    wanted = request(nodes=nodes, gpus=8)
    (a_jobset,), (a_volcano_job,) = read(jobset(wanted, "")), read(volcano(wanted, ""))
    assert mistakes(a_jobset, schema_of("jobset")) == []
    assert mistakes(a_volcano_job, schema_of("volcano")) == []
    a_jobset["spec"]["replicas"] = 1
    a_volcano_job["spec"]["minAvailable"] = "all"
    assert (
        len(mistakes(a_jobset, schema_of("jobset")))
        == len(mistakes(a_volcano_job, schema_of("volcano")))
        == 1
    )


@pytest.mark.parametrize("nodes", NODES)
def test_an_indexed_job_fits_its_schema(nodes: int) -> None:
    _, job = read(kubernetes(request(nodes=nodes), ""))
    jobs = schema_of("jobset")["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
    assert mistakes(job["spec"], jobs["properties"]["template"]["properties"]["spec"]) == []
    job["spec"]["completionMode"] = 4
    assert len(mistakes(job["spec"], jobs["properties"]["template"]["properties"]["spec"])) == 1


@pytest.mark.long
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_jobs_services_and_pods(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for nodes in NODES:
        wanted = request(nodes=nodes, gpus=2)
        (a_jobset,), (a_volcano_job,) = read(jobset(wanted, "")), read(volcano(wanted, ""))
        job = a_jobset["spec"]["replicatedJobs"][0]["template"]
        pod = a_volcano_job["spec"]["tasks"][0]["template"]
        for manifest in (
            *read(kubernetes(wanted, "")),
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job},
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **pod},
        ):
            validator.validate(manifest, version, strict=True)


def test_the_pods_of_a_job_find_each_other_and_stop_in_good_order() -> None:
    service, job = read(kubernetes(request(folder="/shared/runs/x"), ""))
    name, spec = job["metadata"]["name"], job["spec"]
    assert (
        service["spec"]["selector"] == {"job-name": name}
        and service["spec"]["publishNotReadyAddresses"] is True
    )
    assert (service["spec"]["clusterIP"], spec["completionMode"]) == ("None", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 4
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--nodes auto --master {name}-0.{name}:{port} --restarts 3" in container["args"][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert (variables["PADDLE_DP_NODES"], variables["OUT"]) == ("4", "/shared/runs/x")
    assert container["volumeMounts"][0]["mountPath"] == "/shared/runs"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule.get("onExitCodes", {}).get("values") for rule in rules] == [[2], [75], None]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert rules[2]["onPodConditions"][0]["status"] == "True"  # Kubernetes before 1.35 requires it
    pod = read(volcano(request(), ""))[0]["spec"]["tasks"][0]["template"]["spec"]
    assert "--master" not in pod["containers"][0]["args"][0]  # Volcano says it


def pod_of(**more: Any) -> dict[str, Any]:
    return read(volcano(request(**more), ""))[0]["spec"]["tasks"][0]["template"]["spec"]


@pytest.mark.parametrize(
    ("more", "cpu", "memory"),
    [
        ({}, "1", "16Gi"), ({"ranks": 3}, "3", "16Gi"), ({"gpus": 8}, "32", "128Gi"),
        ({"gpus": 8, "cpus": 6, "memory": "64Gi"}, "6", "64Gi"),
    ],
)  # fmt: skip
def test_a_pod_has_equipment_for_its_gpus_or_ranks(more: dict[str, Any], cpu: str, memory: str) -> None:
    pod = pod_of(**more)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": cpu, "memory": memory} and resources["limits"]["memory"] == memory
    assert pod["securityContext"]["fsGroup"] > 0  # a volume of root's is writable


@pytest.mark.parametrize(("nodes", "failures"), [(1, 8), (64, 128)])
def test_a_failure_of_all_pods_leaves_another_try(nodes: int, failures: int) -> None:
    assert read(kubernetes(request(nodes=nodes), ""))[1]["spec"]["backoffLimit"] == failures


def test_a_container_finds_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other.yaml"
    (project / "configs").mkdir(parents=True)
    monkeypatch.chdir(project)
    for recipe, path in (
        (RECIPE, "configs/digits_mlp.yaml"), (project / "configs" / "a.yaml", "configs/a.yaml"),
        (Path("a.yaml"), "a.yaml"), (Path("configs/../a.yaml"), "a.yaml"),
    ):  # fmt: skip
        script = pod_of(recipe=recipe)["containers"][0]["args"][0]
        assert f"exec paddle-dp train {path} " in script
    for recipe in (other, Path("../other.yaml")):
        with pytest.raises(UsageError, match=r"other.yaml is outside of the current folder.* under /work"):
            pod_of(recipe=recipe)


def test_a_manifest_says_how_to_stop_it_and_to_apply_it_again() -> None:
    comment = " ".join(
        line.lstrip("# ") for line in kubernetes(request(), "").splitlines() if line.startswith("#")
    )
    for word in ("namespace", "imagePullSecrets", "tolerations", "kubectl delete -f", "Containerfile"):
        assert re.search(rf"\b{word}\b", comment), word


@pytest.mark.processes
@pytest.mark.parametrize("kind", [kubernetes, jobset, volcano])
def test_the_container_runs_the_recipe_with_its_settings(kind: Any, tmp_path: Path) -> None:
    text = kind(request(recipe=Path("a $b.yaml"), folder=str(tmp_path / "runs" / "[x]")), "")
    spec = read(text)[-1]["spec"]
    for key in ("replicatedJobs", "tasks"):
        spec = spec[key][0] if key in spec else spec
    while "containers" not in spec:
        spec = spec.get("template") or spec["spec"]
    (script,) = spec["containers"][0]["args"]
    (tmp_path / "paddle-dp").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "paddle-dp").chmod(0o755)
    out = tmp_path / "runs" / "[x]"
    (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    script = script.replace("$$", "$")  # as Kubernetes does
    done = run_program("bash", "-c", script, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(out)})
    assert done.stdout.startswith('train|a $b.yaml|name="a b"\nc|--ranks|1|--nodes|auto|')
    assert done.stdout.endswith(f"--restarts|3|--output-dir|{out}|--resume|")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"nodes": 65}, "--nodes 65: give 1 to 64 machines"), ({"gpus": -1}, "--gpus -1: give 0 or more"),
        ({"time": "4h"}, "--time 4h: give it such as 04:00:00"), ({"memory": "16"}, "--memory 16: give it such as 16"),
        ({"name": "a b"}, "--name a b: give it such as digits-mlp"), ({"image": "a b"}, "--image a b"),
        ({"name": "x\\n#SBATCH --exclusive"}, "--name"), ({"claim": "A"}, "--claim A"),
        ({"ranks": 0}, "--ranks 0: give 1"), ({"time": "00:00:01"}, "give 120 s or more"),
        ({"settings": ("name=a\rb",)}, "has the control character '\\r'"), ({"folder": "/runs/\x07"}, "control"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(**more)
    assert message in str(caught.value)


def test_a_text_is_a_text_for_every_reader_of_yaml() -> None:
    text = kubernetes(request(name="on", claim="off", image="1:20"), "")
    for line in ('name: "on"', 'subdomain: "on"', 'claimName: "off"', 'image: "1:20"', 'job-name: "on"'):
        assert line in text


def test_a_layout_that_does_not_fit_is_refused_before_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = ROOT / "configs" / "gpt_tensor2.yaml"
    with pytest.raises(UsageError, match="strategy hybrid is for 2 ranks, and 3 × 1 are 3"):
        checked(ClusterRequest(recipe=tensor, name="a", nodes=3))
    assert checked(ClusterRequest(recipe=tensor, name="a", nodes=2)).name == "gpt_tensor2"
    with pytest.raises(SystemExit):
        main(["cluster", "slurm", str(tensor), "--nodes", "2", "train.bacth=8"])
    assert "Did you mean 'batch'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cluster", "slrm", str(tensor)])
    assert "Did you mean 'slurm'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cluster", "ray", str(tensor)])
    assert "RayJob (docs/how-to/ray.md)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "more", "sentence"),
    [
        ("digits_replicas", {"nodes": 2}, "strategy replicas is one process with copies of the model"),
        (
            "gpt_tiny",
            {"nodes": 8, "settings": ("strategy.pipeline=8",)},
            "8 pipeline stages need as many blocks",
        ),
        ("gpt_tiny", {"settings": ("callbacks.4.use=timeline",)}, "timeline shows the ranks' exchange"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused_before_the_queue(
    recipe: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        checked(ClusterRequest(recipe=ROOT / "configs" / f"{recipe}.yaml", name="a", **more))


def test_checkpoints_in_memory_are_refused_where_no_node_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ROOT / "configs" / "gpt_tiny.yaml"), "callbacks.4.use=memory_checkpoint"]
    for engine, advice in (
        (["slurm"], "Leave it out: Slurm requeues the whole job."),
        (["kubernetes", "--restarts", "0"], "Give --restarts 3, or leave it out."),
    ):
        with pytest.raises(SystemExit):
            main(["cluster", *engine, *words])
        error = capsys.readouterr().err
        assert "callbacks.memory_checkpoint: it serves the restarts of a job" in error and advice in error
    with pytest.raises(SystemExit):
        main(["cluster", "kubernetes", *words])
    assert "--restarts 3" in capsys.readouterr().out


def test_a_batch_per_rank_counts_all_nodes_and_stays_as_it_is_in_the_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("train.batch=8 per rank", "train.micro_batches=auto 1 GB")
    gpt = ROOT / "configs" / "gpt_tiny.yaml"
    read = checked(ClusterRequest(recipe=gpt, settings=settings, name="a", nodes=3, ranks=2))
    assert (read.train.batch, read.train.micro_batches) == (48, 1)
    with pytest.raises(SystemExit):
        main(["cluster", "slurm", str(gpt), *settings, "--nodes", "3"])
    assert "'train.batch=8 per rank' 'train.micro_batches=auto 1 GB'" in capsys.readouterr().out


def test_the_memory_of_a_node_is_not_this_machines() -> None:
    gpt = ROOT / "configs" / "gpt_tiny.yaml"
    with pytest.raises(UsageError, match="auto 16 GB"):
        checked(ClusterRequest(recipe=gpt, settings=("train.micro_batches=auto",), name="a"))


def test_a_job_has_a_name_that_every_engine_takes() -> None:
    for name, label in (
        ("digits_mlp", "digits-mlp"),
        ("7B run", "train-7b-run"),
        ("训练", "train"),
        ("A" * 60, "a" * 40),
    ):
        assert name_of(read_recipe(RECIPE, [f'name="{name}"'])) == label
