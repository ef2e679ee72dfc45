"""Writes docs/learn/NAME.ipynb from each page of docs/learn: text, and a cell for each block that can be run.

python tools/notebooks.py            writes them
python tools/notebooks.py --check    exits 1 if one is not up to date

A block of bash or Python after a mark, `<!-- run -->`, is a cell; the block of output that follows it is the cell's
output. A block of Python that begins with `# name.py` is a cell that writes that file. All else is text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/learn"
CELL = re.compile(
    r"""
    (?:^<!--\ run(?P<words>[^>]*?)-->\n+)?
    ^```(?P<language>bash|python)\n(?P<code>.*?)^```\n
    (?:\n+```\n(?P<output>.*?)^```\n)?
    """,
    re.S | re.M | re.X,
)
FILE = re.compile(r"# (\w+\.py)\n")
# A page's commands are typed in a clone; a notebook writes its runs and files elsewhere.
SETUP = """\
import os
import tempfile
from pathlib import Path

clone = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "configs").is_dir())
os.chdir(tempfile.mkdtemp(prefix="learn-"))
for name in ("configs", "models", "tests", "tools"):
    os.symlink(clone / name, name)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(clone), os.environ.get("PYTHONPATH")]))
os.environ["PYTHONWARNINGS"] = "ignore"
"""


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page's text, in version 4.5 of the format."""
    title, _, rest = page.partition("\n")
    cells = [_text(title), _code(SETUP, None), *_cells(rest)]
    return {
        "cells": [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cells(page: str) -> Iterator[dict[str, Any]]:
    text, end = "", 0
    for block in CELL.finditer(page):
        text += page[end : block.start()]
        end = block.end()
        file = FILE.match(block["code"]) if block["language"] == "python" else None
        if block["words"] is None and not file:
            text += block[0]
            continue
        if text.strip():
            yield _text(text)
        code, text = block["code"], ""
        if block["words"] is None and file:
            code = f"%%writefile {file[1]}\n{code}"
            if block["output"] is not None:  # the output of no cell
                text = f"```\n{block['output']}```\n"
        elif block["language"] == "bash":
            status = re.search(r"status \d+", block["words"])
            code = f"%%bash{' --no-raise-error' if status else ' -e'}\n{code}"
        yield _code(code, None if text else block["output"])
    if (text + page[end:]).strip():
        yield _text(text + page[end:])


def _text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}


def _code(code: str, output: str | None) -> dict[str, Any]:
    printed = {"name": "stdout", "output_type": "stream", "text": (output or "").splitlines(keepends=True)}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [printed] if output else [],
        "source": code.rstrip("\n").splitlines(keepends=True),
    }


def written(page: Path) -> str:
    """The file's text that belongs to `page`."""
    return json.dumps(notebook(page.read_text()), ensure_ascii=False, indent=1) + "\n"


def pages() -> list[Path]:
    return sorted(page for page in FOLDER.glob("*.md") if not page.name.startswith("README"))


def main() -> int:
    stale = []
    for page in pages():
        file = page.with_suffix(".ipynb")
        if file.exists() and file.read_text() == written(page):
            continue
        stale.append(file.name)
        if "--check" not in sys.argv:
            file.write_text(written(page))
    orphans = {file.name for file in FOLDER.glob("*.ipynb")} - {page.stem + ".ipynb" for page in pages()}
    if "--check" in sys.argv and (stale or orphans):
        print(f"not what the pages say: {sorted({*stale, *orphans})}; run python tools/notebooks.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
