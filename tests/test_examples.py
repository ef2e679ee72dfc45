"""The projects in examples/ run as their pages say, in a copy of the folder; marks as in tests/test_how_to.py.

Each block of bash is marked, and with `same output` each line of the block below it is printed, numbers aside. The
pages' links, and that the Chinese one shows what the English one shows, are in tests/test_docs.py.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

import paddle_dp
from tests.house.programs import ROOT, shell_variables
from tests.test_how_to import Block, marked_blocks, run_block

PROJECTS = sorted(page.parent for page in ROOT.glob("examples/*/README.md"))
LINES_OF_CODE = 120


def run_project(project: Path, blocks: list[Block], folder: Path) -> None:
    """Runs the blocks in a copy of the project."""
    copy = folder / project.name
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    environment = {**shell_variables(folder / "bin"), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for block in blocks:
        run_block(block, copy, environment, timeout=600, compared=without_numbers)


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e-]*", "N", line).strip()


def quick_blocks(project: Path) -> list[Block]:
    return [block for block in marked_blocks(project / "README.md") if not block.long]


@pytest.mark.processes
@pytest.mark.parametrize("project", [*filter(quick_blocks, PROJECTS)], ids=lambda project: project.name)
def test_the_quick_commands_run(project: Path, tmp_path: Path) -> None:
    run_project(project, quick_blocks(project), tmp_path)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_all_commands_run(project: Path, tmp_path: Path) -> None:
    run_project(project, marked_blocks(project / "README.md"), tmp_path)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_every_command_is_marked(project: Path) -> None:
    commands = re.findall(r"^```bash$", (project / "README.md").read_text(), re.M)
    assert len(commands) == len(marked_blocks(project / "README.md"))


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_project_is_short_and_imports_public_names_alone(project: Path) -> None:
    files = [file for file in sorted(project.rglob("*.py")) if "runs" not in file.parts]
    lines = sum(len(file.read_text().splitlines()) for file in [*files, *project.glob("*.yaml")])
    assert lines <= LINES_OF_CODE, f"{project.name} has {lines} lines"
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("paddle_dp"):
                imported = {alias.name for alias in node.names}
                assert node.module == "paddle_dp" and imported <= {*paddle_dp.__all__}, f"{file}: {imported}"


@pytest.mark.parametrize("index", ["examples/README.md", "examples/README.zh.md"])
def test_the_index_leads_to_every_project(index: str) -> None:
    page = "README.zh.md" if index.endswith(".zh.md") else "README.md"
    links = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / index).read_text()))
    assert {f"{project.name}/{page}" for project in PROJECTS} <= links
