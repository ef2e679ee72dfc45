"""Names say what is inside, every package has a sign, every file a first sentence."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMELESS = {"util", "utils", "common", "helper", "helpers", "misc"}


def sources() -> list[Path]:
    return [*ROOT.glob("paddle_dp/**/*.py"), *ROOT.glob("models/**/*.py")]


def test_every_name_says_what_is_inside() -> None:
    names = {
        str(f.relative_to(ROOT)): {p.strip("_") for p in f.relative_to(ROOT).with_suffix("").parts}
        for f in sources()
    }
    nameless = [file for file, parts in names.items() if parts & NAMELESS]
    assert not nameless, f"name the subject, not its usefulness: {nameless}"


def test_every_room_has_a_sign_and_every_file_a_promise() -> None:
    unsigned = [
        str(f.relative_to(ROOT)) for f in sources() if not ast.get_docstring(ast.parse(f.read_text()))
    ]
    folders = {f.parent for f in sources()}
    unsigned += [f"{d.relative_to(ROOT)}/__init__.py" for d in folders if not (d / "__init__.py").exists()]
    assert not unsigned, f"these say nothing of themselves: {unsigned}"
    short = [str(d.relative_to(ROOT)) for d in folders if sign(d).count(".") < 2]
    assert not short, (
        f"a sign says what lives here, what never does, and which package to try instead: {short}"
    )


def sign(folder: Path) -> str:
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
