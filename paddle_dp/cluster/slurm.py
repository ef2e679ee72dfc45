"""A batch script for Slurm."""

from __future__ import annotations

import os
import shlex

from paddle_dp.cluster.request import EARLY, ClusterRequest
from paddle_dp.errors import UsageError

_SCRIPT = """\
#!/usr/bin/env bash
# {title}
# sbatch THIS_FILE [KEY=VALUE …], in the folder from which {recipe} is found, or with --chdir=FOLDER.
# The run's folder must be on a disk that all nodes share. To stop it for good, with a checkpoint:
#   scontrol update JobId=JOB Requeue=0; scancel --signal=USR1 JOB
# Add what your cluster wants: --partition, --account; some take --gres in place of --gpus-per-node.
{options}
set -uo pipefail

# Here: `module load …`, or `. /path/to/venv/bin/activate` (sbatch --export=NONE brings no PATH).
if ! command -v paddle-dp > /dev/null; then
    echo "paddle-dp is not on the PATH of $(hostname): load its module, or activate its environment in the script" >&2
    exit 2
fi

export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}} # srun does not inherit it since Slurm 22.05
out={folder}
newest() {{ # the newest checkpoint, "" without one
    find "$out/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -n 1
}}
before=$(newest)
resume=()
if [ -n "$before" ]; then
    resume=(--resume)
fi

# One task on each node, which starts the node's ranks itself; Slurm says which nodes there are.
srun {command} "$@" --nodes auto --output-dir "$out" ${{resume[@]+"${{resume[@]}}"}}
status=$?

again=0
if [ "$status" = 75 ] || {{ [ "$status" = 138 ] && [ -n "$before" ]; }}; then
    again=1 # stopped with a checkpoint; or in a later turn before its first update: the time limit
elif [ "$status" != 0 ] && [ "$status" != 2 ] && [ "$(newest)" != "$before" ]; then
    again=1 # a task was lost, and srun starts none again; the training had come further
fi
if [ "$again" = 1 ]; then
    turns=${{SLURM_RESTART_COUNT:-0}}
    if [ "$turns" -ge "${{TURNS:-100}}" ]; then
        reason="it had $turns turns before this one (TURNS)"
    elif [[ $(scontrol show job "$SLURM_JOB_ID") == *Requeue=0* ]]; then
        reason="Requeue=0"
    else
        scontrol requeue "$SLURM_JOB_ID"
        exit "$status"
    fi
    echo "job $SLURM_JOB_ID is not put into the queue again: $reason. A job with --output-dir $out goes on" >&2
fi
exit "$status"
"""


def slurm(request: ClusterRequest, title: str) -> str:
    """Returns a script for `sbatch`: it stops with a checkpoint before the time limit, is requeued, and goes on.
    Raises UsageError for `restarts`."""
    if request.restarts is not None:
        raise UsageError(
            f"--restarts {request.restarts}: under Slurm leave it out. srun does not start a lost task again, so the "
            "script requeues the whole job (TURNS=100 times at most)."
        )
    # Slurm may send the signal EARLY s sooner; half of the rest is for the start and the first updates.
    grace = min(request.grace, (request.seconds - EARLY) // 2)
    options = {
        "job-name": request.name, "nodes": request.nodes, "ntasks-per-node": 1, "cpus-per-task": request.cpus_of_node,
        **({"gpus-per-node": request.gpus} if request.gpus else {}),
        **({"mem": request.memory.removesuffix("i")} if request.memory else {}),
        "time": request.time, "signal": f"USR1@{grace}", "requeue": None,
        "open-mode": "append", "output": "%x-%j.log",
    }  # fmt: skip
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    # bash leaves ~ in quotes, and the training would take it for the home folder: this one, which all nodes share.
    path = os.path.expanduser(request.folder)
    folder = shlex.quote(path) if path else f'"$PWD/runs/{request.name}-$SLURM_JOB_ID"'
    return _SCRIPT.format(
        title=title, options="\n".join(lines), folder=folder, command=request.command(),
        recipe=str(request.recipe).replace("\n", " "),
    )  # fmt: skip
