"""Reads this process's rank in the job from the launcher's environment variables. Does not import paddle."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paddle_dp.errors import JobError, LostPeerError, UsageError

# The folder in memory of a job's checkpoints, which its supervisor has made and removes.
MEMORY = "PADDLE_DP_MEMORY"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One process's rank and the job's size and master, as `paddle.distributed.launch` sets them."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    master: str | None = None
    single_machine: bool = True

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Reads the launcher's variables; a process started without it is rank 0 of 1.

        Raises UsageError when the variables contradict each other.
        """
        env = os.environ if variables is None else variables
        rank, ranks = int(env.get("PADDLE_TRAINER_ID", 0)), int(env.get("PADDLE_TRAINERS_NUM", 1))
        if not 0 <= rank < ranks:
            raise UsageError(
                f"PADDLE_TRAINER_ID={rank} does not fit PADDLE_TRAINERS_NUM={ranks}: leftovers of another job? "
                "Unset the PADDLE_* variables, or start with paddle-dp train, which ignores them."
            )
        local = int(env.get("PADDLE_RANK_IN_NODE", env.get("PADDLE_LOCAL_RANK", rank)))
        if "PADDLE_LOCAL_SIZE" in env:
            alone = int(env["PADDLE_LOCAL_SIZE"]) == ranks
        else:  # paddle.distributed.spawn. Pods with one address may have separate processes and files: loopback only.
            endpoints = env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
            alone = ranks == 1 or (len(endpoints) == ranks and all(e.startswith("127.") for e in endpoints))
        master = env.get("PADDLE_MASTER")
        return cls(rank=rank, ranks=ranks, local_rank=local, master=master, single_machine=alone)


def memory_file(name: str, content: bytes) -> tuple[int, str]:
    """Makes a file in memory, in no file system and for this user alone; returns its descriptor, and the path at which
    other processes find it until this one closes it."""
    file = os.memfd_create(f"paddle_dp-{name}")
    os.fchmod(file, 0o600)
    os.write(file, content)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def rank_host() -> str:
    """Returns this rank's address for the other ranks, from the launcher's variable."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rsplit(":", 1)[0]


def wait_for_port(address: str, patience: float = 300.0) -> None:
    """Returns once a socket listens at `address` ("host:port").

    Paddle's store sleeps 3 s when rank 1 connects before rank 0 listens (no FLAG changes it); polling every 20 ms
    saves most of that at every start. Raises LostPeerError after `patience` seconds.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + patience
    while time.monotonic() < end:
        with socket.socket() as probe:
            probe.settimeout(2.0)
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)
    raise LostPeerError(
        f"rank 0 did not open its store at {address} within {patience:g} s: did it start? See its log."
    )


def check_port(address: str) -> None:
    """Raises JobError when another program listens at the port of `address`, where this rank will open the store.

    Paddle's store would abort the process in C++ (3.3.1: an assertion of libuv).
    """
    try:
        bound_socket("", int(address.rpartition(":")[2])).close()
    except OSError as error:
        raise JobError(
            f"rank 0 cannot open its store at {address}: {error.strerror}. Another program took the port after the "
            "launcher had chosen it: start the job again. `paddle-dp train` uses ports outside of the range from which "
            "Linux hands out free ones."
        ) from error


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to a port, 0 for any, with SO_REUSEADDR like Paddle's store: a port in TIME_WAIT is free.

    Raises OSError for a port in use.
    """
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
