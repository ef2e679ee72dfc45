"""The file of `paddle-dp doctor --prove`: its rows, without a path, an address, or a name of a host or a user.

Whoever has cards sends this file to strangers, so every text in it is scrubbed, whatever program it came from.
"""

from __future__ import annotations

import getpass
import json
import os
import pwd
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paddle_dp.doctor.machine import State
from paddle_dp.files import replacing

FORMAT = 1
MAX_CHARS = 400  # of a text from another program
PATH, ADDRESS, HOST, USER = "<path>", "<address>", "<host>", "<user>"
# Not scrubbed: dotted versions look like addresses. `prove_rank.versions` lets only digits, letters, `.`, `+`, `-` in.
VERSIONS = "versions"
# A quoted text with a slash, which may contain spaces; then any word with a slash or a tilde before it.
_QUOTED_PATH = re.compile(r"""(?<!\w)(['"`])[^'"`\n]*/[^'"`\n]*\1(?!\w)""")
_PATH = re.compile(r"(?:~[\w.-]*|[^\s'\"`()<>\[\]{},;=]*)/[^\s'\"`()\[\]{},;]*|~[\w.-]+")
_ADDRESSES = (
    re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)(?::\d+)?"),  # IPv4, with a port
    # IPv6, and of hardware
    re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F]{0,4}(?:%\w+)?(?![\w:])"),
)


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """The result of one part of a step. `agrees`: whether it equals one process's; None if nothing was compared.

    "mend": it differs, or it failed; "look": nothing is proven by it. `seconds` is its time by the wall.
    """

    step: str
    name: str
    sentence: str
    state: State = "ok"
    agrees: bool | None = None
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scrubber:
    """Replaces paths, addresses, `hosts` and `users` in texts. `folders` may contain spaces."""

    hosts: tuple[str, ...]
    users: tuple[str, ...]
    folders: tuple[str, ...]

    @classmethod
    def here(cls, *folders: Path) -> Scrubber:
        """Returns the scrubber for this machine and user; `folders` are further ones that texts may name."""
        host, home = socket.gethostname(), Path.home()
        users = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")]
        with suppress(KeyError, OSError):  # a container may run as a user without a name
            entry = pwd.getpwuid(os.getuid())
            users += [getpass.getuser(), entry.pw_name, entry.pw_gecos.partition(",")[0]]
        known = [home, Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), *folders]
        return cls(
            hosts=_longest_first([host, host.partition(".")[0]]),
            users=_longest_first([*users, home.name]),
            folders=_longest_first(str(folder) for folder in known if len(folder.parts) > 1),
        )

    def text(self, text: str) -> str:
        """Returns the text without paths, addresses and names, on one line of at most MAX_CHARS characters."""
        for folder in self.folders:
            text = re.sub(rf"{re.escape(folder)}(?:/[^\s'\"`,;()]*)?", PATH, text)
        text = _PATH.sub(PATH, _QUOTED_PATH.sub(PATH, text))
        for address in _ADDRESSES:
            text = address.sub(ADDRESS, text)
        for names, mark in ((self.hosts, HOST), (self.users, USER)):
            for name in names:
                pattern = rf"(?<![A-Za-z0-9<]){re.escape(name)}(?![A-Za-z0-9>])"
                text = re.sub(pattern, mark, text, flags=re.IGNORECASE)
        text = " ".join(text.split())
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} …"

    def value(self, value: Any) -> Any:
        """Returns a JSON value with all its texts scrubbed, but for those under the key `versions`."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: item if key == VERSIONS else self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value


def _longest_first(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names without empty and double ones; a name within another one comes after it."""
    stripped = {name.strip() for name in names} - {""}
    return tuple(sorted(stripped, key=lambda name: (-len(name), name)))


class ProofFile:
    """The file at `path`, written whole after each row, so that an interrupted proof keeps its rows."""

    def __init__(self, path: Path, scrubber: Scrubber, ranks: int, minutes: float):
        self.path, self.scrubber, self.rows = path, scrubber, list[ProofRow]()
        self._head: dict[str, Any] = {
            "format": FORMAT, "what": "paddle-dp doctor --prove", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "ranks": ranks, "minutes": minutes,
        }  # fmt: skip

    def add(self, row: ProofRow) -> ProofRow:
        """Adds the row, scrubbed, and writes the file. Returns the scrubbed row."""
        row = ProofRow(**self.scrubber.value(asdict(row)))
        self.rows.append(row)
        self.write(None)
        return row

    def write(self, ended: str | None) -> None:
        """Writes the file. `ended`: "done", a signal's name, or None while the proof runs."""
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(self.content(ended), indent=1, ensure_ascii=False) + "\n", "utf-8")

    def content(self, ended: str | None) -> dict[str, Any]:
        """Returns the file's JSON value."""
        compared = [row for row in self.rows if row.agrees is not None]
        counts = {"agree": sum(row.agrees is True for row in compared), "compared": len(compared)}
        return {**self._head, "ended": ended, **counts, "rows": [asdict(row) for row in self.rows]}
