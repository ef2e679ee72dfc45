"""Imports all training configurations of a clone of PaddleClas, and counts those that become recipes.

python tools/import_paddleclas.py --from FOLDER                  # recipes are made, and read as by `check --no-run`
python tools/import_paddleclas.py --from FOLDER --keep RECIPES   # and stay in this folder

FOLDER is a clone of PaddleClas, which is not kept here; its packages (tqdm, opencv-python-headless, …) have to be
installed, as some of its models are built, without memory. Every key is accounted for, or the tool fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ruamel.yaml import YAML

from paddle_dp.coming_from.importer import import_recipe
from paddle_dp.errors import UsageError

CARDS = 4


def trains(file: Path) -> bool:
    """True for a configuration with a model and training data."""
    content = YAML(typ="safe", pure=True).load(file.read_text("utf-8"))
    return isinstance(content, dict) and "Arch" in content and "Train" in content.get("DataLoader", {})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="clone", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="RECIPES")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.clone))
    files = [file for file in sorted(arguments.clone.glob("ppcls/configs/**/*.yaml")) if trains(file)]
    counts, reasons = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(files):
            out = folder / f"{number:03d}-{file.stem.lower()}.yaml"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    result = import_recipe(file, CARDS, out)
            except UsageError as error:
                reasons[f"no recipe: {str(error).partition(': ')[2][:120]}"] += 1
                continue
            c = result.configuration
            mentioned = {key for each in (*c.lost, *c.unused) for key in each.keys}
            assert mentioned | c.carried == c.values.keys(), f"{file}: a key is unaccounted for"
            counts["recipes"] += 1
            counts["whole"] += not c.lost
            counts["read"] += not result.obstacle
            reasons.update(f"not honoured: {each.pattern} ({each.reason})" for each in c.lost)
            if result.obstacle:
                reasons[f"not read: {result.obstacle.partition(': ')[2][:160]}"] += 1
    print(
        f"{len(files)} training configurations: {counts['recipes']} become recipes, {counts['whole']} of them with "
        f"every key honoured; check --no-run passes {counts['read']}"
    )
    for reason, count in reasons.most_common():
        print(f"{count:5d}  {reason}")
    return 0 if counts["read"] == counts["recipes"] else 1


if __name__ == "__main__":
    sys.exit(main())
