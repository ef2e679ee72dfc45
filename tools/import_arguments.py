"""Imports all trainings with arguments in a folder, of PaddleNLP, PaddleFormers or Hugging Face's Trainer, and counts
those that become recipes.

python tools/import_arguments.py --from FOLDER                  # recipes are made, and read as by `check --no-run`
python tools/import_arguments.py --from FOLDER --keep RECIPES   # and stay in this folder

FOLDER is a clone of PaddleNLP, LLaMA-Factory or alignment-handbook, which is not kept here. A file counts if it says
per_device_train_batch_size. Models that files name by a hub's names get a config.json with their published sizes, for
the names below: nothing is downloaded. Every key is accounted for, or the tool fails.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.importer import Import, import_recipe
from paddle_dp.errors import UsageError
from tools.command_line import parser_of
from tools.import_counts import count_imports

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
    "Meta-Llama-3.1-8B-Instruct": (128256, 4096, 32, 32, 8, 14336, 131072, 5e5),
    "Qwen2-0.5B": (151936, 896, 24, 14, 2, 4864, 131072, 1e6),
    "Qwen2-7B": (152064, 3584, 28, 28, 4, 18944, 131072, 1e6),
    "Qwen3-0.6B-Base": (151936, 1024, 28, 16, 8, 3072, 32768, 1e6),
    "Mistral-7B-v0.3": (32768, 4096, 32, 32, 8, 14336, 32768, 1e6),
    "Mistral-7B-Instruct-v0.3": (32768, 4096, 32, 32, 8, 14336, 32768, 1e6),
}  # fmt: skip
KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "rope_theta",
)  # fmt: skip


def config(name: str) -> dict[str, Any]:
    """The config.json of a model in the table."""
    factors = {"factor": 32.0 if "3.2" in name else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**factors, "rope_type": "llama3", "original_max_position_embeddings": 8192}
    rope = {"rope_scaling": scaling} if "Llama-3." in name else {}
    kind: dict[str, Any] = {"model_type": "llama"}
    if "Mistral" in name:
        kind = {"model_type": "mistral", "sliding_window": None}
    if "Qwen" in name:
        kind = {"model_type": name[:5].lower(), "use_sliding_window": False}
    if "Qwen3" in name:
        kind["head_dim"] = 128
    tied = any(small in name for small in ("3.2", "-0."))
    return {**dict(zip(KEYS, LLAMAS[name], strict=True)), **kind, **rope, "tie_word_embeddings": tied}


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
    return re.sub(r"\d+", "N", text)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--from", dest="clone", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="RECIPES")
    arguments = parser.parse_args()
    files = [
        file for file in sorted(arguments.clone.rglob("*")) if file.suffix in SUFFIXES and file.is_file()
    ]
    files = [file for file in files if b"per_device_train_batch_size" in file.read_bytes()]
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch)
        for name in LLAMAS:
            (models / name).mkdir()
            (models / name / "config.json").write_text(json.dumps(config(name)))
        importer = partial(imported, models=models)
        count_imports("files with arguments", files, arguments.keep, importer, reason_of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
