"""Checks that ranks and nodes can meet: host name, interface, free ports, master."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paddle_dp.doctor.finding import DoctorCheck
from paddle_dp.errors import UsageError
from paddle_dp.launch.network import BLOCK, BLOCKS, FIRST_PORT, free_blocks, meet
from paddle_dp.mesh.doors import close_to_all

NAME = "interface"
LAST_PORT = FIRST_PORT + BLOCK * BLOCKS - 1
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a job, as given by --nodes, --master and --node-rank."""

    nodes: int = 1
    master: str | None = None
    node_rank: int | None = None

    @property
    def is_multi_node(self) -> bool:
        return self.nodes > 1


def host_name(is_multi_node: bool) -> DoctorCheck:
    """Checks that this host's name has an address that other nodes can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        todo = f"paddle-dp does without; other programs may not. Write «127.0.0.1 {name}» into /etc/hosts."
        return DoctorCheck(
            name="host name", found=f"{name} has no address ({error})", state="look", todo=todo
        )
    detail = f"{name} is {address}"
    if address.startswith("127.") and is_multi_node:
        return DoctorCheck(name="host name", found=f"{detail} (Debian's way); nodes get the route's address")
    return DoctorCheck(name="host name", found=detail)


def interface(nodes: Nodes, variables: Mapping[str, str]) -> DoctorCheck:
    """Finds the interface by which nodes reach this one. Paddle's launcher alone would take the host name's address."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        names = variables.get(variable, "").lstrip("^=").split(",")
        if missing := [
            name for name in names if name and not any(available.startswith(name) for available in here)
        ]:
            todo = f"Unset it, or name one of: {', '.join(here)}."
            detail = f"{variable}={variables[variable]}, and there is no {missing[0]} here"
            return DoctorCheck(name=NAME, found=detail, state="mend", todo=todo)
    if not nodes.is_multi_node:
        return _loopback()
    try:
        meeting = meet(str(nodes.master), nodes.node_rank == 0)
    except UsageError as error:
        return DoctorCheck(
            name=NAME, found=f"no way to meet at {nodes.master}", state="mend", todo=str(error)
        )
    return DoctorCheck(
        name=NAME, found=f"{meeting.interface or 'unknown'}, {meeting.host}, to {meeting.master}"
    )


def _loopback() -> DoctorCheck:
    """Checks that ranks of this machine can meet, and that their ports can be closed to others (mesh/doors.py)."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            socket.create_connection(probe.getsockname(), timeout=2.0).close()
        except OSError as error:
            todo = f"Bring it up: ip link set lo up ({error})"
            return DoctorCheck(name=NAME, found="127.0.0.1 cannot be used", state="mend", todo=todo)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        except OSError:
            todo = (
                f"Others can reach a job's ports: close {FIRST_PORT} to {LAST_PORT} (tying needs Linux 5.7)."
            )
            return DoctorCheck(
                name=NAME, found="127.0.0.1; ports cannot be tied to it", state="look", todo=todo
            )
        try:
            close_to_all(probe)
        except OSError as error:
            todo = f"Other users of this machine can connect to Paddle's store while a job runs ({error})."
            return DoctorCheck(
                name=NAME, found="127.0.0.1, closed to other machines only", state="look", todo=todo
            )
    return DoctorCheck(name=NAME, found="127.0.0.1, closed to other machines and users")


def ports() -> DoctorCheck:
    """Checks that a job can get ports."""
    free = free_blocks()
    detail = f"{FIRST_PORT} to {LAST_PORT}: room for {free} job{'s' * (free != 1)} of {BLOCKS}"
    if not free:
        todo = "Other programs listen there (ss -ltnp). Jobs start on ports of Linux's own choice, and may lose them."
        return DoctorCheck(name="ports", found=detail, state="look", todo=todo)
    return DoctorCheck(name="ports", found=detail)
