"""A process's place, read from the launcher's variables."""

import os
import socket
import threading
import time

import pytest

from paddle_dp.errors import JobError, UsageError
from paddle_dp.mesh import join
from paddle_dp.mesh.environment import Environment, check_port, wait_for_port
from paddle_dp.mesh.mesh import stream_seed
from tests.ranks import run_ranks


def test_a_plain_process_is_rank_0_of_1():
    assert Environment.read({}) == Environment(rank=0, ranks=1, local_rank=0, master=None)


def test_the_launchers_variables():
    variables = {
        "PADDLE_TRAINER_ID": "5",
        "PADDLE_TRAINERS_NUM": "8",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_MASTER": "h:1",
    }
    assert Environment.read(variables) == Environment(
        rank=5, ranks=8, local_rank=1, master="h:1", single_machine=False
    )


@pytest.mark.parametrize(
    ("endpoints", "single"),
    [("127.0.0.1:1,127.0.0.1:2", True), ("10.0.0.1:1,10.0.0.1:2", False), ("127.0.0.1:1", False)],
)
def test_ranks_on_loopback_are_on_one_machine_without_a_local_size(endpoints, single):
    """paddle.distributed.spawn sets no PADDLE_LOCAL_SIZE; pods of one host may share an address and nothing else."""
    variables = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": endpoints}
    assert Environment.read(variables).single_machine is single
    assert not Environment.read({**variables, "PADDLE_LOCAL_SIZE": "1"}).single_machine


def test_leftovers_of_another_job_are_refused():
    with pytest.raises(UsageError, match="PADDLE_TRAINER_ID=3 does not fit PADDLE_TRAINERS_NUM=1"):
        Environment.read({"PADDLE_TRAINER_ID": "3"})


def test_waiting_for_a_port_that_opens_late():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    threading.Timer(0.2, server.listen).start()
    began = time.monotonic()
    wait_for_port(address, patience=5)
    assert 0.15 < time.monotonic() - began < 2
    server.close()


def test_a_port_that_never_opens_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(JobError, match=address):
            wait_for_port(address, patience=0.1)


def test_own_seeds_differ_and_last():
    seeds = {stream_seed(seed, rank) for seed in range(20) for rank in range(20)}
    assert len(seeds) == 400
    assert stream_seed(0, 1) == stream_seed(0, 1)


def test_a_port_that_another_program_took_is_named():
    """Paddle's store would abort the process."""
    with socket.socket() as other:
        other.bind(("", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        other.listen()
        with pytest.raises(JobError, match=f"cannot open its store at {address}: Address already in use"):
            check_port(address)
    check_port(address)


def stolen(port):
    """Joins a job whose port another program uses."""
    os.environ["PADDLE_MASTER"] = f"127.0.0.1:{port}"
    join()


def test_a_job_whose_port_was_taken_says_so():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AssertionError, match=rf"JobError: rank 0 cannot open its store at \S+:{port}"):
            run_ranks(stolen, 2, port)
