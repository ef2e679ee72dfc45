"""Imports all training configurations of a clone of PaddleClas, and counts those that become recipes.

python tools/import_paddleclas.py --from FOLDER                  # recipes are made, and read as by `check --no-run`
python tools/import_paddleclas.py --from FOLDER --keep RECIPES   # and stay in this folder
python tools/import_paddleclas.py --from FOLDER --verify         # ten are trained two steps and verified, for minutes
python tools/import_paddleclas.py --from FOLDER --verify resnet18 pplcnet_x0_25

FOLDER is a clone of PaddleClas, which is not kept here; its packages (tqdm, opencv-python-headless, …) have to be
installed, as some of its models are built, without memory. Every key is accounted for, or the tool fails. For --verify
a recipe gets ten classes of small pictures, drawn here, and a batch of 8 in float32; its augmentation and mixing stay.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from ruamel.yaml import YAML

from paddle_dp.coming_from.importer import import_recipe
from tools.command_line import paddle_dp, parser_of
from tools.import_counts import count_imports

CARDS, CLASSES, PIXELS = 4, 10, 64
TEN = (
    "resnet18", "resnet50_vd", "mobilenetv3_small_x0_35", "shufflenetv2_x0_25", "pplcnet_x0_25", "ghostnet_x0_5",
    "repvgg_a0", "efficientnetb0", "deit_tiny_patch16_224", "squeezenet1_0",
)  # fmt: skip


def trains(file: Path) -> bool:
    """True for a configuration with a model and training data."""
    content = YAML(typ="safe", pure=True).load(file.read_text("utf-8"))
    return isinstance(content, dict) and "Arch" in content and "Train" in content.get("DataLoader", {})


VERDICTS = ("SAME", "DIFFERENT", "PROVES NOTHING")


def pictures(folder: Path) -> None:
    """Writes 40 pictures and lists of them, as PaddleClas reads them."""
    from PIL import Image

    random, lines = np.random.default_rng(0), []
    for number in range(40):
        blocks = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(PIXELS // 4, 0).repeat(PIXELS // 4, 1)).save(folder / f"{number}.png")
        lines.append(f"{number}.png {number % CLASSES}\n")
    (folder / "train_list.txt").write_text("".join(lines))
    (folder / "val_list.txt").write_text("".join(lines[:10]))


def overrides(recipe: dict[str, Any], folder: Path) -> list[str]:
    """The settings that shrink a recipe; the size of a model with a fixed number of patches stays."""
    parts = recipe["model"]
    classes = next(key for key in ("num_classes", "class_num") if key in parts)
    size = [] if "224" in parts["use"] else [f"dataset.size={PIXELS}", f"dataset.resize={PIXELS + 8}"]
    lists = [f"dataset.path={folder}", "dataset.train=train_list.txt", "dataset.test=val_list.txt"]
    train = ["train.batch=8", "train.micro_batches=1", "train.precision=float32", "train.length=4 steps"]
    return [f"model.{classes}={CLASSES}", *size, *lists, *train, "loader.num_workers=0", "ema=null"]


def verify(files: Sequence[Path], wanted: Sequence[str], clone: Path, folder: Path) -> int:
    """Verifies recipes of these names on two ranks, prints a row for each, and returns how many are not SAME."""
    pictures(folder)
    failed = 0
    environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    for name in wanted:
        file = next(file for file in files if file.stem.lower() == name)
        with contextlib.redirect_stdout(io.StringIO()):
            import_recipe(file, CARDS, folder / f"{name}.yaml")
        recipe = YAML(typ="safe", pure=True).load((folder / f"{name}.yaml").read_text())
        start = time.monotonic()
        words = ["--ranks", 2, "--steps", 2, *overrides(recipe, folder)]
        command = paddle_dp("verify", f"{name}.yaml", *words)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        verdicts = (line for line in done.stdout.splitlines() if line.startswith(VERDICTS))
        said = next(verdicts, done.stderr[-400:])
        failed += done.returncode != 0
        with_mix = ", ".join(key for key in ("augment", "erase") if key in recipe["dataset"])
        mixed = ", ".join(filter(None, [with_mix, *recipe.get("mix", {})]))
        print(f"| {file.stem} | {mixed or '–'} | {said} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--from", dest="clone", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="RECIPES")
    parser.add_argument("--verify", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.clone))
    files = [file for file in sorted(arguments.clone.glob("ppcls/configs/**/*.yaml")) if trains(file)]
    if arguments.verify is not None:
        with tempfile.TemporaryDirectory() as scratch:
            return verify(files, arguments.verify or TEN, arguments.clone.resolve(), Path(scratch))
    is_read = count_imports(
        "training configurations",
        files,
        arguments.keep,
        lambda file, out: import_recipe(file, CARDS, out),
        lambda error, file: error.partition(": ")[2],
    )
    return 0 if is_read else 1


if __name__ == "__main__":
    sys.exit(main())
