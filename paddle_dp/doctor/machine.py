"""Checks this machine: Paddle, device, threads, memory, limits, the run folder's disk, and if ranks and nodes can meet.

It does not import paddle.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine, built_for, spoken, version_field, visible_in
from paddle_dp.launch.network import BLOCK, BLOCKS, FIRST_PORT, free_blocks, meet
from paddle_dp.launch.plan import RANK
from paddle_dp.mesh.doors import close_to_all
from paddle_dp.text import plural
from paddle_dp.version import __version__

State = Literal["ok", "look", "mend"]
FOLDER = "run folder"
OLDEST = (3, 0)  # of Paddle, as in pyproject.toml
MAX_COLUMNS, NAME_WIDTH, INDENT = 100, 14, "      "
GB, MB = 1 << 30, 1 << 20
# Limits of the disk measurement: bytes of one write, bytes at most, seconds at most.
WRITE_BYTES, MAX_BYTES_WRITTEN, LONGEST = 8 * MB, 96 * MB, 1.0
INTERFACE = "interface"
LAST_PORT = FIRST_PORT + BLOCK * BLOCKS - 1
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class DoctorCheck:
    """A finding. "look": a training works, but perhaps not as wished; "mend": it will not work.

    `found` has a few words, `todo` the next step.
    """

    name: str
    found: str
    state: State = "ok"
    todo: str = ""

    def lines(self, width: int) -> Iterator[str]:
        """Yields the finding's lines for a screen of `width` columns."""
        first = f"{self.state:<{len(INDENT)}}{self.name:<{NAME_WIDTH}}"
        yield from textwrap.wrap(self.found, width, initial_indent=first, subsequent_indent=" " * len(first))
        for paragraph in self.todo.splitlines():
            yield from textwrap.wrap(
                paragraph, width, initial_indent=f"{INDENT}→ ", subsequent_indent=f"{INDENT}  "
            )

    def show(self) -> None:
        """Prints the finding at once, on a screen of any width."""
        width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        print("\n".join(self.lines(width)), flush=True)


def paddle() -> DoctorCheck:
    """Checks the installed Paddle's version."""
    version = version_field("full_version") or "unknown"
    label = f"Paddle {version} for {spoken(built_for())}, Python {platform.python_version()}, paddle_dp {__version__}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        todo = f"paddle_dp needs Paddle {OLDEST[0]}.{OLDEST[1]} or newer: pip install -U 'paddlepaddle>={OLDEST[0]}'"
        return DoctorCheck("paddle", label, "mend", todo)
    return DoctorCheck("paddle", label)


def device(machine: Machine, variables: Mapping[str, str], root: Path = Path("/")) -> DoctorCheck:
    """Checks the ranks' device and its driver."""
    version = driver(root)
    if machine.devices:
        kind, names = spoken(machine.kind), ",".join(machine.devices)
        detail = f"{plural(len(machine.devices), kind)}: {names}"
        return DoctorCheck("device", f"{detail}{f', driver {version}' if version else ''}")
    if machine.kind != "cpu":
        kind, chosen = spoken(machine.kind), variables.get(visible_in(machine.kind))
        hides = f"{visible_in(machine.kind)}={chosen!r} hides them"
        reason = "no driver is loaded" if chosen is None else hides
        todo = f"{reason}: trainings would use the CPU. Look at nvidia-smi, or set train.device=cpu."
        return DoctorCheck("device", f"Paddle is for {kind}s, and none is seen", "look", todo)
    if version and any((root / "dev").glob("nvidia[0-9]*")):
        todo = "Install paddlepaddle-gpu from Paddle's own index (docs/devices.md) to use them."
        detail = f"GPUs are here (driver {version}), but Paddle is the CPU package"
        return DoctorCheck("device", detail, "look", todo)
    return DoctorCheck("device", "CPU")


def driver(root: Path) -> str:
    """Returns the version of NVIDIA's driver, "" without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    return (re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text) or ["", "unknown"])[1]


def threads(cores: int, ranks: int, variables: Mapping[str, str]) -> DoctorCheck:
    """Checks how many threads each rank computes with on CPUs."""
    limit = variables.get("OMP_NUM_THREADS")
    each = limit or str(max(1, cores // ranks))
    detail = f"{each} for each of {plural(ranks, 'rank')} on {plural(cores, 'processor')}"
    if limit is not None and limit.isdecimal() and int(limit) * ranks > cores:
        todo = f"OMP_NUM_THREADS={limit} is set: the ranks would take turns. Unset it, or set {max(1, cores // ranks)}."
        return DoctorCheck("threads", detail, "look", todo)
    if ranks > cores:
        todo = f"The ranks take turns: --ranks {cores} is as many as run at once here."
        return DoctorCheck("threads", detail, "look", todo)
    return DoctorCheck("threads", detail + (f" (OMP_NUM_THREADS={limit})" if limit else ""))


def memory(available: int | None, ranks: int) -> DoctorCheck:
    """Checks that the `available` memory, in bytes, suffices for `ranks` processes without a model."""
    if available is None:
        return DoctorCheck("memory", "the system does not say how much is available")
    needed = ranks * RANK
    begin = "ranks begin" if ranks > 1 else "rank begins"
    detail = f"{available / GB:.1f} GB available; {ranks} {begin} with {needed / GB:.1f} GB"
    if needed > available:
        todo = f"End other programs, or start {max(1, available // RANK)} ranks at most."
        return DoctorCheck("memory", detail, "mend", todo)
    return DoctorCheck("memory", detail)


def shared_memory(uses_nccl: bool, folder: Path = Path("/dev/shm")) -> DoctorCheck:
    """Checks /dev/shm: NCCL exchanges through it within a machine; paddle_dp and its data workers do not use it."""
    name = str(folder)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return DoctorCheck(name, "there is none", "look", "NCCL and Paddle's own DataLoader need it.")
    detail = f"{usage.free / GB:.2f} GB free of {usage.total / GB:.2f} GB"
    if usage.free < 256 * MB:
        todo = "Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory)."
        return DoctorCheck(name, detail, "mend" if uses_nccl else "look", todo)
    return DoctorCheck(name, detail)


def open_files(ranks: int, limits: tuple[int, int] | None = None) -> DoctorCheck:
    """Checks how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    needed = 256 + 8 * ranks
    detail = f"{_number(soft)} for each process, {_number(hard)} at most"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return DoctorCheck("open files", detail, "mend", f"ulimit -n {max(needed, 4096)}")
    return DoctorCheck("open files", detail)


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def disk(folder: Path) -> list[DoctorCheck]:
    """Checks a run folder's disk: permission to write, speed, free space, locks and clock.

    Writes up to 96 MB into the nearest existing folder, for a second at most, and removes them.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    file = existing / f".paddle-dp-doctor-{os.getpid()}"
    try:
        written, seconds, clock, locks = _write(file)
    except OSError as error:
        todo = f"Make it writable, or give another folder: --output-dir DIR. ({error.strerror or error})"
        return [DoctorCheck(FOLDER, f"{existing} cannot be written", "mend", todo)]
    finally:
        with suppress(OSError):
            file.unlink()
    free = shutil.disk_usage(existing).free
    detail = f"{existing}: {written / MB / seconds:,.0f} MB/s written and synced, {free / GB:,.1f} GB free"
    findings = [DoctorCheck(FOLDER, detail)]
    if free < GB:
        todo = "A checkpoint holds the weights, and twice that for the optimizer, before an older one goes."
        findings = [DoctorCheck(FOLDER, detail, "mend", todo)]
    elif written / seconds < 20 * MB:
        todo = "Checkpoints will take long: choose a faster disk with --output-dir DIR."
        findings = [DoctorCheck(FOLDER, detail, "look", todo)]
    if not locks:
        todo = "Two jobs in one run folder would not notice each other there."
        findings.append(DoctorCheck("locks", "this disk has none", "look", todo))
    if abs(clock) > 2:
        todo = "Files seem older or newer than they are: let both machines follow the same time server (chrony, ntp)."
        findings.append(DoctorCheck("disk's clock", f"{clock:+.1f} s from this machine's", "look", todo))
    return findings


def _write(file: Path) -> tuple[int, float, float, bool]:
    """Returns bytes written and synced, the seconds for them, the disk's clock minus this machine's in seconds, and
    True if the disk has locks."""
    block, written, began = os.urandom(WRITE_BYTES), 0, time.perf_counter()
    with file.open("wb") as out:
        while written < MAX_BYTES_WRITTEN and time.perf_counter() - began < LONGEST:
            written += out.write(block)
            out.flush()
            os.fsync(out.fileno())
        seconds = time.perf_counter() - began
        clock = os.fstat(out.fileno()).st_mtime - time.time()
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return written, seconds, clock, False
    return written, seconds, clock, True


def host_name(is_multi_node: bool) -> DoctorCheck:
    """Checks that this host's name has an address that other nodes can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        todo = f'paddle-dp does without; other programs may not. Write "127.0.0.1 {name}" into /etc/hosts.'
        return DoctorCheck("host name", f"{name} has no address ({error})", "look", todo)
    detail = f"{name} is {address}"
    if address.startswith("127.") and is_multi_node:
        return DoctorCheck("host name", f"{detail} (Debian's way); nodes get the route's address")
    return DoctorCheck("host name", detail)


def congestion_control(root: Path = Path("/")) -> DoctorCheck:
    """Checks by which rule TCP sends between nodes."""
    try:
        rule = (root / "proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        rule = "unknown"
    if rule.startswith("bbr"):
        todo = (
            "Exchanges over TCP may wait for 0.1 s now and then (docs/reliability.md). On each node, as root: "
            "sysctl net.ipv4.tcp_congestion_control=reno (or cubic)"
        )
        return DoctorCheck("TCP", f"congestion control: {rule}", "look", todo)
    return DoctorCheck("TCP", f"congestion control: {rule}")


def interface(job: Job, variables: Mapping[str, str]) -> DoctorCheck:
    """Finds the interface by which nodes reach this one. Paddle's launcher alone would take the host name's address."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        value = variables.get(variable, "")
        if variable.startswith("NCCL") and value.startswith("^"):
            continue  # a list of others: an absent one is harmless
        names = value.lstrip("^=").split(",")
        if missing := [name for name in filter(None, names) if not any(i.startswith(name) for i in here)]:
            todo = f"Unset it, or name one of: {', '.join(here)}."
            detail = f"{variable}={value}, and there is no {missing[0]} here"
            return DoctorCheck(INTERFACE, detail, "mend", todo)
    if job.nodes is None:
        return _loopback()
    try:
        meeting = meet(str(job.master), job.node_rank == 0)
    except UsageError as error:
        return DoctorCheck(INTERFACE, f"no way to meet at {job.master}", "mend", str(error))
    return DoctorCheck(INTERFACE, f"{meeting.interface or 'unknown'}, {meeting.host}, to {meeting.master}")


def _loopback() -> DoctorCheck:
    """Checks that ranks of this machine can meet, and that their ports can be closed to others (mesh/doors.py)."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            socket.create_connection(probe.getsockname(), timeout=2.0).close()
        except OSError as error:
            todo = f"Bring it up: ip link set lo up ({error})"
            return DoctorCheck(INTERFACE, "127.0.0.1 cannot be used", "mend", todo)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        except OSError:
            todo = (
                f"Others can reach a job's ports: close {FIRST_PORT} to {LAST_PORT} (tying needs Linux 5.7)."
            )
            return DoctorCheck(INTERFACE, "127.0.0.1; ports cannot be tied to it", "look", todo)
        try:
            close_to_all(probe)
        except OSError as error:
            todo = f"Other users of this machine can connect to Paddle's store while a job runs ({error})."
            return DoctorCheck(INTERFACE, "127.0.0.1, closed to other machines only", "look", todo)
    return DoctorCheck(INTERFACE, "127.0.0.1, closed to other machines and users")


def ports() -> DoctorCheck:
    """Checks that a job can get ports."""
    free = free_blocks()
    detail = f"{FIRST_PORT} to {LAST_PORT}: room for {free} job{'s' * (free != 1)} of {BLOCKS}"
    if not free:
        todo = "Other programs listen there (ss -ltnp). Jobs start on ports of Linux's own choice, and may lose them."
        return DoctorCheck("ports", detail, "look", todo)
    return DoctorCheck("ports", detail)
