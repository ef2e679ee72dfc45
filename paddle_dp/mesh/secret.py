"""The key of a job's ranks, by which they identify each other and which no other user of their machines knows.

`paddle-dp` makes a key for each attempt, and passes it like other secrets (launch/privately.py), not on a command line
or in a file. Without `paddle-dp` the key is derived from the user's secret (PADDLE_DP_SECRET), or, on one machine, made
by rank 0, and the other ranks read it from its memory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_dp.errors import JobError, UsageError
from paddle_dp.mesh.environment import Environment, memory_file

SECRET, SECRET_FILE = "PADDLE_DP_SECRET", "PADDLE_DP_SECRET_FILE"  # set by the user
VARIABLE = "PADDLE_DP_RANKS_SECRET"  # set by a supervisor for its ranks
SEAL = "PADDLE_DP_SEAL"  # =off: messages between machines carry no code
NAME = "paddle_dp/key"  # in the store: the path of rank 0's key
BYTES = 32
_keys: list[bytes] = []


def users_secret(variables: Mapping[str, str]) -> bytes:
    """Returns the user's secret: PADDLE_DP_SECRET, or the content of the file PADDLE_DP_SECRET_FILE; b"" without both.

    Raises UsageError if the file cannot be read, or is empty.
    """
    if value := variables.get(SECRET):
        return value.encode()
    path = variables.get(SECRET_FILE)
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"{SECRET_FILE}={path} cannot be read ({error.strerror}).") from error
    if not secret:
        raise UsageError(
            f"{SECRET_FILE}={path} is empty. Put one line of random letters in it, on all nodes."
        )
    return secret


def code_of(key: bytes, *chunks: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the joined `chunks`, which only holders of the key can make."""
    return hmac.digest(key, b"".join(chunks), "sha256")


def seals() -> bool:
    """True if messages between machines carry a code, which only holders of the key can make."""
    return os.environ.get(SEAL, "").lower() not in ("off", "0", "no", "false")


def job_key(store: Any) -> bytes:
    """Returns the key of this job's ranks; all ranks must call it. b"" if they share only a network. `store` is the
    job's, of Paddle. Raises JobError if another user has written into it."""
    if not _keys:
        digits = os.environ.pop(VARIABLE, "")
        _keys.append(bytes.fromhex(digits) if digits else _agreed(store))
    return _keys[0]


def _agreed(store: Any) -> bytes:
    here = Environment.read()
    if secret := users_secret(os.environ):
        return code_of(secret, b"ranks ", (here.master or "").encode())
    if not here.single_machine or not hasattr(os, "memfd_create"):
        if here.rank == 0:
            danger = "any program that reaches their ports can join them"
            print(f"the ranks share no secret: {danger}. Set {SECRET} on all nodes.", flush=True)
        return b""
    if here.rank == 0:
        key = secrets.token_bytes(BYTES)
        store.set(NAME, memory_file("key", key)[1])
        return key
    path = bytes(store.get(NAME)).decode(errors="replace")
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if os.fstat(file).st_uid == os.geteuid() and len(key := os.pread(file, BYTES + 1, 0)) == BYTES:
                return key
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise JobError(f"rank {here.rank} cannot read rank 0's key at {path}: {error}.") from error
    raise JobError(
        f"another process than rank 0 has written into the job's store: {path} holds no key of rank 0."
    )


class JobStore:
    """The job's store with names that only its ranks know, so that strangers cannot change the ranks' values: Paddle's
    store authenticates no client, and lists no names."""

    def __init__(self, store: Any):
        self._store, self._key = store, job_key(store)

    def set(self, name: str, value: str) -> None:
        self._store.set(self._hidden(name), value)

    def get(self, name: str) -> bytes:
        """Waits for the value."""
        return bytes(self._store.get(self._hidden(name)))

    def add(self, name: str, number: int) -> int:
        return int(self._store.add(self._hidden(name), number))

    def _hidden(self, name: str) -> str:
        if not self._key:
            return name
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=16).hexdigest()


def job_store() -> JobStore:
    """Returns the job's store, which this process has joined."""
    from paddle.base import core

    return JobStore(core.create_or_get_global_tcp_store())
