"""Addresses and ports: how nodes find each other by number, and how two jobs on one machine keep apart."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Meeting

# Above the ports that Linux hands out by itself (32768 to 60999), and above those that Paddle's launcher draws from
# when nobody tells it otherwise (35100 to 64000): jobs that somebody starts without us take none of these.
FIRST_PORT, BLOCK, BLOCKS = 64001, 32, 47  # of a job of up to 31 ranks on this machine


def meet(master: str) -> Meeting:
    """The meeting at `master` ("HOST:PORT") as this node reaches it.

    Paddle's launcher takes its own address from the host's name, which Debian maps to 127.0.1.1: other nodes then wait
    for ever. The address that faces the master is asked of the kernel instead. Raises UsageError when the master's
    name has no address, or one that only its own machine can reach.
    """
    host, _, port = master.rpartition(":")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"--master {master}: no address is known for {host} ({error}).") from error
    if ipaddress.ip_address(address).is_loopback and host != address:
        raise UsageError(
            f"--master {master}: {host} is {address} here, which other nodes cannot reach. Give its number."
        )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, int(port)))  # sends nothing: it only chooses the way
            own = probe.getsockname()[0]
    except OSError as error:
        raise UsageError(
            f"--master {master}: there is no way to {address} from here ({error.strerror})."
        ) from error
    return Meeting(master=f"{address}:{port}", host=own, interface=interface_of(own))


def interface_of(address: str) -> str | None:
    """The network interface that holds `address` ("eth0"), or None when that cannot be told."""
    try:
        import fcntl
    except ImportError:
        return None
    wanted, siocgifaddr = socket.inet_aton(address), 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == wanted:
                return name
    return None


@contextmanager
def reserved_ports() -> Iterator[dict[str, str]]:
    """The launcher's PORT_RANGE for one job: a block of ports that no other job of ours on this machine is using, and
    no other program either.

    The launcher looks for a free port some 3 s before a rank binds it; two jobs that start together could pick the
    same one. A block is held by a socket whose name lives in the kernel only, and goes with this process. One in which
    anybody listens is passed over.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        for number in range(BLOCKS):
            block = (os.getpid() + number) % BLOCKS
            try:
                holder.bind(f"\0paddle_dp/ports/{block}")
            except OSError:
                continue
            ports = range(FIRST_PORT + block * BLOCK, FIRST_PORT + (block + 1) * BLOCK)
            if all(map(_is_free, ports)):
                yield {"PORT_RANGE": f"{ports[0]}:{ports[-1]}"}
                return
            holder.close()
            holder = socket.socket(socket.AF_UNIX)
        yield {}
    finally:
        holder.close()


def _is_free(port: int) -> bool:
    """Whether nobody listens at, or is bound to, a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one at rest is free, as for the store
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
