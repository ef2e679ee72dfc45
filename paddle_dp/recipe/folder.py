"""Claims a run's folder before anything starts; an older run in it is moved aside, never overwritten.

It is moved after the new training has passed all checks, so a refused start leaves it in place.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
from pathlib import Path

from paddle_dp.errors import UsageError

LOCK = ".lock"  # held while a job works in the folder; the kernel releases it when the process ends
_locks: dict[tuple[int, int], int] = {}  # this process's locks: descriptors by device and inode
_FILES = (".yaml", ".json", ".jsonl", LOCK)  # names that must be files in a run's folder
OptionNames = tuple[str, str]  # in messages: what resumes a run, and what names its folder
COMMAND: OptionNames = ("--resume", "--output-dir DIR")


def has_run(folder: Path) -> bool:
    """True if a run has written to the folder."""
    signs = ("recipe.yaml", "metrics.jsonl", "checkpoints", "visualdl")
    return any((folder / sign).exists() for sign in signs)


def claim(
    folder: Path, resume: str | None, options: OptionNames = COMMAND, recipe: Path | None = None
) -> int | None:
    """Locks `folder` for a run. If an older run must move aside, returns its inode for `move_aside`, else None.

    A new folder is readable by its owner only. With `resume` an older run stays; "newest", "best" and a step need one.
    The lock lasts until `release` or the end of this process. Raises UsageError if there is no run to resume, the
    folder cannot be made or written, a running job holds it, an older run would move aside with this job's logs, its
    script or `recipe`, or the working folder in it, and as `check_files` does.
    """
    check_files(folder, options)
    older = has_run(folder)
    if resume and not older and (resume in ("newest", "best") or resume.isdecimal()):
        raise UsageError(
            f"{folder} holds no run to resume. Leave {options[0]} out to start one, or name the run's folder: "
            f"{options[1]}."
        )
    logs = os.environ.get("PADDLE_LOG_DIR", "")
    if older and not resume and logs and Path(logs).resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} has an earlier run, which would move aside, and this job's logs are in it, too. Let it write "
            "its logs elsewhere: launch --output-dir DIR."
        )
    if older and not resume and (needed := _needed_in(folder, recipe)):
        raise UsageError(
            f"{folder} has an earlier run, which would move aside, and {needed} with it. Go on with that run: "
            f"{options[0]}; or choose another folder with {options[1]}."
        )
    try:
        _lock(folder, options)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}): choose another one with {options[1]}."
        ) from error
    return folder.stat().st_ino if older and not resume else None


def _needed_in(folder: Path, recipe: Path | None) -> str:
    """The path in a folder that would be renamed which this job, or its next attempt, needs; "" if there is none.

    The run's recipe.yaml is not among it: a new run writes another.
    """
    root = folder.resolve()
    if Path.cwd().is_relative_to(root):
        return "the working folder"
    sources = [*map(Path, sys.argv[:1]), *filter(None, [recipe])]
    inside = (path for path in sources if path.resolve().is_relative_to(root))
    return next((str(path) for path in inside if path.resolve() != root / "recipe.yaml"), "")


def check_files(folder: Path, options: OptionNames = COMMAND) -> None:
    """Raises UsageError if a file in a run's folder is a link, a hard link, a pipe or a device: writing would change
    files elsewhere, and reading may never end.

    A link to a folder is allowed, for checkpoints on another disk, unless another user has made it.
    """
    for entry in os.scandir(folder) if folder.is_dir() else ():
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            if entry.is_dir() and status.st_uid in (os.geteuid(), 0):
                continue
            kind = f"a link to {os.readlink(entry.path)}"
        elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            kind = "a file with a second name elsewhere (a hard link)"
        elif stat.S_ISDIR(status.st_mode) and entry.name.endswith(_FILES):
            kind = "a folder"
        elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            continue
        else:
            kind = "a pipe, a socket or a device"
        raise UsageError(
            f"{entry.path} is {kind}, and a run's files are its own. Remove it, or choose another folder with "
            f"{options[1]}."
        )


def holds(folder: Path, older: int | None) -> bool:
    """True if the run `older`, such as `claim` found, is still in the folder."""
    try:
        return older is not None and folder.stat().st_ino == older
    except OSError:
        return False


def move_aside(
    folder: Path, older: int | None, logs: Path | None = None, options: OptionNames = COMMAND
) -> Path | None:
    """Moves the older run that `claim` found to `<folder>.1`, `.2`, … and returns the new path; None if it has moved
    already or there is none. The lock and this job's `logs`, a folder within it, stay in `folder`.

    Raises UsageError if it cannot be moved.
    """
    if not holds(folder, older):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    stays = [Path(LOCK)]
    if logs is not None and logs.resolve().is_relative_to(folder.resolve()):
        stays.append(logs.resolve().relative_to(folder.resolve()))
    try:
        folder.rename(aside)
        folder.mkdir(0o700)
        for name in stays:
            (folder / name).parent.mkdir(0o700, exist_ok=True)
            if (aside / name).exists():
                (aside / name).rename(folder / name)
    except OSError as error:
        raise UsageError(
            f"{folder} has an earlier run, which cannot be moved to {aside} ({error.strerror}): choose another "
            f"folder with {options[1]}."
        ) from error
    return aside


def _lock(folder: Path, options: OptionNames) -> None:
    """Locks the folder, made if it is missing, for this process. Raises UsageError if another process holds it. Disks
    without locks have no effect."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    status = os.fstat(file)
    inode = status.st_dev, status.st_ino
    if inode in _locks:
        os.close(file)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 200).decode(errors="replace") or "another process"
        os.close(file)
        raise UsageError(
            f"{folder} belongs to a job that is running ({holder}). Wait for its end, or end it; or choose another "
            f"folder with {options[1]}."
        ) from None
    except OSError:  # a network disk without locks
        os.close(file)
        return
    _locks[inode] = file
    try:
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError:  # a full disk: the lock holds, but its holder has no name
        pass


def release(folder: Path) -> None:
    """Lets other processes claim the folder, if this process holds it."""
    try:
        status = (folder / LOCK).stat()
    except OSError:
        return
    descriptor = _locks.pop((status.st_dev, status.st_ino), None)
    if descriptor is not None:
        os.close(descriptor)
