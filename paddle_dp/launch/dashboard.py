"""Starts VisualDL for a folder of runs: on this machine only, and without telemetry."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.mesh.environment import bound_socket

HOST = "127.0.0.1"


def start(folder: Path, port: int = 8040) -> None:
    """Prints the address and replaces this process by the VisualDL server. Does not return.

    Raises UsageError if `folder` does not exist or holds no VisualDL log, or if the port is taken; InstallError
    without VisualDL.
    """
    check(folder)
    check_port(port)
    if find_spec("visualdl") is None:
        raise InstallError("VisualDL is not installed: pip install visualdl")
    print(f"dashboard of {folder}: http://{HOST}:{port}/  (Ctrl-C ends it)", flush=True)
    command = argv(folder, port)
    os.execv(command[0], command)  # the server gets signals directly: no parent must forward them


def argv(folder: Path, port: int) -> list[str]:
    """Returns the server's command. Without --disable-telemetry it would report each start to the internet."""
    options = ["--logdir", str(folder), "--host", HOST, "--port", str(port), "--disable-telemetry"]
    return [sys.executable, "-W", "ignore", "-m", "visualdl.server.app", *options]


def check(folder: Path) -> None:
    """Raises UsageError unless `folder` holds a VisualDL log, at any depth."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name a run's folder, or the folder of all runs (runs).")
    if next(folder.rglob("*vdlrecords*.log"), None) is None:
        hint = "a run writes one with the callback {use: dashboard}"
        raise UsageError(f"{folder} holds no VisualDL log: {hint}.")


def check_port(port: int) -> None:
    """Raises UsageError unless a server can listen on this port."""
    if not 0 < port < 65536:
        raise UsageError(f"--port {port}: a port is a number from 1 to 65535.")
    try:
        bound_socket(HOST, port).close()
    except OSError as error:
        choice = f"Choose another, such as --port {port + 1}."
        raise UsageError(f"--port {port}: {error.strerror}. {choice}") from None
