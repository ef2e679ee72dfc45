"""Builds the simulated accelerator (device/*.cc) with g++, once for each Paddle and each state of the sources.

    python -m tests.sim.build      # prints the folder for CUSTOM_DEVICE_ROOT

The library lies in the user's cache folder: $XDG_CACHE_HOME or ~/.cache, then paddle_dp-sim/<Paddle>-<digest>.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("device")
PADDLE = "3.3.1"  # the kernels are lent through phi's C++ interface, which is another in every version
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall")
LIBRARY = "libsim.so"


def why_not() -> str | None:
    """Why the device cannot be built here, as one sentence; None where it can."""
    try:
        version = importlib.metadata.version("paddlepaddle")
    except importlib.metadata.PackageNotFoundError:
        return f"the simulated accelerator needs paddlepaddle {PADDLE} (the CPU package), which is not installed."
    if version != PADDLE:
        return f"the simulated accelerator is written for paddlepaddle {PADDLE}, and {version} is installed."
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the simulated accelerator is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}."
    if shutil.which(_compiler()) is None:
        return f"the simulated accelerator needs a C++ compiler, and there is no {_compiler()} here."
    return None


def built() -> Path:
    """The folder with the built library, made now if it is not there. Two processes may call this at once.

    Raises RuntimeError with the compiler's words, or with `why_not`.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    folder = _folder()
    if not (folder / LIBRARY).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / "lock"):
            if not (folder / LIBRARY).exists():
                _build(folder)
    return folder


def _folder() -> Path:
    """Where the library of these sources lies, or is to lie."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_dp-sim"
    return cache / f"{PADDLE}-{_digest()}"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _paddle() -> Path:
    found = find_spec("paddle")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _digest() -> str:
    """Of all that the library is made from."""
    digest = hashlib.sha256(" ".join((_compiler(), *FLAGS, str(_paddle()))).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Inside, no other process builds."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as path:
        scratch, paddle = Path(path), _paddle()
        includes = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
        sources = sorted(SOURCES.glob("*.cc"), key=_weight, reverse=True)

        def compiled(source: Path) -> str:
            made = str(scratch / f"{source.stem}.o")
            _run(_compiler(), *FLAGS, *_more_flags(source), *includes, "-c", str(source), "-o", made)
            return made

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            objects = list(workers.map(compiled, sources))
        (scratch / "root").mkdir()
        # nodelete: the threads of its streams live as long as the process. What Paddle's own libraries leave open among
        # themselves is found when they are loaded.
        link = ["-shared", "-pthread", "-Wl,-z,nodelete", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
        paddle_libraries = [f"-L{paddle / 'libs'}", "-lphi_core", "-lcommon"]
        _run(_compiler(), *link, "-o", str(scratch / "root" / LIBRARY), *objects, *paddle_libraries)
        shutil.rmtree(folder, ignore_errors=True)
        (scratch / "root").rename(folder)  # whole or absent


def _weight(source: Path) -> int:
    """What takes long is begun first: files that read Paddle's headers, and the one with thousands of functions."""
    return source.read_text().count("paddle/phi/") + (10 if source.stem == "slots" else 0)


def _more_flags(source: Path) -> tuple[str, ...]:
    """Thousands of functions that call another one take 9 s to compile, and 25 s to compile well."""
    return ("-O0",) if source.stem == "slots" else ()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def main() -> None:
    """Prints the folder of the library, and, on standard error, how long it took where it was built now."""
    if reason := why_not():
        sys.exit(reason)
    begun, is_new = time.perf_counter(), not (_folder() / LIBRARY).exists()
    print(built())
    if is_new:
        seconds = time.perf_counter() - begun
        print(f"built the simulated accelerator in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
