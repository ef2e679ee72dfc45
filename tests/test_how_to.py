"""The pages of docs/how-to run: blocks after a mark are done in a temporary folder, and print what the page shows.

A mark is a comment before a block, `<!-- run -->`, with words: `long` leaves the block to `make long`, together with
the marked blocks after it on that page; `status 2` is the expected exit status; `same output` says that each line of
the next block is printed. A block of Python that begins with `# name.py` is that file; a marked one is run as it is,
and is long only if its mark says so.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.command_service import command_line
from tests.house.forked_commands import run_command
from tests.house.programs import ROOT, run_program, shell_variables

PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]
MARKED = re.compile(
    r"^<!-- run(?P<words>[^>]*?) -->\n+```(?P<language>bash|python)\n(?P<command>.*?)^```\n"
    r"(?:\n+```\n(?P<output>.*?)^```)?",
    re.S | re.M,
)
TRAINING = re.compile(r"^(paddle-dp train .*\n)", re.M)


class Block(NamedTuple):
    language: str
    command: str
    output: list[str]
    long: bool
    status: int
    same_output: bool


def marked_blocks(page: Path) -> list[Block]:
    """The blocks that can be run, in the page's order. Bash after a long block is long: it may need its run."""
    found: list[Block] = []
    for match in MARKED.finditer(page.read_text()):
        status = re.search(r"status (\d+)", match["words"])
        output = [line for line in (match["output"] or "").splitlines() if "…" not in line]
        after = match["language"] == "bash" and any(block.long for block in found)
        long = "long" in match["words"] or after
        found.append(
            Block(
                match["language"],
                match["command"],
                output,
                long,
                int(status[1]) if status else 0,
                "same output" in match["words"],
            )
        )
    return found


def run_block(
    block: Block,
    folder: Path,
    environment: dict[str, str],
    timeout: int,
    compared: Callable[[str], str] = str,
) -> None:
    """Runs a block; `compared` returns the part of a line that the page and the command have in common. In a quick
    block lines of `paddle-dp train` are jobs in forks, of one epoch; but a refused one starts none."""
    printed = ""
    shell = (
        ["bash", "-eo", "pipefail", "-c"] if block.language == "bash" else [*command_line(), "python", "-c"]
    )
    in_forks = not (block.long or block.status)
    for text in TRAINING.split(block.command) if in_forks else [block.command]:
        if in_forks and TRAINING.fullmatch(text):
            printed += run_command([*shlex.split(text)[1:], "train.length=1 epoch"], folder)
        elif text.strip():
            done = run_program(
                *shell, text, folder=folder, env=environment, timeout=timeout, status=block.status
            )
            printed += done.stdout + done.stderr
    if not block.same_output:
        return
    lines = {compared(line) for line in printed.splitlines()}
    assert block.output, f"no output stands below {block.command}"
    missing = [line for line in block.output if compared(line) not in lines]
    assert not missing, f"{block.command} does not print {missing}, but\n{printed}"


def run_blocks(page: Path, blocks: list[Block], folder: Path, timeout: int = 280) -> None:
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(), re.S | re.M):
        (folder / name).write_text(code)
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(ROOT / "models", folder / "models", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**shell_variables(folder / "bin"), "OMP_NUM_THREADS": "1"}
    for block in blocks:
        run_block(block, folder, environment, timeout)


def pages_with(long: bool) -> list[Path]:
    return [page for page in ENGLISH if any(block.long == long for block in marked_blocks(page))]


@pytest.mark.processes
@pytest.mark.parametrize("page", pages_with(long=False), ids=lambda page: page.stem)
def test_the_commands_of_the_page_run(page: Path, tmp_path: Path) -> None:
    run_blocks(page, [block for block in marked_blocks(page) if not block.long], tmp_path)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with(long=True), ids=lambda page: page.stem)
def test_all_commands_of_the_page_run(page: Path, tmp_path: Path) -> None:
    run_blocks(page, marked_blocks(page), tmp_path)


def test_each_page_is_short_and_in_the_index() -> None:
    for name in ("README.md", "README.zh.md"):
        if not (index := ROOT / "docs/how-to" / name).exists():
            continue
        named = set(re.findall(r"\]\(([\w.-]+\.md)\)", index.read_text()))
        suffix = ".zh.md" if name.endswith(".zh.md") else ".md"
        twins = {page.name for page in PAGES if page.name.endswith(".zh.md") == (suffix == ".zh.md")}
        assert twins - {name} == named - {"README.md", "README.zh.md"}, name
    assert not {page.name for page in PAGES if len(page.read_text().splitlines()) > 130}


def test_the_chinese_pages_have_the_same_commands() -> None:
    """Comments aside: they are translated."""
    for chinese in (page for page in PAGES if page.name.endswith(".zh.md")):
        commands = [
            [
                " ".join(re.sub(r"(^|\s)#.*", "", text).split())
                for text in re.findall(r"^```(?:bash|yaml|python)\n(.*?)^```", page.read_text(), re.S | re.M)
            ]
            for page in (chinese, chinese.with_name(chinese.name.replace(".zh.md", ".md")))
        ]
        assert commands[0] == commands[1], chinese.name
