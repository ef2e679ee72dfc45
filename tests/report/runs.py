"""Folders of runs as trainings leave them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECIPE = "name: digits\nmodel: {use: mlp, width: 64}\ndataset: {use: digits}\ntrain: {batch: 64}\n"


def line(event: str, step: int, **fields: Any) -> dict[str, Any]:
    common = {
        "epoch": step // 10, "step": step, "samples": 64 * step, "time": 1000.0 + step,
        "seconds": float(step),
    }  # fmt: skip
    return {"event": event, **common, **fields}


def start(step: int = 0, **fields: Any) -> dict[str, Any]:
    return line("start", step, **{"name": "digits", "ranks": 2, "device": "cpu", "total_steps": 40, **fields})


def steps(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [line("step", s, loss=1 / s, lr=0.1, sent=1000.0, **fields) for s in range(first, last + 1)]


def write(folder: Path, *events: dict[str, Any], recipe: str = RECIPE, **files: Any) -> Path:
    """Writes metrics.jsonl and recipe.yaml; `files`: certificate={…}, evaluation={…}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def attempt(**fields: Any) -> dict[str, Any]:
    facts = {
        "begun": "1970-01-01T00:16:40Z", "why": "done", "ranks": 2, "device": "cpu", "host": "vm", "from": 0,
        "to": 40, "layout": {"data": 2, "pipeline": 1, "sharding": 1, "sequence": 1, "tensor": 1}, "saved": [],
        "versions": {"paddle": "3.3.1"}, "verdict": None, "proof": None, "changes": [], "differences": [],
    }  # fmt: skip
    return {**facts, **fields}


def certificate(*attempts: dict[str, Any]) -> dict[str, Any]:
    data = {"train": {"samples": 1437, "digest": "a" * 32}, "test": {"samples": 360, "digest": "b" * 32}}
    return {"format": 1, "name": "digits", "steps": 40, "data": data, "attempts": list(attempts)}


def evaluation(matrix: list[list[int]]) -> dict[str, Any]:
    rows = [
        {"class": f"class {i}", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": sum(row)}
        for i, row in enumerate(matrix)
    ]
    return {"step": 40, "samples": sum(map(sum, matrix)), "per_class": rows, "confusion": matrix}
