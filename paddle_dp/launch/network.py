"""Finds addresses by which nodes reach each other, and ports that no other job on this machine uses."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Meeting
from paddle_dp.launch.processes import text_of
from paddle_dp.mesh.environment import bound_socket

# Above the ports that Linux assigns (32768 to 60999) and that Paddle's launcher draws from by default (35100 to
# 64000): jobs started without paddle-dp use none of these.
FIRST_PORT, BLOCK, BLOCKS = 64001, 32, 47  # a block is enough for a job of 31 ranks on this machine


def meet(
    master: str,
    is_first: bool = False,
    patience: float = 0.0,
    report: Callable[[str], object] = lambda text: None,
    is_ended: Callable[[], bool] = lambda: False,
) -> Meeting:
    """Returns the rendezvous at `master` ("HOST:PORT") as this node reaches it; the first node opens it.

    Paddle's launcher takes its address from the host's name, which Debian maps to 127.0.1.1: other nodes then wait for
    ever. Here it is the address from which the kernel would reach the master; on node 0 with a loopback name, the
    address from which it would reach other networks. `patience`: seconds until the master's name must resolve; `report`
    gets a line if it waits, and `is_ended()` ends the wait. Raises UsageError if the master's name has no address, or
    one that only its machine can reach; on the first node, if it is another machine's address, or its port is taken.
    """
    host, port = split_address(master)
    try:
        address = _address(host, patience, report, is_ended)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--master {master}: no address is known for {host} ({error}).") from error
    if is_first and host != address and _is_loopback(address):
        with suppress(OSError):  # no route to other networks
            address = _route_from("192.0.2.1", 9)  # for documentation only (RFC 5737)
    if host != address and _is_loopback(address):
        raise UsageError(
            f"--master {master}: {host} is {address} here, which other nodes cannot reach. Give its number."
        )
    try:
        local_address = _route_from(address, port)
    except OSError as error:
        reason = f"there is no way to {address} from here ({error.strerror})"
        raise UsageError(f"--master {master}: {reason}.") from error
    if is_first and local_address != address:
        raise UsageError(
            f"--master {master}: it is an address of node 0, and this is node 0, whose address is {local_address}. "
            f"Give --master {local_address}:{port} on all nodes, or this node another --node-rank."
        )
    if is_first and not _is_free(port):
        raise UsageError(
            f"--master {master}: another program listens at port {port} here, perhaps an earlier job that has not "
            "ended. Give another port, on all nodes."
        )
    return Meeting(master=f"{address}:{port}", host=local_address, interface=interface_of(local_address))


def _address(
    host: str, patience: float, report: Callable[[str], object], is_ended: Callable[[], bool]
) -> str:
    """Resolves a name. Raises OSError if that fails for `patience` seconds, or until `is_ended()`."""
    end, is_reported = time.monotonic() + patience, False
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError:
            if time.monotonic() >= end or is_ended():
                raise
        if not is_reported:
            report(f"no address is known for {host} yet: asking again, for {patience:.0f} s at most")
            is_reported = True
        time.sleep(0.5)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _route_from(address: str, port: int) -> str:
    """Returns the address from which the kernel would reach another one. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # UDP: sends nothing, only chooses the route
        return str(probe.getsockname()[0])


def split_address(address: str) -> tuple[str, int]:
    """Parses "10.0.0.1:9701" as ("10.0.0.1", 9701)."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def free_port(first: int) -> int:
    """Returns the lowest free port from `first` on, else from 1024 on."""
    return next(port for port in (*range(first, 65536), *range(1024, first)) if _is_free(port))


def interface_of(address: str) -> str | None:
    """Returns the network interface with `address` ("eth0"), or None if unknown."""
    packed, siocgifaddr = socket.inet_aton(address), 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == packed:
                return name
    return routed(address, text_of(Path("/proc/net/route")))


def routed(address: str, table: str) -> str | None:
    """Returns the interface with the network of `address`, by the kernel's routing table `table`, or None.

    This also finds secondary addresses. Routes through gateways do not count: their addresses belong to other machines.
    """
    number, interfaces = int.from_bytes(socket.inet_aton(address), sys.byteorder), {}
    for line in table.splitlines()[1:]:
        name, network, gateway, *_, mask = line.split()[:8]
        network_, mask_ = int(network, 16), int(mask, 16)
        if not int(gateway, 16) and mask_ and number & mask_ == network_:
            interfaces[bin(mask_).count("1")] = name
    return interfaces[max(interfaces)] if interfaces else None


def check_loopback() -> None:
    """Raises UsageError if processes of this machine cannot reach each other, as in a container with `lo` down: the
    ranks would silently wait for each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as ear:
            socket.create_connection(ear.getsockname(), timeout=5).close()
    except OSError as error:
        raise UsageError(
            f"ranks on one machine meet at 127.0.0.1, by its interface lo, and nothing gets there "
            f"({error.strerror or error}). Set it up: ip link set lo up. Or train with --ranks 1."
        ) from error


@contextmanager
def reserved_ports() -> Iterator[dict[str, str]]:
    """Reserves a block of ports that no other job or program of this machine uses; yields PORT_RANGE for the launcher.

    The launcher looks for a free port some 3 s before a rank binds it; two jobs that start together could pick the same
    port. An abstract Unix socket, which the kernel removes with this process, reserves a block. Yields {} if no block
    is free.
    """
    for number in range(BLOCKS):
        block = (os.getpid() + number) % BLOCKS
        ports = _ports(block)
        with socket.socket(socket.AF_UNIX) as holder:
            try:
                holder.bind(f"\0paddle_dp/ports/{block}")
            except OSError:
                continue
            if all(map(_is_free, ports)):
                yield {"PORT_RANGE": f"{ports[0]}:{ports[-1]}"}
                return
    yield {}


def free_blocks() -> int:
    """Returns the number of blocks of ports that no program of this machine uses."""
    return sum(all(map(_is_free, _ports(block))) for block in range(BLOCKS))


def _ports(block: int) -> range:
    return range(FIRST_PORT + block * BLOCK, FIRST_PORT + (block + 1) * BLOCK)


def free_ports(port_range: str, count: int) -> list[int]:
    """Returns `count` free ports of 127.0.0.1 in this range, or any for 0:0; [] if there are fewer."""
    first, _, last = port_range.partition(":")
    free: list[int] = []
    with ExitStack() as probes:  # sockets stay open, so that the kernel gives no port twice
        for port in range(int(first), int(last) + 1) if int(first) else [0] * count:
            with suppress(OSError):
                free.append(probes.enter_context(bound_socket("127.0.0.1", port)).getsockname()[1])
            if len(free) == count:
                return free
    return []


def _is_free(port: int) -> bool:
    """True if no socket of this machine is bound to the port."""
    try:
        bound_socket("", port).close()
    except OSError:
        return False
    return True
