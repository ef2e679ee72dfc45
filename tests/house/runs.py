"""Reads back what a run's folder holds: events of metrics.jsonl, and the bits of its newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of one kind if it is named."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["event"])]


def saved_bits(run: Path) -> dict[str, bytes]:
    """Weights, statistics and optimizer's states of the newest checkpoint."""
    from paddle_dp.checkpoint import load, newest

    saved = load(newest(run / "checkpoints"))  # type: ignore[arg-type]
    return {name: saved.read(name).tobytes() for name in saved.names}
