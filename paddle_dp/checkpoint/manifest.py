"""The names of checkpoints and their files, and the manifest, which lists a checkpoint's files with checksums.

A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import Digest, digest_of, read_bytes, write
from paddle_dp.errors import CheckpointError, PaddleDPError

MANIFEST, STATE = "manifest.json", "state.json"
STEP = re.compile(r"step-([0-9]{8,})")
# Folders that a killed job leaves: an unfinished save, replacement or removal.
LEFTOVER = re.compile(r"\.(step-[0-9]{8,})\.(partial|replaced|deleted)-.+")
_FORMAT, _VERSION = "paddle_dp checkpoint", 1
# The only names that a manifest may list: a name from a file is never trusted as a path.
_NAME = re.compile(r"state\.json|rank-[0-9]{5,}\.(?:safetensors|json)")


def tensors_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def step_name(step: int) -> str:
    """The name of this step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name. Raises CheckpointError for another name."""
    match = STEP.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path} is not a checkpoint: its name is not like {step_name(123)}.")
    return int(match[1])


def checkpoints(folder: Path) -> list[Path]:
    """The folders named like checkpoints, oldest first; other files and folders are ignored."""
    try:
        named = [path for path in Path(folder).iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
    return sorted(named, key=step_of)


class UnusableError(CheckpointError):
    """A checkpoint that exists but cannot be loaded, for the reason `why`; the message suggests another one."""

    def __init__(self, folder: Path, why: str):
        self.folder, self.why = folder, why
        super().__init__(f"The checkpoint {folder} cannot be used: {why}. {_instead_of(folder)}")


@contextmanager
def content_of(folder: Path) -> Iterator[None]:
    """Turns any error while a checkpoint's content is read into an UnusableError: another program may have written
    it."""
    try:
        yield
    except PaddleDPError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnusableError(folder, f"its content makes no sense ({why[:300]})") from error


def _instead_of(folder: Path) -> str:
    if not STEP.fullmatch(folder.name):
        return "Give another one."
    older = [path for path in checkpoints(folder.parent) if step_of(path) < step_of(folder)]
    return f"Use the next older one: {older[-1]}" if older else "There is no older one in its folder."


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The results of the checks before a checkpoint was written, made after update `step`.

    `agreed`: all replicas of each tensor were bitwise equal. `finite`: no weight, buffer or optimizer state was NaN or
    infinite.
    """

    agreed: bool
    finite: bool
    step: int

    @property
    def fault(self) -> str | None:
        """The reason not to use the checkpoint, or None."""
        if not self.finite:
            return (
                f"its manifest says that not all of its numbers were finite (checked after step {self.step})"
            )
        if not self.agreed:
            return f"its manifest says that the ranks' weights differed (checked after step {self.step})"
        return None


@dataclass(frozen=True)
class Manifest:
    """The number of ranks that saved, every file's size and checksum, and the checks' results (None: not made)."""

    ranks: int
    files: dict[str, Digest]
    checks: Checks | None = None

    def write(self, folder: Path) -> None:
        """Writes manifest.json, which makes the folder a checkpoint."""
        files = {name: {"size": s.size, "crc32": s.crc32} for name, s in sorted(self.files.items())}
        content: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "ranks": self.ranks,
            "files": files,
        }
        if self.checks is not None:
            content["checks"] = asdict(self.checks)
        write(folder / MANIFEST, [json_codec.encode({**content, "crc32": _crc(content)})])

    def verify(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Reads every file (or only `names`). Raises UnusableError for the first that is not as written."""
        for name in sorted(self.files if names is None else names):
            try:
                actual = digest_of(folder / name, self.files[name].size)
            except FileNotFoundError:
                raise UnusableError(folder, f"{name} is missing") from None
            except OSError as error:
                raise UnusableError(folder, f"{name} cannot be read: {error.strerror}") from None
            if actual.size != self.files[name].size:
                raise UnusableError(
                    folder, f"{name} has {actual.size} bytes instead of {self.files[name].size}"
                )
            if actual != self.files[name]:
                raise UnusableError(folder, f"{name} is damaged: its checksum is wrong")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises UnusableError if it is missing or damaged."""
    try:
        content = read_bytes(folder / MANIFEST, json_codec.MOST_BYTES)
    except FileNotFoundError:
        raise UnusableError(folder, f"it has no {MANIFEST}") from None
    except OSError as error:
        raise UnusableError(folder, f"{MANIFEST} cannot be read: {error.strerror}") from None
    return manifest_of(content, folder)


def manifest_of(content: bytes, folder: Path) -> Manifest:
    """The manifest in a file's bytes; messages name the `folder`. Raises UnusableError if it is damaged."""
    try:
        values = json_codec.decode(content)
    except ValueError as error:
        raise UnusableError(folder, f"{MANIFEST} is damaged: {error}") from None
    try:
        return _checked(values, folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(folder, f"{MANIFEST} is damaged ({error})") from None


def _checked(content: dict[str, Any], folder: Path) -> Manifest:
    if content["format"] != _FORMAT or content["version"] != _VERSION:
        raise UnusableError(folder, f"{MANIFEST} is of {content['format']} version {content['version']}, "
                               f"this is {_FORMAT} version {_VERSION}")  # fmt: skip
    unknown = next((name for name in content["files"] if not _NAME.fullmatch(name)), None)
    if unknown is not None:
        raise UnusableError(folder, f"{MANIFEST} names '{unknown}', which is no file of a checkpoint")
    if content.pop("crc32") != _crc(content):
        raise UnusableError(folder, f"{MANIFEST} is damaged: its checksum is wrong")
    natural = json_codec.natural
    files = {
        name: Digest(natural(s["size"], "a size"), natural(s["crc32"], "a checksum"))
        for name, s in content["files"].items()
    }
    ranks = natural(content["ranks"], "the number of ranks")
    # A damaged `ranks` may be huge; as many ranks as there are files suffice to find a missing file.
    expected = (f(r) for r in range(min(ranks, len(files))) for f in (tensors_name, index_name))
    for name in itertools.chain([STATE], expected):
        if name not in files:
            raise UnusableError(folder, f"{MANIFEST} does not list {name}")
    if not ranks:
        raise ValueError("of no rank")
    return Manifest(ranks, files, _checks(content.get("checks")))


def _checks(content: Any) -> Checks | None:
    if content is None:
        return None
    checks = Checks(**content)
    if type(checks.agreed) is not bool or type(checks.finite) is not bool:
        raise ValueError("checks are true or false")
    return replace(checks, step=json_codec.natural(checks.step, "a step"))


def _crc(content: dict[str, Any]) -> int:
    return zlib.crc32(json_codec.encode(content))
