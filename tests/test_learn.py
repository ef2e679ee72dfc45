"""The pages of docs/learn run, as those of docs/how-to, and so do their notebooks, which are the pages again.

`pytest -m notebooks` executes the notebooks (extra `dev`: nbclient, ipykernel), which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.house.programs import run_program
from tests.test_how_to import marked_blocks, run_blocks
from tools.notebooks import written

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/learn"
PAGES = sorted(page for page in FOLDER.glob("*.md") if not page.name.startswith("README"))
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]
INDEXES = [FOLDER / "README.md", FOLDER / "README.zh.md"]
CLAIMS = 53


def pages_with(long: bool) -> list[Path]:
    return [page for page in ENGLISH if any(block.long == long for block in marked_blocks(page))]


def run_page(page: Path, folder: Path, long: bool) -> None:
    for name in ("tests", "tools"):
        (folder / name).symlink_to(ROOT / name)
    blocks = [block for block in marked_blocks(page) if long or not block.long]
    run_blocks(page, blocks, folder, timeout=900)


@pytest.mark.processes
@pytest.mark.parametrize("page", pages_with(long=False), ids=lambda page: page.stem)
def test_the_short_blocks_of_the_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, long=False)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages_with(long=True), ids=lambda page: page.stem)
def test_all_blocks_of_the_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, long=True)


def test_the_notebooks_are_the_pages() -> None:
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == {page.stem for page in PAGES}
    for page in PAGES:
        same = page.with_suffix(".ipynb").read_text() == written(page)
        assert same, f"{page.name} has changed: python tools/notebooks.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_notebook_has_a_cell_for_each_block(page: Path) -> None:
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    ran = [re.sub(r"^%%bash.*\n", "", text) for text in code[1:] if not text.startswith("%%writefile")]
    assert ran == [block.command.rstrip("\n") for block in marked_blocks(page)]
    assert not [text for text in code[1:] if "<!--" in text]


EXECUTE = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(book)
nbclient.NotebookClient(book, timeout=1200, resources={"metadata": {"path": sys.argv[2]}}).execute()
"""


def execute(page: Path) -> None:
    """Executes the notebook of a page in its folder, as a reader opens it; a cell that fails raises."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = (sys.executable, "-c", EXECUTE, page.with_suffix(".ipynb"), FOLDER)
    run_program(*map(str, words), env={"PATH": path, "OMP_NUM_THREADS": "1"}, timeout=1200)


@pytest.fixture(scope="module")
def executions(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[None]]]:
    """Two notebooks at a time: half of the time one waits for a process that starts."""
    for name in ("nbformat", "nbclient"):
        pytest.importorskip(name)
    chosen = [item.callspec.params for item in request.session.items if "executions" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {each["page"]: pool.submit(execute, each["page"]) for each in chosen}


@pytest.mark.long
@pytest.mark.notebooks
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_the_notebook_executes(page: Path, executions: dict[Path, Future[None]]) -> None:
    """The Chinese ones have the same cells of code."""
    executions[page].result()


def test_each_page_begins_with_its_question_and_is_short() -> None:
    for page in PAGES:
        lines = page.read_text().splitlines()
        assert re.fullmatch(r"\*\*.+[?？]\*\*", lines[2]), f"{page.name}: {lines[2]}"
        assert len(lines) <= 300, f"{page.name} has {len(lines)} lines"


@pytest.mark.parametrize("index", INDEXES, ids=lambda page: page.name)
def test_the_index_has_every_page_and_every_claim(index: Path) -> None:
    text = index.read_text()
    named = set(re.findall(r"\]\(([\w.-]+\.md)", text))
    chinese = index.name.endswith(".zh.md")
    assert {page.name for page in PAGES if page.name.endswith(".zh.md") == chinese} <= named
    rows = re.findall(r"^\| [1-5] \| .*", text, re.M)
    assert len(rows) == CLAIMS
    assert not [row for row in rows if not re.search(r"\]\([\w.-]+\.md", row) or row.count(" | ") != 4]


@pytest.mark.parametrize("page", [*PAGES, *INDEXES], ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    """The anchors within docs/learn: the site's slugs."""
    for link, anchor in re.findall(r"\]\(([\w.-]+\.md)#([^)]+)\)", page.read_text()):
        if (target := FOLDER / link).exists():
            headings = re.findall(
                r"^#+ (.*)$", re.sub(r"^```.*?^```", "", target.read_text(), flags=re.S | re.M), re.M
            )
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {link}#{anchor}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name.endswith(".zh.md")], ids=lambda page: page.name)
def test_a_chinese_page_has_the_same_blocks(page: Path) -> None:
    """Comments and strings in Chinese aside: none is expected, but for comments."""
    blocks = [
        re.findall(r"^(<!-- run[^>]*-->\n)?\n*^```(\w*)\n(.*?)^```", text, re.S | re.M)
        for text in (page.read_text(), page.with_name(page.name.replace(".zh.md", ".md")).read_text())
    ]
    without = [[(mark, kind, re.sub(r"\s*#.*", "", code)) for mark, kind, code in found] for found in blocks]
    assert without[0] == without[1]
