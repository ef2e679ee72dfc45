"""Nodes meet at numbers, and two jobs on one machine get different ports."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch import network, start
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.network import interface_of, meet, reserved_ports
from paddle_dp.launch.plan import LaunchPlan


def test_a_master_on_this_machine_is_met_at_its_own_address():
    meeting = meet("127.0.0.1:9701")
    assert (meeting.master, meeting.host, meeting.interface) == ("127.0.0.1:9701", "127.0.0.1", "lo")


def test_a_name_becomes_a_number(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", {"node0": "127.0.0.1", "127.0.0.1": "127.0.0.1"}.__getitem__)
    with pytest.raises(UsageError, match=r"node0 is 127\.0\.0\.1 here, which other nodes cannot reach"):
        meet("node0:9701")


def test_node_0_may_be_given_its_own_name(monkeypatch):
    """Debian gives a machine's own name the number 127.0.1.1: there node 0 takes the one that faces the others."""
    monkeypatch.setattr(socket, "gethostbyname", {"node0": "127.0.1.1"}.__getitem__)
    monkeypatch.setattr(network, "_route_from", lambda *_: "127.0.0.1")  # stands for 10.0.0.7,
    monkeypatch.setattr(network, "_is_loopback", "127.0.1.1".__eq__)  # which is no loopback address
    meeting = meet("node0:9701", is_first=True)
    assert (meeting.master, meeting.host) == ("127.0.0.1:9701", "127.0.0.1")
    with pytest.raises(UsageError, match=r"node0 is 127\.0\.1\.1 here, which other nodes cannot reach"):
        meet("node0:9701")  # on another machine it must be a name of node 0


def test_a_name_may_become_known_a_little_later(monkeypatch):
    """A service's name, once its first machine is up."""
    asked = []

    def known_later(name):
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return "127.0.0.1"

    monkeypatch.setattr(socket, "gethostbyname", known_later)
    monkeypatch.setattr(network.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(network, "_is_loopback", lambda address: False)
    said: list[str] = []
    assert meet("job-0.service:9701", patience=5.0, report=said.append).master == "127.0.0.1:9701"
    assert len(asked) == 3 and said == [
        "no address is known for job-0.service yet: asking again, for 5 s at most"
    ]


def test_the_next_free_port_is_found():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert network.free_port(port) > port
    assert 1024 <= network.free_port(65536) < 65536  # of `--master HOST:65535`


def test_a_name_without_an_address_is_a_sentence(monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network.socket, "gethostbyname", unknown)
    with pytest.raises(UsageError, match="no address is known for nowhere"):
        meet("nowhere:1")


def test_the_wait_for_a_name_ends_where_it_is_asked_to(monkeypatch):
    def fails(name):
        raise OSError("unknown")

    monkeypatch.setattr(network.socket, "gethostbyname", fails)
    asked = []
    with pytest.raises(UsageError, match="no address is known"):
        meet("job-0.service:9701", patience=60.0, is_ended=lambda: asked.append(1) or len(asked) > 1)
    assert len(asked) == 2


def test_an_address_that_nobody_holds_has_no_interface():
    assert interface_of("198.51.100.1") is None


TABLE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
ib0\t0000080A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t0000A8C0\t010000C0\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes this table in its own byte order")
@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.7", "eth0"), ("10.8.3.1", "ib0"), ("192.168.1.2", None), ("172.16.0.1", None)],
)
def test_a_second_address_is_found_by_its_network(address, interface):
    """The narrowest network counts, and none behind a gateway."""
    assert network.routed(address, TABLE) == interface


def test_a_block_of_ports_is_held_until_it_is_let_go():
    with reserved_ports() as first, reserved_ports() as second:
        assert first != second
        low, high = map(int, first["PORT_RANGE"].split(":"))
        # None that the kernel, or Paddle's launcher, would hand out by itself.
        assert 64000 < low < high < 65536
    with reserved_ports() as again:
        assert again == first


def test_a_block_in_which_somebody_listens_is_passed_over():
    with socket.socket() as stranger:
        with (
            reserved_ports() as first
        ):  # until the stranger listens, no other job of this machine takes the block
            stranger.bind(("", int(first["PORT_RANGE"].split(":")[0]) + 3))
            stranger.listen()
        with reserved_ports() as second:
            assert second != first
            assert second
    with reserved_ports() as again:
        assert again == first


def test_another_process_gets_another_block():
    code = (
        "import os; from paddle_dp.launch import network; network.os.getpid = lambda: PID\n"
        "with network.reserved_ports() as ports: print(ports['PORT_RANGE'])"
    ).replace("PID", str(os.getpid()))  # the same first choice as ours
    with reserved_ports() as mine:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
    assert done.stdout.strip() != mine["PORT_RANGE"]


def test_a_machine_without_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in a container whose `lo` is down waited for each other until `watch.start`."""
    network.check_loopback()

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(
        UsageError, match=r"nothing gets there \(Network is unreachable\). Set it up: ip link set lo up"
    ):
        network.check_loopback()
    several = LaunchPlan(job=Job(recipe=Path("r.yaml"), ranks=2), machine=Machine(cores=2), ranks=2)
    with pytest.raises(UsageError, match="ip link set lo up"):
        start._check_machine(several)
    start._check_machine(replace(several, ranks=1))
