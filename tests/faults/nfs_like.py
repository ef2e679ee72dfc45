"""A disk with the habits of NFS, for one machine or two: `python nfs_like.py BACKING MOUNT CONTROL`.

A file system in user space (FUSE), as root, with mfusepy and libfuse. It shows the folder BACKING at MOUNT, and

- each fsync takes `FSYNC` seconds, each write `WRITE`;
- names and attributes are remembered for `MEMORY` seconds, also that a name is *not* there: of two mounts of one
  folder, which play two machines, each sees the other's files late;
- a file that is removed while it is open stays until it is closed, under a hidden name (NFS's .nfs…; .fuse_hidden…);
- a file in CONTROL named `eio` makes each fsync an error, as a server does whose own disk fails.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import mfusepy
except (ImportError, OSError):  # it is not installed, or libfuse is not
    mfusepy = None

FSYNC, WRITE, MEMORY = 0.05, 0.0005, 8.0
UTIME_NOW = (1 << 30) - 1  # in place of nanoseconds (utimensat(2))
ATTRIBUTES = (
    "st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_ino", "st_blocks",
)  # fmt: skip


def why_not() -> str:
    """Why there can be no such disk here; "" if there can."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        return "an NFS-like disk takes root and /dev/fuse"
    if mfusepy is None:
        return "an NFS-like disk takes mfusepy (pip) and libfuse"
    return ""


@contextmanager
def mounted(backing: Path, mount: Path, control: Path) -> Iterator[None]:
    """The disk at `mount` within the context."""
    for folder in (backing, mount, control):
        folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, __file__, *map(str, (backing, mount, control))])
    try:
        end = time.monotonic() + 20
        while not os.path.ismount(mount):
            assert process.poll() is None and time.monotonic() < end, "the disk could not be mounted"
            time.sleep(0.02)
        yield
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Disk(mfusepy.Operations if mfusepy else object):  # type: ignore[misc]
    """The operations, on paths of the folder `backing`."""

    def __init__(self, backing: str, control: Path):
        self.backing, self.control = backing, control

    use_ns = True

    def _at(self, path: str) -> str:
        return self.backing + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path))
        return {name: getattr(status, name) for name in ATTRIBUTES} | {
            name: getattr(status, f"{name}_ns") for name in ATTRIBUTES if name.endswith("time")
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def access(self, path: str, mode: int) -> int:
        if not os.access(self._at(path), mode):
            raise mfusepy.FuseOSError(errno.EACCES)
        return 0

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._at(path), uid, gid)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~(os.O_CREAT | os.O_EXCL))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        time.sleep(WRITE)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._at(path), length) if fh is None else os.ftruncate(fh, length)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        time.sleep(FSYNC)
        if (self.control / "eio").exists():
            raise mfusepy.FuseOSError(errno.EIO)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def link(self, target: str, source: str) -> None:
        os.link(self._at(source), self._at(target))

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._at(target))

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        now = time.time_ns()
        os.utime(self._at(path), ns=tuple(now if each == UTIME_NOW else each for each in times or (now, now)))

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._at(path))
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_frsize",
        )
        return {name: getattr(status, name) for name in names}


def serve(backing: str, mount: str, control: Path) -> None:
    """Serves the disk until it is unmounted."""
    remembered = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), MEMORY)
    mfusepy.FUSE(Disk(backing, control), mount, foreground=True, allow_other=True, **remembered)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
