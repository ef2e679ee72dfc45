"""Runs a command in a terminal, and writes the screen that it leaves as a still picture.

python tools/screens.py --columns 104 docs/pictures/train.svg -- paddle-dp train configs/digits_mlp.yaml --ranks 2

The picture is an SVG that loads nothing. A progress bar is in it only if the command leaves it on the screen.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n\b])|([^\x1b\r\n\b])", re.S)


class Screen:
    """A terminal's cells, each a character after the colour codes that hold for it; nothing is scrolled away."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column, self.style = columns, 0, 0, ""
        self.lines: list[list[tuple[str, str]]] = [[]]

    def feed(self, text: str) -> None:
        """Draws `text`. Raises ValueError for a control sequence that this terminal does not know."""
        if unknown := TOKEN.sub("", text):
            raise ValueError(f"unknown control sequence: {unknown!r}")
        for match in TOKEN.finditer(text):
            arguments, code, control, character = match.groups()
            if code:
                self._obey(code, arguments)
            elif control:
                self.column = {"\r": 0, "\b": max(0, self.column - 1)}.get(control, self.column)
                self.row += control == "\n"
            elif character >= " ":
                self._draw(character)
            self._reach()

    def _obey(self, code: str, arguments: str) -> None:
        line = self.lines[self.row]
        if code == "m":
            self.style = "" if arguments in ("", "0") else f"{self.style}\x1b[{arguments}m"
        elif code == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif code == "K" and arguments == "2":
            line.clear()
        elif code == "K" and arguments in ("", "0"):
            del line[self.column :]
        elif code not in "hl":  # modes, such as a hidden cursor
            raise ValueError(f"unknown control sequence: ESC[{arguments}{code}")

    def _reach(self) -> None:
        self.lines.extend([] for _ in range(self.row + 1 - len(self.lines)))

    def _draw(self, character: str) -> None:
        if self.column == self.columns:
            self.row, self.column = self.row + 1, 0
            self._reach()
        line = self.lines[self.row]
        line.extend([("", " ")] * (self.column + 1 - len(line)))
        line[self.column] = (self.style, character)
        self.column += 1

    def ansi(self, rows: int) -> str:
        """The last `rows` lines with their colours, without empty ones at the end."""
        lines = ["".join(f"{style}{char}\x1b[0m" for style, char in line) for line in self.lines]
        return "\n".join("\n".join(lines).rstrip().split("\n")[-rows:])


def show(command: list[str], columns: int, rows: int) -> tuple[int, str]:
    """Runs `command` in a terminal: its exit status, and all that it wrote there, a copy of which goes to stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    env["TERM"] = "xterm-256color"
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the command and its children have closed the terminal
            return process.wait(), output.decode()
        output += chunk
        sys.stderr.buffer.write(chunk)


def main() -> int:
    """Writes the picture; returns the exit status of the command."""
    parser = argparse.ArgumentParser(description="Writes the last screen of a command as a still SVG.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+", help="after --")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    title = shlex.join(options.command)
    status, output = show(options.command, options.columns, options.rows)
    screen, console = Screen(options.columns), Console(width=options.columns, record=True, file=io.StringIO())
    screen.feed(f"$ {title}\r\n{output}")
    console.print(Text.from_ansi(screen.ansi(options.rows)))
    drawing = console.export_svg(title=title, unique_id=options.picture.stem)
    options.picture.write_text(re.sub(r"\s*@font-face \{.*?\}", "", drawing, flags=re.S))
    return status


if __name__ == "__main__":
    sys.exit(main())
