"""What engines of clusters say of a job's nodes, and what of it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_dp import Trainer
from paddle_dp.cli.options import node_options
from paddle_dp.cli.training import evaluate
from paddle_dp.errors import UsageError
from paddle_dp.mesh.allocation import allocation, first_host

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,12],login", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_NUM_TASKS": "5",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}  # fmt: skip
MPICH = {"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "VC_WORKER_NUM": "2"}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "PADDLE_DP_NODES": "2"}
PADDLE_JOB = {"PADDLE_NNODES": "2", "PADDLE_MASTER": "10.1.2.3:36543", "HOSTNAME": "bert-worker-1"}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (
        *SLURM,
        *OPEN_MPI,
        *MPICH,
        *VOLCANO,
        *INDEXED,
        *PADDLE_JOB,
        "OMPI_MCA_orte_bound_at_launch",
        "SLURM_JOB_NUM_NODES",
    ):
        monkeypatch.delenv(name, raising=False)

    def read(variables: dict[str, str], *words: Any, **more: Any) -> tuple[Any, ...]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        fields = node_options(*words, **more)
        return tuple(fields.get(name) for name in ("least_nodes", "nodes", "master", "node_rank"))

    return read


@pytest.mark.parametrize(
    ("variables", "master", "nodes"),
    [
        (SLURM, None, (None, 5, "gpu07:24711", 2)),
        ({**OPEN_MPI, **SLURM}, "a:1", (None, 2, "a:1", 1)),  # mpirun within an allocation of Slurm
        (OPEN_MPI, "10.0.0.1:29500", (None, 2, "10.0.0.1:29500", 1)),
        (MPICH, "10.0.0.1:29500", (None, 3, "10.0.0.1:29500", 0)),
        (VOLCANO, None, (None, 2, "job-worker-0.job:29500", 1)),
        (INDEXED, "job-0.job:29500", (None, 2, "job-0.job:29500", 1)),
        (PADDLE_JOB, None, (None, 2, "10.1.2.3:36543", 1)),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, None,
         (None, 1, None, None)),
    ],
)  # fmt: skip
def test_auto_takes_what_the_engine_says(options, variables, master, nodes):
    assert options(variables, "auto", master, None) == nodes


def test_auto_may_shrink_and_an_option_counts_more(options):
    assert options(SLURM, "3:auto", "b:9", 2, may_shrink=True) == (3, 5, "b:9", 2)
    with pytest.raises(UsageError, match=r"--nodes 3:5: give a number"):
        options(SLURM, "3:auto", None, None)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"), ("gpu7,gpu8", "gpu7"), ("gpu[07-09,12],login", "gpu07"), ("login,gpu[1-2]", "login"),
        ("rack[2-3]n[05,7]", "rack2n05"), ("a[1,3]-ib.cluster", "a1-ib.cluster"), ("n-[1-2]", "n-1"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({}, ("auto", None, None), r"the environment tells of no task .*give --nodes N, --node-rank R"),
        ({"JOB_COMPLETION_INDEX": "0"}, ("auto", None, None), r"set PADDLE_DP_NODES in the pod, too"),
        (SLURM, ("auto", None, 0), r"--node-rank 0 contradicts Slurm, which says 2"),
        (OPEN_MPI, ("auto", None, None), r"Open MPI does not say where node 0 is: give --master HOST:PORT"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "10"}, ("auto", None, None),
         r"Slurm has started 10 tasks on 5 nodes, .*\(--ntasks-per-node=1\)"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (None, None, None),
         r"Open MPI has started this command 4 times on 1 node, .*one task on each node, or --nodes 1 if each"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("auto", "a:1", None),
         r"4 tasks on 1 node, .*\(--map-by ppr:1:node\), or give --nodes 1 if each is a separate job"),
        (SLURM, (None, None, None), r"on 5 nodes, and each would work alone: give --nodes auto"),
        (VOLCANO, (None, None, None), r"Volcano has started this command on 2 nodes"),
        ({**VOLCANO, "VC_SERVER_HOSTS": "a,b"}, ("auto", None, None), r"Volcano names 2 lists of hosts"),
        ({**SLURM, "SLURM_NODEID": "?"}, ("auto", None, None), r"variables cannot be understood \(ValueError"),
        ({**PADDLE_JOB, "HOSTNAME": "laptop"}, ("auto", None, None), r"variables cannot be understood"),
        ({}, ("many", None, None), r"--nodes many: give a number"),
        ({**INDEXED, "PADDLE_DP_NODES": "1"}, ("auto", None, None), r"ValueError: number 1 of 1 nodes"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, ("auto", None, None), r"variables cannot be understood"),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "0", "PADDLE_DP_NODES": "1"}, ("2:auto", None, None),
         r"--nodes 2:auto: Kubernetes has given this job 1 node"),
    ],
)  # fmt: skip
def test_what_is_unclear_or_contradicts_is_refused(options, variables, words, message):
    with pytest.raises(UsageError) as caught:
        options(variables, *words)
    assert re.search(message, str(caught.value)), caught.value


def test_a_task_that_open_mpi_binds_to_a_core_is_told(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = {**OPEN_MPI, "OMPI_MCA_orte_bound_at_launch": "1"}
    sentence = (
        "Open MPI has bound this task, with all its ranks, to 1 of 16 processors: mpirun --bind-to none"
    )
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    for cores, variables, printed in ((1, bound, True), (16, bound, False), (1, OPEN_MPI, False)):
        monkeypatch.delenv("OMPI_MCA_orte_bound_at_launch", raising=False)
        monkeypatch.setattr("paddle_dp.launch.machine.cores", lambda cores=cores: cores)
        options(variables, "auto", "a:1", None)
        assert (sentence in capsys.readouterr().err) == printed


def test_the_shell_of_an_allocation_is_no_task(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `salloc -N2` starts it on the first node: `--nodes auto` there would train on one node."""
    shell = {**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
             "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}  # fmt: skip
    with pytest.raises(UsageError, match=r"no task of Slurm.*Start it by srun"):
        options(shell, "auto", None, None)
    options(shell, None, None, None)
    assert "Slurm has given this job 2 nodes, and this command works on one: srun" in capsys.readouterr().err
    options(shell, "1", None, None)
    options({**shell, "SLURM_JOB_NUM_NODES": "1"}, None, None, None)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    assert not capsys.readouterr().err


def test_one_job_a_task_is_asked_for_explicitly_and_leftovers_say_nothing(options):
    assert options(SLURM, "1", None, None) == (None, 1, None, None)
    assert options(PADDLE_JOB, "1", None, None) == (None, 1, None, None)
    assert allocation(PADDLE_JOB) is None
    assert (
        allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}) is None
    )  # a batch script, before srun


@pytest.mark.parametrize(("nodes", "told"), [("2", True), ("2:4", True), ("1", False), ("", False)])
def test_a_command_that_leaves_out_nodes_of_paddle_s_launcher_says_so(
    nodes: str, told: bool, options: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pod trained alone, silently. With --nodes the variable counts, or is left over."""
    options({**PADDLE_JOB, "PADDLE_NNODES": nodes}, None, None, None)
    assert (
        f"PADDLE_NNODES={nodes} is set, and this command works on one node" in capsys.readouterr().err
    ) == told
    options({**PADDLE_JOB, "PADDLE_NNODES": nodes}, "1", None, None)
    assert not capsys.readouterr().err


def test_evaluate_and_a_script_that_an_engine_starts_twice_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(UsageError, match="on 5 nodes, and each would work alone: start it once"):
        evaluate(tmp_path)
    # srun -n2, on one node: --nodes is no option here
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_NODEID", "0")
    with pytest.raises(
        UsageError, match="2 times on 1 node, and each would work alone: start it once, on one"
    ):
        evaluate(tmp_path)
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    model = paddle.nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match="each would work alone: start the script by `paddle-dp launch --nodes"
    ):
        Trainer.of(model=model, train=[([0.0, 0.0], 0)], loss="cross_entropy", batch=1, optimizer="sgd")
