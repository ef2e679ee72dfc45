"""`paddle-dp` for the shells of tests, without the second in which each command imports what it needs.

    subprocess.run([*command_line(), "check", "recipe.yaml"])
    subprocess.run([*command_line(), "python", "script.py"])  # or "-c" and code: without the seconds of `import paddle`

A small program sends its words, folder, variables and open files to a process that has imported everything, a fork of
which is the command. What the command starts (the launcher, ranks) is new processes, as ever.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from paddle_dp.launch.processes import descendants, die_with_parent, kill_all
from tests.eventually import eventually
from tests.house.forked_trial import try_in_forks
from tests.house.programs import end_with
from tests.rank_pool import draw_anew, rank_pool
from tests.ranks import ROOT, _environment, _name

CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect(sys.argv[1])
    words = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(end, [len(words).to_bytes(4, "big")], [0, 1, 2])
    end.sendall(words)
    sys.exit(int(end.recv(8) or 1))
"""


@cache
def command_line() -> list[str]:
    """Returns the words that stand for `paddle-dp`; the process that answers them lives as long as this one."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "client.py").write_text(CLIENT)
    (folder / "args.json").write_text(json.dumps([[str(folder / "door")], {}]))
    environment = _environment({})
    rank_pool(environment, ROOT).serve(_name(serve), folder)
    eventually((folder / "door").exists, 100)
    return [sys.executable, "-IS", str(folder / "client.py"), str(folder / "door")]


def serve(path: str) -> NoReturn:
    """In a fork of the waiting process: answers each command in a fork of its own."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.new")
        door.listen()
        os.rename(f"{path}.new", path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended forks do not stay
        while True:
            end, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _watch(end)
            end.close()


def _watch(end: socket.socket) -> NoReturn:
    """Runs a command and sends its status; ends it, and what it has started, when nobody waits for it any more."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(end, 4, 3)
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += end.recv(1 << 16)
    child = os.fork()
    if child == 0:
        end.close()
        _become(files, *json.loads(message))
    for file in files:
        os.close(file)
    select.select([end.fileno(), os.pidfd_open(child)], [], [])
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        kill_all(lambda: descendants(os.getpid()))
        os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    end.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _become(files: list[int], words: list[str], folder: str, variables: dict[str, str]) -> NoReturn:
    die_with_parent()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    draw_anew()
    end_with(partial(_run, words, folder))


def _run(words: list[str], folder: str) -> None:
    from paddle_dp import cli

    if words[:1] != ["python"]:
        sys.argv = ["paddle-dp", *words]
        sys.path.insert(0, folder)
        try_in_forks()
        cli.main(words)
        return
    sys.argv = words[1:]
    sys.modules["__main__"] = main = ModuleType("__main__")  # where `python -c` works
    if words[1] == "-c":
        sys.argv[:2] = ["-c"]
        sys.path.insert(0, "")
        exec(compile(words[2], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(words[1]).resolve().parent))
        runpy.run_path(words[1], run_name="__main__")
