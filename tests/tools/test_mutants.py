"""tools/mutants.py: its options are those that it reads."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from unittest.mock import patch

from tools import mutants


def test_every_option_that_is_read_is_declared() -> None:
    source = Path(mutants.__file__).read_text()
    read = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "given"
    }
    with patch.object(sys, "argv", ["mutants.py"]):
        assert read <= set(vars(mutants.parse()))
