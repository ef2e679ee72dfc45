"""Checks this machine: Paddle, device, threads, memory, limits, and the run folder's disk. Does not import paddle."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paddle_dp.doctor.finding import DoctorCheck
from paddle_dp.launch.devices import built_for, paddle_folder, spoken, visible_in
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import RANK
from paddle_dp.text import plural
from paddle_dp.version import __version__

FOLDER = "run folder"
OLDEST = (3, 0)  # of Paddle, as in pyproject.toml
GB, MB = 1 << 30, 1 << 20
# Limits of the disk measurement: bytes of one write, bytes at most, seconds at most.
BLOCK, MAX_BYTES_WRITTEN, LONGEST = 8 * MB, 96 * MB, 1.0


def paddle() -> DoctorCheck:
    """Checks the installed Paddle's version by its version file: importing paddle takes over a second."""
    text = (paddle_folder() / "version" / "__init__.py").read_text()
    version = (re.search(r"^full_version\s*=\s*'([^']*)'", text, re.MULTILINE) or ["", "unknown"])[1]
    label = f"Paddle {version} for {spoken(built_for())}, Python {platform.python_version()}, paddle_dp {__version__}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        todo = f"paddle_dp needs Paddle {OLDEST[0]}.{OLDEST[1]} or newer: pip install -U 'paddlepaddle>={OLDEST[0]}'"
        return DoctorCheck(name="paddle", found=label, state="mend", todo=todo)
    return DoctorCheck(name="paddle", found=label)


def device(machine: Machine, variables: Mapping[str, str], root: Path = Path("/")) -> DoctorCheck:
    """Checks the ranks' device and its driver."""
    driver = _driver(root)
    if machine.devices:
        kind, names = spoken(machine.kind), ",".join(machine.devices)
        detail = f"{plural(len(machine.devices), kind)}: {names}"
        return DoctorCheck(name="device", found=f"{detail}{f', driver {driver}' if driver else ''}")
    if machine.kind != "cpu":
        kind, chosen = spoken(machine.kind), variables.get(visible_in(machine.kind))
        reason = (
            f"{visible_in(machine.kind)}={chosen!r} hides them"
            if chosen is not None
            else "no driver is loaded"
        )
        todo = f"{reason}: trainings would use the CPU. Look at nvidia-smi, or set train.device=cpu."
        return DoctorCheck(
            name="device", found=f"Paddle is for {kind}s, and none is seen", state="look", todo=todo
        )
    if driver and any((root / "dev").glob("nvidia[0-9]*")):
        todo = "Install paddlepaddle-gpu from Paddle's own index (docs/devices.md) to use them."
        return DoctorCheck(
            name="device", found=f"GPUs are here (driver {driver}), but Paddle is the CPU package", state="look",
            todo=todo,
        )  # fmt: skip
    return DoctorCheck(name="device", found="CPU")


def _driver(root: Path) -> str:
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
        return DoctorCheck(name="threads", found=detail, state="look", todo=todo)
    if ranks > cores:
        todo = f"The ranks take turns: --ranks {cores} is as many as run at once here."
        return DoctorCheck(name="threads", found=detail, state="look", todo=todo)
    return DoctorCheck(name="threads", found=detail + (f" (OMP_NUM_THREADS={limit})" if limit else ""))


def memory(available: int | None, ranks: int) -> DoctorCheck:
    """Checks that the `available` memory, in bytes, suffices for `ranks` processes without a model."""
    if available is None:
        return DoctorCheck(name="memory", found="the system does not say how much is available")
    needed = ranks * RANK
    begin = "ranks begin" if ranks > 1 else "rank begins"
    detail = f"{available / GB:.1f} GB available; {ranks} {begin} with {needed / GB:.1f} GB"
    if needed > available:
        todo = f"End other programs, or start {max(1, available // RANK)} ranks at most."
        return DoctorCheck(name="memory", found=detail, state="mend", todo=todo)
    return DoctorCheck(name="memory", found=detail)


def shared_memory(uses_nccl: bool, folder: Path = Path("/dev/shm")) -> DoctorCheck:
    """Checks /dev/shm: NCCL exchanges through it within a machine; paddle_dp and its data workers do not use it."""
    name = str(folder)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return DoctorCheck(
            name=name, found="there is none", state="look", todo="NCCL and Paddle's own DataLoader need it."
        )
    detail = f"{usage.free / GB:.2f} GB free of {usage.total / GB:.2f} GB"
    if usage.free < 256 * MB:
        todo = "Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory)."
        return DoctorCheck(name=name, found=detail, state="mend" if uses_nccl else "look", todo=todo)
    return DoctorCheck(name=name, found=detail)


def open_files(ranks: int, limits: tuple[int, int] | None = None) -> DoctorCheck:
    """Checks how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    needed = 256 + 8 * ranks
    detail = f"{_number(soft)} for each process, {_number(hard)} at most"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return DoctorCheck(
            name="open files", found=detail, state="mend", todo=f"ulimit -n {max(needed, 4096)}"
        )
    return DoctorCheck(name="open files", found=detail)


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
        return [DoctorCheck(name=FOLDER, found=f"{existing} cannot be written", state="mend", todo=todo)]
    finally:
        with suppress(OSError):
            file.unlink()
    free = shutil.disk_usage(existing).free
    detail = f"{existing}: {written / MB / seconds:,.0f} MB/s written and synced, {free / GB:,.1f} GB free"
    findings = [DoctorCheck(name=FOLDER, found=detail)]
    if free < GB:
        todo = "A checkpoint holds the weights, and twice that for the optimizer, before an older one goes."
        findings = [DoctorCheck(name=FOLDER, found=detail, state="mend", todo=todo)]
    elif written / seconds < 20 * MB:
        todo = "Checkpoints will take long: choose a faster disk with --output-dir DIR."
        findings = [DoctorCheck(name=FOLDER, found=detail, state="look", todo=todo)]
    if not locks:
        todo = "Two jobs in one run folder would not notice each other there."
        findings.append(DoctorCheck(name="locks", found="this disk has none", state="look", todo=todo))
    if abs(clock) > 2:
        todo = "Files seem older or newer than they are: let both machines follow the same time server (chrony, ntp)."
        findings.append(
            DoctorCheck(
                name="disk's clock", found=f"{clock:+.1f} s from this machine's", state="look", todo=todo
            )
        )
    return findings


def _write(file: Path) -> tuple[int, float, float, bool]:
    """Returns bytes written and synced, the seconds for them, the disk's clock minus this machine's in seconds, and
    True if the disk has locks."""
    block, written, began = os.urandom(BLOCK), 0, time.perf_counter()
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
