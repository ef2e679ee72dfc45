"""What ranks and nodes need to meet: the host's name, an interface, free ports, the master."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paddle_dp.doctor.finding import Finding
from paddle_dp.errors import UsageError
from paddle_dp.launch.network import BLOCK, BLOCKS, FIRST_PORT, free_blocks, meet
from paddle_dp.mesh.doors import close_to_all

NAME = "interface"
LAST_PORT = FIRST_PORT + BLOCK * BLOCKS - 1
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a job as --nodes, --master and --node-rank say them."""

    nodes: int = 1
    master: str | None = None
    node_rank: int | None = None

    @property
    def several(self) -> bool:
        return self.nodes > 1


def host_name(several: bool) -> Finding:
    """Whether this host's name has an address, and one that others can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        todo = f"paddle-dp does without; other programs may not. Write «127.0.0.1 {name}» into /etc/hosts."
        return Finding(name="host name", found=f"{name} has no address ({error})", state="look", todo=todo)
    found = f"{name} is {address}"
    if address.startswith("127.") and several:
        return Finding(name="host name", found=f"{found} (Debian's way); nodes get that of the route")
    return Finding(name="host name", found=found)


def interface(nodes: Nodes, variables: Mapping[str, str]) -> Finding:
    """By which interface this node is reached; Paddle's launcher alone would take it from the host's name."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        names = variables.get(variable, "").lstrip("^=").split(",")
        if missing := [name for name in names if name and not any(one.startswith(name) for one in here)]:
            todo = f"Unset it, or name one of: {', '.join(here)}."
            found = f"{variable}={variables[variable]}, and there is no {missing[0]} here"
            return Finding(name=NAME, found=found, state="mend", todo=todo)
    if not nodes.several:
        return _loopback()
    try:
        meeting = meet(str(nodes.master), nodes.node_rank == 0)
    except UsageError as error:
        return Finding(name=NAME, found=f"no way to meet at {nodes.master}", state="mend", todo=str(error))
    return Finding(name=NAME, found=f"{meeting.interface or 'unknown'}, {meeting.host}, to {meeting.master}")


def _loopback() -> Finding:
    """Whether ranks of this machine can meet, and their ports be closed to other machines (mesh/doors.py)."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            socket.create_connection(probe.getsockname(), timeout=2.0).close()
        except OSError as error:
            todo = f"Bring it up: ip link set lo up ({error})"
            return Finding(name=NAME, found="127.0.0.1 cannot be used", state="mend", todo=todo)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        except OSError:
            todo = (
                f"Others can reach a job's ports: close {FIRST_PORT} to {LAST_PORT} (tying needs Linux 5.7)."
            )
            return Finding(name=NAME, found="127.0.0.1; ports cannot be tied to it", state="look", todo=todo)
        try:
            close_to_all(probe)
        except OSError as error:
            todo = f"Other users of this machine can connect to Paddle's store while a job runs ({error})."
            return Finding(
                name=NAME, found="127.0.0.1, closed to other machines only", state="look", todo=todo
            )
    return Finding(name=NAME, found="127.0.0.1, closed to other machines and users")


def ports() -> Finding:
    """Whether there are ports for a job."""
    free = free_blocks()
    found = f"{FIRST_PORT} to {LAST_PORT}: room for {free} job{'s' * (free != 1)} of {BLOCKS}"
    if not free:
        todo = "Other programs listen there (ss -ltnp). Jobs start on ports of Linux's own choice, and may lose them."
        return Finding(name="ports", found=found, state="look", todo=todo)
    return Finding(name="ports", found=found)
