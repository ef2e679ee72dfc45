"""Manifests of Kubernetes: an Indexed Job with its Service, and the same in a JobSet or a job of Volcano.

Each pod is a node. A pod that is asked to end gets SIGTERM, writes a checkpoint, and leaves with 75.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from paddle_dp.cluster.request import RESTARTS, ClusterRequest, path_in_image
from paddle_dp.errors import UsageError
from paddle_dp.mesh.secret import SECRET

PORT = 29500
CONTAINER = "train"
_MEMORY = 16  # GiB of a pod whose request names none, or for each of its GPUs
_TRIES = 8  # failed pods, without those stopped or taken away; for more than 4 nodes two failures of all
_GROUP = 1000  # any number: a volume that belongs to root becomes writable for this group, which the container joins
Manifest = dict[str, Any]
_ADVICE = """\
The claim must be ReadWriteMany: all pods save into one folder. Image and claim are yours to make;
# the image has the recipe and its code under /work (docker build -f .devcontainer/Containerfile …).
# Add what your cluster wants: a namespace (kubectl -n NAMESPACE), imagePullSecrets, tolerations of GPU nodes.
# NFS ignores fsGroup: there the image's user must be able to write into the claim's folder.
# kubectl delete -f THIS_FILE stops it with a checkpoint, kubectl apply goes on. Delete it before you apply a change."""


def kubernetes(request: ClusterRequest, title: str) -> str:
    """Returns an Indexed Job, and the headless Service by which its pods find the first one (1.29 or newer)."""
    name = _quoted(request.name)
    meeting = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }  # fmt: skip
    service = _manifest("v1", "Service", name, meeting)
    job = _manifest("batch/v1", "Job", name, _indexed(request, f"{name}-0.{name}", subdomain=name))
    return _text(title, "kubectl apply -f THIS_FILE", service, job)


def jobset(request: ClusterRequest, title: str) -> str:
    """Returns a JobSet, which makes the Service itself."""
    name = _quoted(request.name)
    rule = {"name": "typed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = {"spec": _indexed(request, f"{name}-node-0-0.{name}")}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _TRIES, "rules": [rule]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
    }
    manifest = _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)
    return _text(title, "kubectl apply -f THIS_FILE, where JobSet is installed", manifest)


def volcano(request: ClusterRequest, title: str) -> str:
    """Returns a job of Volcano: all pods are scheduled together or none."""
    task = {
        "name": "node", "replicas": request.nodes,
        "policies": [{"exitCode": 2, "action": "AbortJob"}, {"exitCode": 75, "action": "RestartJob"}],
        "template": {"spec": _pod(request, None, [])},
    }  # fmt: skip
    spec = {
        "schedulerName": "volcano", "minAvailable": request.nodes, "maxRetry": _TRIES,
        "plugins": {"svc": [], "env": []},
        "policies": [{"event": event, "action": "RestartTask"} for event in ("PodEvicted", "PodFailed")],
        "tasks": [task],
    }  # fmt: skip
    manifest = _manifest("batch.volcano.sh/v1alpha1", "Job", _quoted(request.name), spec)
    return _text(title, "kubectl apply -f THIS_FILE, where Volcano is installed", manifest)


def _manifest(version: str, kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _indexed(request: ClusterRequest, first: str, subdomain: str | None = None) -> Manifest:
    """The spec of an Indexed Job, whose first pod is reached by the name `first`."""

    def rule_of_exit(action: str, status: int) -> Manifest:
        return {
            "action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [status]}
        }  # fmt: skip

    disruption = [{"type": "DisruptionTarget", "status": _quoted(True)}]
    nodes = {"name": "PADDLE_DP_NODES", "value": _quoted(request.nodes)}
    return {
        "completionMode": "Indexed", "completions": request.nodes, "parallelism": request.nodes,
        "backoffLimit": max(_TRIES, 2 * request.nodes),
        "podFailurePolicy": {
            "rules": [
                rule_of_exit("FailJob", 2),  # another try would say the same
                rule_of_exit("Ignore", 75),  # stopped with a checkpoint, and not done: again, not counted
                {"action": "Ignore", "onPodConditions": disruption},
            ]
        },
        "template": {"spec": {**({"subdomain": subdomain} if subdomain else {}), **_pod(request, first, [nodes])}},
    }  # fmt: skip


def _pod(request: ClusterRequest, first: str | None, variables: list[Manifest]) -> Manifest:
    folder = PurePosixPath(request.folder or f"/runs/{request.name}")
    if not folder.is_absolute() or folder.parent == PurePosixPath("/"):
        raise UsageError(
            f"--output-dir {folder}: the claim '{request.claim}' is mounted at the folder above it, so give an "
            f"absolute path such as /runs/{request.name}."
        )
    master = f" --master {first}:{PORT}" if first else ""
    number = RESTARTS if request.restarts is None else request.restarts
    restarts = f" --restarts {number}" if number else ""
    command = replace(request, recipe=path_in_image(request.recipe)).command()
    script = f"""\
resume=()
if find "$OUT/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | grep -q .; then resume=(--resume); fi
exec {_literal(command)} --nodes auto{master}{restarts} --output-dir "$OUT" "${{resume[@]}}"
"""
    secret = {"secretKeyRef": {"name": "paddle-dp", "key": "secret", "optional": True}}
    gpus = {"nvidia.com/gpu": request.gpus} if request.gpus else {}
    cpus, memory = _quoted(request.cpus_of_node), request.memory or f"{_MEMORY * max(1, request.gpus)}Gi"
    return {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": request.grace,
        "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [
            {
                "name": CONTAINER, "image": _quoted(request.image), "workingDir": "/work", "command": ["bash", "-c"],
                "args": [LiteralScalarString(script)],
                "env": [
                    {"name": "OUT", "value": _quoted(_literal(str(folder)))}, *variables,
                    {"name": SECRET, "valueFrom": secret},
                ],
                "resources": {"requests": {"cpu": cpus, "memory": memory}, "limits": {"memory": memory, **gpus}},
                "volumeMounts": [
                    {"name": "runs", "mountPath": _quoted(folder.parent)}, {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": _quoted(request.claim)}},
            # A container's own has 64 MiB, too little for NCCL.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
        ],
    }  # fmt: skip


def _quoted(value: object) -> DoubleQuotedScalarString:
    """A text that every reader of YAML takes for one: `on` and `1:20` are none in YAML 1.1."""
    return DoubleQuotedScalarString(str(value))


def _literal(text: str) -> str:
    """Doubles each $, since Kubernetes replaces $(NAME) and $$ in arguments and variables."""
    return text.replace("$", "$$")


def _text(title: str, usage: str, *manifests: Manifest) -> str:
    """The manifests as YAML, below a comment."""
    writer = YAML(typ="rt", pure=True)
    writer.width, writer.default_flow_style = 4096, False
    writer.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    writer.dump_all(list(manifests), text)
    return f"# {title}\n# {usage}. {_ADVICE}\n{text.getvalue().rstrip()}\n"
