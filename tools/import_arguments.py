"""Imports all trainings with arguments in a folder, of PaddleNLP, PaddleFormers or Hugging Face's Trainer, and counts
those that become recipes.

python tools/import_arguments.py --from FOLDER                  # recipes are made, and read as by `check --no-run`
python tools/import_arguments.py --from FOLDER --keep RECIPES   # and stay in this folder

FOLDER is a clone of PaddleNLP, LLaMA-Factory or alignment-handbook, which is not kept here. A file counts if it says
per_device_train_batch_size. Models that files name by a hub's names get a config.json with their published sizes, for
the ten names below: nothing is downloaded. Every key is accounted for, or the tool fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.importer import Import, import_recipe
from paddle_dp.errors import UsageError

RANKS = (8, 16, 32, 64, 128)  # the first that the degrees of the axes divide
SUFFIXES = (".json", ".yaml", ".yml", ".sh")
# vocabulary, width, depth, heads, heads of keys and values, width of the MLP, length, base of the positions
LLAMAS = {
    "llama-7b": (32000, 4096, 32, 32, 32, 11008, 2048, 1e4), "llama-13b": (32000, 5120, 40, 40, 40, 13824, 2048, 1e4),
    "Llama-2-7b": (32000, 4096, 32, 32, 32, 11008, 4096, 1e4),
    "Llama-2-13b": (32000, 5120, 40, 40, 40, 13824, 4096, 1e4),
    "Llama-2-70b": (32000, 8192, 80, 64, 8, 28672, 4096, 1e4),
    "Meta-Llama-3-8B": (128256, 4096, 32, 32, 8, 14336, 8192, 5e5),
    "Meta-Llama-3-8B-Instruct": (128256, 4096, 32, 32, 8, 14336, 8192, 5e5),
    "Llama-3.2-1B-Instruct": (128256, 2048, 16, 32, 8, 8192, 131072, 5e5),
    "Mistral-7B-v0.3": (32768, 4096, 32, 32, 8, 14336, 32768, 1e6),
    "Mistral-7B-Instruct-v0.3": (32768, 4096, 32, 32, 8, 14336, 32768, 1e6),
}  # fmt: skip
KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "rope_theta",
)  # fmt: skip


def config(name: str) -> dict[str, Any]:
    """The config.json of a model in the table."""
    more = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    rope = {"rope_scaling": {**more, "original_max_position_embeddings": 8192}} if "3.2" in name else {}
    kind = {"model_type": "mistral", "sliding_window": None} if "Mistral" in name else {"model_type": "llama"}
    return {
        **dict(zip(KEYS, LLAMAS[name], strict=True)),
        **kind,
        **rope,
        "tie_word_embeddings": "3.2" in name,
    }


def imported(file: Path, out: Path, models: Path) -> Import:
    """Imports a file for as many ranks as its axes need."""
    try:
        named = Configuration.read(file).values.get("model_name_or_path")
    except UsageError:
        named = None
    folder = models / str(named).rpartition("/")[2] if named else None
    for ranks in RANKS:
        try:
            return import_recipe(file, ranks, out, model=folder if folder and folder.is_dir() else None)
        except UsageError as error:
            if "which does not divide" not in str(error) or ranks == RANKS[-1]:
                raise
    raise AssertionError


def reason_of(error: str, file: Path) -> str:
    """A refusal without names of files and models, to be counted."""
    text = error.replace(str(file), "").removeprefix(f"{file.name}: ").lstrip(": ")
    text = re.sub(r"^model_name_or_path: \S+: there is no such folder", "a model of no family here", text)
    text = re.sub(r"^(\w+): \S+: ((?:\w+ ?)+ has no recipe)", r"\2", text)
    return re.sub(r"\d+", "N", text)[:110]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="clone", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="RECIPES")
    arguments = parser.parse_args()
    files = [
        file for file in sorted(arguments.clone.rglob("*")) if file.suffix in SUFFIXES and file.is_file()
    ]
    files = [file for file in files if b"per_device_train_batch_size" in file.read_bytes()]
    counts, reasons = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch, "models")
        for name in LLAMAS:
            (models / name).mkdir(parents=True)
            (models / name / "config.json").write_text(json.dumps(config(name)))
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(files):
            try:
                result = imported(file, folder / f"{number:03d}-{file.stem.lower()}.yaml", models)
            except UsageError as error:
                reasons[f"no recipe: {reason_of(str(error), file)}"] += 1
                continue
            c = result.configuration
            mentioned = {key for each in (*c.lost, *c.unused) for key in each.keys}
            assert mentioned | c.carried >= c.values.keys(), f"{file}: a key is unaccounted for"
            counts["recipes"] += 1
            counts["whole"] += not c.lost
            counts["read"] += not result.obstacle
            reasons.update(f"not honoured: {each.pattern} ({each.reason})" for each in c.lost)
            if result.obstacle:
                reasons[f"not read: {re.sub(r'^.*?: ', '', result.obstacle)[:110]}"] += 1
    print(
        f"{len(files)} files with arguments: {counts['recipes']} become recipes, {counts['whole']} of them with every "
        f"key honoured; check --no-run passes {counts['read']}"
    )
    for reason, count in reasons.most_common():
        print(f"{count:5d}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
