"""A library's port takes nobody more once it is closed, and a connection to another user's process is seen."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from paddle_dp.errors import JobError
from paddle_dp.mesh.doors import Connections, send_at_once
from tests.strangers import as_stranger, needs_another_user


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as end:
        yield end


def test_a_closed_port_takes_nobody_more_and_keeps_who_is_there(listener):
    address = listener.getsockname()
    connections = Connections(address[1])
    with socket.create_connection(address) as ours:
        theirs, _ = listener.accept()
        connections.close_port()
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        ours.sendall(b"still here")
        assert theirs.recv(10) == b"still here"
        theirs.close()


def test_pieces_of_a_request_wait_for_no_acknowledgement(listener):
    def at_once(end):
        return bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with socket.create_connection(listener.getsockname()) as before:
        listener.accept()[0].close()
        assert not at_once(before)
        send_at_once()
        assert at_once(before)
    with socket.create_connection(listener.getsockname()) as later:  # the listener's end sends the answers
        accepted, _ = listener.accept()
        with accepted:
            assert at_once(accepted) and not at_once(later)


@pytest.fixture
def both_versions():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as end:
        yield end


@pytest.fixture(params=["listener", "both_versions"])
def stranger(request):
    """Another user's process, which has connected to a listener by version 4; and the connection."""
    listener = request.getfixturevalue(request.param)

    def connect():
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            time.sleep(60)

    connections = Connections()
    pid = as_stranger(connect)
    accepted, _ = listener.accept()
    yield connections, accepted
    accepted.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@needs_another_user
def test_a_connection_to_another_user_ends_the_job(stranger):
    connections, _ = stranger
    with pytest.raises(JobError, match=r"user 65534 of this machine has come between the ranks"):
        connections.check()
    Connections().check()  # it was there before


@needs_another_user
def test_a_stranger_at_a_store_is_cut_off(stranger):
    connections, accepted = stranger
    connections.port = accepted.getsockname()[1]
    connections.check()
    assert accepted.recv(1) == b""


@pytest.mark.parametrize("version", ["listener", "both_versions"])
def test_ones_own_connections_are_no_strangers(version, request):
    port = request.getfixturevalue(version).getsockname()[1]
    connections = Connections()
    with socket.create_connection(("127.0.0.1", port)):
        connections.check()


@needs_another_user
def test_a_meeting_that_a_stranger_has_spoilt_says_so(stranger):
    connections, _ = stranger
    with pytest.raises(JobError, match="user 65534"), connections.blamed():
        raise RuntimeError("gloo: Connection refused")
    with pytest.raises(RuntimeError, match="by itself"), Connections().blamed():
        raise RuntimeError("by itself")


@needs_another_user
def test_the_rank_that_gloo_refused_names_the_stranger_who_has_its_place(stranger):
    _, accepted = stranger
    refused_rank = Connections()  # which has no connection with the stranger itself
    port = socket.htons(accepted.getsockname()[1])
    with pytest.raises(JobError, match="user 65534"), refused_rank.blamed():
        raise RuntimeError(f"gloo/transport/tcp/pair.cc:784] connect [127.0.0.1]:{port}: Connection refused")
    with pytest.raises(RuntimeError, match="refused"), refused_rank.blamed():
        raise RuntimeError("pair.cc:784] connect [127.0.0.1]:1: Connection refused")
