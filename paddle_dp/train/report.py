"""Prints the result of `paddle-dp evaluate`, and writes it to evaluation.json."""

from __future__ import annotations

from pathlib import Path

from paddle_dp.train.evaluation import Evaluation, as_json


def report(found: Evaluation, checkpoint: Path, folder: Path, ranks: int) -> None:
    """Prints the held-out numbers and the table per class, and writes them to <run>/evaluation.json."""
    numbers = "  ".join(f"{name} {value:.6g}" for name, value in found.numbers.items())
    print(f"{checkpoint}: {numbers}", flush=True)
    on = f"{ranks} ranks" if ranks > 1 else "1 process"
    print(f"{found.counted}, on {on}", flush=True)
    rows = found.per_class()
    if rows:
        print(f"{'class':>12}  precision  recall      f1  support")
    for row in rows:
        name, support = row["class"], row["support"]
        print(f"{name:>12}  {row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {support:7d}")
    content = {"checkpoint": checkpoint.name, "samples": found.samples, **found.numbers, "per_class": rows}
    (folder / "evaluation.json").write_text(as_json(content, indent=1))
