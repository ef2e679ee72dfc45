"""The loop of import_arguments.py and import_paddleclas.py: imports files, and counts those that become recipes."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from paddle_dp.coming_from.importer import Import
from paddle_dp.errors import UsageError

WIDTH = 120  # characters of a reason


def count_imports(
    noun: str,
    files: Sequence[Path],
    folder: Path | None,
    importer: Callable[[Path, Path], Import],
    reason_of: Callable[[str, Path], str],
) -> bool:
    """Imports each of `files` into `folder`, or to look at alone, and prints the counts and the reasons, the commonest
    first. Returns whether `check --no-run` passes all recipes.

    `importer`: makes a recipe at a path. `reason_of`: the sentence of a refusal without the file's names, to be
    counted. Raises AssertionError for a key that is not accounted for, or twice.
    """
    counts, reasons = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        target = folder or Path(scratch)
        target.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(files):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    result = importer(file, target / f"{number:03d}-{file.stem.lower()}.yaml")
            except UsageError as error:
                reasons[f"no recipe: {reason_of(str(error), file)[:WIDTH]}"] += 1
                continue
            c = result.configuration
            mentioned = {key for each in (*c.lost, *c.unused) for key in each.keys}
            assert mentioned | c.carried >= c.values.keys(), f"{file}: a key is unaccounted for"
            assert not mentioned & c.carried, f"{file}: {mentioned & c.carried} twice"
            counts.update({"recipes": 1, "whole": not c.lost, "read": not result.obstacle})
            reasons.update(f"not honoured: {each.pattern} ({each.reason})" for each in c.lost)
            reasons.update(f"to fill in: {each.partition(':')[0]}" for each in c.to_fill)
            if result.obstacle:
                reasons[f"not read: {re.sub(r'^.*?: ', '', result.obstacle)[:WIDTH]}"] += 1
    print(
        f"{len(files)} {noun}: {counts['recipes']} become recipes, {counts['whole']} of them with every key honoured; "
        f"check --no-run passes {counts['read']}"
    )
    for reason, number in reasons.most_common():
        print(f"{number:5d}  {reason}")
    return counts["read"] == counts["recipes"]
