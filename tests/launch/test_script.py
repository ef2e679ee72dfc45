"""`paddle-dp launch`: any script on N ranks, with the supervision of a training."""

import faulthandler
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.cli import main
from paddle_dp.errors import UsageError
from paddle_dp.launch import script_rank
from paddle_dp.launch.command import SCRIPT_RANK, Job, LaunchPlan, argv, environment
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.rank_process import is_well
from paddle_dp.launch.script_rank import execute
from paddle_dp.mesh.heartbeat import StatusTable, heartbeat, on_board
from paddle_dp.recipe.folder import claim
from tests.house.command_service import command_line
from tests.house.programs import run_program
from tests.ranks import run_ranks

CPU = Machine(kind="cpu", devices=(), cores=2)
SUM = """
import sys
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
total = paddle.to_tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("total", float(total[0]), sys.argv[1:], __name__, flush=True)
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("rank 1 cannot")
if "--leave" in sys.argv:
    import os

    os._exit(0)
if "--fail" in sys.argv:
    dist.barrier()
"""
TRAINING = """
import os, signal
from pathlib import Path
import numpy as np
import paddle
from paddle_dp import Callback, Trainer, join

class Kill(Callback):
    def step(self, moment):
        if moment.progress.step == 5 and os.environ["PADDLE_TRAINER_ID"] == "1" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

join(seed=0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = paddle.nn.Linear(4, 2)
trainer = Trainer.of(
    model=model, loss=paddle.nn.CrossEntropyLoss(reduction="none"), folder="runs/own", batch=8, resume="auto",
    optimizer=paddle.optimizer.Adam(1e-2, parameters=model.parameters()),
    train=[(row, int(row.sum() > 0)) for row in x],
    callbacks=[{"use": "checkpoint", "every": "2 steps"}, Kill()],
)
print("fit from", trainer.progress.step, flush=True)
print("done at", trainer.fit("1 epoch").step)
"""


def launch(folder, *words, timeout=120):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paddle_dp", "launch", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)


def test_a_script_is_started_with_its_own_arguments():
    plan = plan_of(Job(script=("own.py", "--lr", "3"), ranks=1), CPU)
    words = argv(plan, Path("logs"))
    assert words[-4:] == [str(SCRIPT_RANK), "own.py", "--lr", "3"]
    assert not plan.alone  # its own process, as on many ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script."),
        (["-m", "no_such.module"], "no module 'no_such'"),
        (["recipe.yaml"], "is a recipe, not a script: paddle-dp train recipe.yaml"),
    ],
)
def test_what_is_no_script_is_refused_before_anything_starts(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(SystemExit) as ending:
        main(["launch", *words])
    assert ending.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_script_runs_as_by_python_and_its_traceback_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    script = tmp_path / "own.py"
    script.write_text("import sys\nassert __name__ == '__main__'\nassert sys.argv[1:] == ['-x']\n1 / 0\n")
    error = execute([str(script), "-x"])
    assert isinstance(error, ZeroDivisionError)
    assert error.__traceback__.tb_frame.f_code.co_filename == str(script)


@pytest.mark.parametrize(("end", "well"), [("0", True), ("", True), ("3", False), ("'no'", False)])
def test_sys_exit_with_0_is_well(tmp_path, monkeypatch, end, well):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    script = tmp_path / "own.py"
    script.write_text(f"import sys; sys.exit({end})")
    assert is_well(execute([str(script)])) is well


def test_only_the_training_in_a_script_is_watched(monkeypatch):
    board = StatusTable(1)
    [(name, path)] = board.variables.items()
    monkeypatch.setenv(name, path)
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)
    board.give(heartbeat)
    try:
        heartbeat.enter("unwatched")
        heartbeat.detach()
        heartbeat.step = 7
        with on_board():
            heartbeat.enter("forward")
            assert (board.read(0).phase, board.read(0).step) == ("forward", 7)
        assert board.read(0).phase == "unwatched"
        with on_board():
            pass
        heartbeat.enter("data")  # what a script does by itself is nobody's business
        assert board.read(0).phase == "unwatched"
    finally:
        heartbeat.detach()
        heartbeat.enter("start")
        heartbeat.step = 0
        board.close()


def test_a_run_with_this_jobs_logs_in_it_does_not_move_aside(tmp_path, monkeypatch):
    (tmp_path / "own" / "logs").mkdir(parents=True)
    (tmp_path / "own" / "metrics.jsonl").touch()
    monkeypatch.setenv("PADDLE_LOG_DIR", str(tmp_path / "own" / "logs"))
    with pytest.raises(UsageError, match="this job's logs are in it"):
        claim(tmp_path / "own", None)
    assert (tmp_path / "own" / "metrics.jsonl").exists()


def test_the_environment_of_a_script_is_that_of_a_training():
    script, training = (
        environment(LaunchPlan(job=job, machine=CPU, ranks=2), {"A": "b"})
        for job in (Job(script=("x.py",)), Job())
    )
    assert script == training


@pytest.mark.long
def test_a_script_that_knows_nothing_of_us(tmp_path):
    (tmp_path / "own.py").write_text(SUM)
    done = launch(tmp_path, "--ranks", "2", "own.py", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert "total 3.0 ['--lr', '3'] __main__" in done.stdout
    assert (tmp_path / "runs" / "own.launch" / "logs" / "attempt-001" / "workerlog.1").exists()
    as_module = launch(tmp_path, "--ranks", "2", "-m", "own", "--leave")
    assert as_module.returncode == 0, as_module.stderr


@pytest.mark.long
def test_the_first_cause_is_last_on_the_screen(tmp_path):
    (tmp_path / "own.py").write_text(SUM)
    done = launch(tmp_path, "--ranks", "2", "own.py", "--fail")
    assert done.returncode == 1
    assert "ValueError: rank 1 cannot\nrank 1 of 2 on" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.long
def test_a_restarted_script_with_a_trainer_goes_on(tmp_path):
    (tmp_path / "own.py").write_text(TRAINING)
    done = launch(tmp_path, "--ranks", "2", "--restarts", "1", "own.py")
    assert done.returncode == 0, done.stderr
    assert re.findall("fit from (\\d+)", done.stdout) == ["0", "4"]
    assert "done at 8" in done.stdout
    assert "rank 1 of 2 on" in done.stderr and "SIGKILL in callbacks after step 5 (Kill.step)" in done.stderr


FLEET = """
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import ColumnParallelLinear

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(1)
model = fleet.distributed_model(ColumnParallelLinear(8, 32, gather_output=True, has_bias=True))
print("shape", model(paddle.ones([4, 8])).shape, flush=True)
"""


def status_of(script: str, logs: str) -> int:
    """In a rank: with which status a script ends where the job has no --cpu-bridge; the logs are in this folder."""
    os.environ |= {"PADDLE_DP_OPTIONS": "{}", "PADDLE_DP_JOB": f"{os.getppid()}-1", "PADDLE_LOG_DIR": logs}
    sys.argv = ["script_rank.py", script]
    with pytest.raises(SystemExit) as end:
        script_rank.main()
    faulthandler.cancel_dump_traceback_later()  # rank 1 may still need rank 0
    return end.value.code


def error_through(*modules: str) -> BaseException:
    """An error that the last of these modules raises, each called by the one before it."""
    text = "def call(rest):\n    if not rest: raise AssertionError\n    rest[0](rest[1:])"
    functions = []
    for module in modules:
        exec(text, variables := {"__name__": module})
        functions.append(variables["call"])
    try:
        functions[0](functions[1:])
    except AssertionError as error:
        return error
    raise RuntimeError


def test_only_an_error_of_paddle_s_communication_in_fleet_s_layers_misses_the_bridge():
    fleet, communication = "paddle.distributed.fleet.layers.mpu", "paddle.distributed.communication.group"
    assert script_rank.misses_bridge(error_through("__main__", fleet, communication))
    assert script_rank.misses_bridge(error_through("__main__", fleet))
    assert not script_rank.misses_bridge(error_through("__main__", fleet, "__main__"))
    assert not script_rank.misses_bridge(error_through("__main__", fleet, "__main__", "paddle.nn.functional"))
    assert not script_rank.misses_bridge(error_through("__main__", communication))


def test_a_fleet_script_runs_as_it_is_on_cpus_with_the_bridge(tmp_path):
    """Without it Paddle refuses, and this test is superfluous when it does not."""
    (tmp_path / "fleet_script.py").write_text(FLEET)
    assert run_ranks(status_of, 2, str(tmp_path / "fleet_script.py"), str(tmp_path)) == [1, 1]
    for rank in range(2):
        failure = json.loads((tmp_path / f"failure.rank-{rank}.json").read_text())
        assert "now, but this is cpu" in failure["message"]
        assert sys.version_info < (3, 11) or "`paddle-dp launch --cpu-bridge`" in failure["traceback"]
    words = ("launch", "--ranks", "2", "--cpu-bridge", "fleet_script.py")
    assert "Size([4, 32])" in run_program(*command_line(), *words, folder=tmp_path).stdout
