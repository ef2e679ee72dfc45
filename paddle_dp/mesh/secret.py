"""What the ranks of a job know and no other user of their machines: a key, by which each knows the others.

`paddle-dp` makes one for each attempt, and hands it over as it does the secrets among the environment
(launch/privately.py): not in the words of a command, and not through a file. Without `paddle-dp` it is made of the
user's own secret (PADDLE_DP_SECRET), or, on one machine, by rank 0, from whose memory the other ranks read it.
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
from paddle_dp.mesh.environment import Environment

SECRET, SECRET_FILE = "PADDLE_DP_SECRET", "PADDLE_DP_SECRET_FILE"  # the user's own
VARIABLE = "PADDLE_DP_RANKS_SECRET"  # what a supervisor gives its ranks
SEAL = "PADDLE_DP_SEAL"  # =off: messages between machines carry no code
NAME = "paddle_dp/key"  # in the store: where rank 0's key can be read
BYTES = 32
_keys: list[bytes] = []


def users_secret(variables: Mapping[str, str]) -> bytes:
    """The user's secret: PADDLE_DP_SECRET, or what is in the file PADDLE_DP_SECRET_FILE; empty where there is neither.

    Raises UsageError where the file cannot be read, or is empty.
    """
    if word := variables.get(SECRET):
        return word.encode()
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


def proof(key: bytes, *chunks: bytes) -> bytes:
    """HMAC-SHA256 of `chunks`, one after the other: what only holders of the key can make."""
    return hmac.digest(key, b"".join(chunks), "sha256")


def seals() -> bool:
    """Whether messages between machines carry a code, which only holders of the key can make."""
    return os.environ.get(SEAL, "").lower() not in ("off", "0", "no", "false")


def job_key(store: Any) -> bytes:
    """The key of this job's ranks, which all must ask for; empty where they have nothing in common but a network.

    `store`: the job's, of Paddle. Raises JobError where another user has written into it.
    """
    if not _keys:
        word = os.environ.pop(VARIABLE, "")
        _keys.append(bytes.fromhex(word) if word else _agreed(store))
    return _keys[0]


def _agreed(store: Any) -> bytes:
    here = Environment.read()
    if secret := users_secret(os.environ):
        return proof(secret, b"ranks ", (here.master or "").encode())
    if not here.single_machine or not hasattr(os, "memfd_create"):
        if here.rank == 0:
            print(
                f"the ranks share no secret: whoever reaches their ports can join them. Set {SECRET} on all nodes.",
                flush=True,
            )
        return b""
    if here.rank == 0:
        key = secrets.token_bytes(BYTES)
        file = os.memfd_create("paddle_dp-key")
        os.fchmod(file, 0o600)
        os.write(file, key)
        store.set(NAME, f"/proc/{os.getpid()}/fd/{file}")
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
    raise JobError(f"somebody else than rank 0 has written into the job's store: {path} holds no key of it.")


class JobStore:
    """The job's store under names that only its ranks know: whoever else writes into it changes nothing of theirs.

    Paddle's store asks nobody, and lists no names.
    """

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
    """The job's store, which this process has joined."""
    from paddle.base import core

    return JobStore(core.create_or_get_global_tcp_store())
