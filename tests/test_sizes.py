"""Nothing grows past what a reader holds in mind: sizes of files and functions, names, and a sign on every room."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 220, 50
NAMELESS = {"util", "utils", "common", "helper", "helpers", "misc"}


def sources() -> list[Path]:
    return [*ROOT.glob("paddle_dp/**/*.py"), *ROOT.glob("models/**/*.py")]


def test_files_and_functions_stay_small() -> None:
    big = []
    for file in [*sources(), *ROOT.glob("tools/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        where, text = file.relative_to(ROOT), file.read_text()
        if (lines := text.count("\n")) > FILE_LINES:
            big.append(
                f"{where} has {lines} lines, {FILE_LINES} at most: it holds two subjects; give each its file."
            )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    big.append(
                        f"{where}:{node.lineno}: {node.name} has {length} lines, {FUNCTION_LINES} at most."
                    )
    assert not big, "\n" + "\n".join(big)


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
    assert not short, f"a sign says what lives here, what never does, and which room to try instead: {short}"


def sign(folder: Path) -> str:
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
