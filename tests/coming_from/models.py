"""Folders with the config.json of small models, and texts, for tests of imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama": {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
    "bert": {"model_type": "bert", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0},
    "vit": {"model_type": "vit"},
}  # fmt: skip
LLAMA = {
    "use": "llama", "vocab": 256, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "length": 64,
    "epsilon": 1e-6, "rope_base": 10000.0, "tied": False,
}  # fmt: skip


def model_folder(folder: Path, family: str, **more: Any) -> Path:
    """A folder with a config.json alone."""
    made = folder / family
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps({**CONFIGS[family], **more}))
    return made


def arguments(folder: Path, **values: Any) -> Configuration:
    """A configuration in a file of JSON."""
    (folder / "args.json").write_text(json.dumps(values))
    return Configuration.read(folder / "args.json")


def reasons(c: Configuration) -> dict[str, str]:
    """The keys that are not honoured, and why."""
    return {key: each.reason for each in c.lost for key in each.keys}


def assert_each_key_once(c: Configuration) -> None:
    others = [key for each in (*c.lost, *c.unused) for key in each.keys]
    assert len(others) == len({*others}) and c.carried.isdisjoint(others)
    assert c.carried | {*others} == c.values.keys()


def texts(folder: Path) -> Path:
    """A text of 60 lines that differ."""
    file = folder / "texts.txt"
    file.write_text("".join(f"line {n} of a text has the number {n * n}\n" for n in range(60)))
    return file
