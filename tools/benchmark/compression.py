"""Trains a recipe with whole and with compressed gradients: what held-out accuracy it comes to, and what a step sends.

    python tools/benchmark/compression.py                     # ResNet-18 on digits, seeds 0, 1 and 2, on 2 ranks
    python tools/benchmark/compression.py --recipe configs/digits_convnet.yaml --ways none "power_sgd rank 2" --seeds 0

Each number is that of one whole training by `paddle-dp train`, behind its last step. "MB a step" is what a rank sends
in one step, as the training counts it (`sent` in metrics.jsonl): the least of its steps, and the mean of all, which is
more where the first ones send whole gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.command_line import ROOT, environment, paddle_dp, parser_of, tell
from tools.tables import table_head, table_row

WAYS = ("none", "bfloat16", "float16", "power_sgd rank 4", "power_sgd rank 4 after 0 steps")
PATIENCE = 300  # seconds for one training


@dataclass(frozen=True)
class Trained:
    """One training: its held-out accuracy, and the bytes that a rank sent in a step."""

    accuracy: float
    least: float
    mean: float


def main() -> None:
    given = arguments()
    print(HEADER)
    for way in given.ways:
        found = []
        for seed in given.seeds:
            found.append(trained(given.recipe, way, seed, given.ranks, given.words))
            tell(f"{way}, seed {seed}: {found[-1]}")
        print(row(way, found), flush=True)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "configs" / "digits_resnet18.yaml", metavar="FILE"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="COMPRESS")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="N")
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 5), metavar="N")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="further overrides")
    given = parser.parse_intermixed_args()
    if words := [way for way in given.ways if "=" in way]:
        parser.error(
            f"--ways: {' '.join(words)} is an override, not a way to compress: give it before --ways"
        )
    return given


def trained(recipe: Path, way: str, seed: int, ranks: int, words: Sequence[str]) -> Trained:
    """One whole training. Raises RuntimeError with the last words of one that failed."""
    with tempfile.TemporaryDirectory(prefix="compression-") as folder:
        run = Path(folder) / "run"
        callbacks = "callbacks=[{use: metrics, every: 1 step}, {use: evaluate, every: 1 epoch}]"
        overrides = [f"train.seed={seed}", f"strategy.compress={way}", callbacks, *words]
        command = paddle_dp("train", recipe, "--ranks", ranks, "--out", run, *overrides)
        job = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
        if job.returncode:
            raise RuntimeError(f"status {job.returncode}\n" + "\n".join(job.stderr.splitlines()[-15:]))
        return outcome((run / "metrics.jsonl").read_text().splitlines())


def outcome(lines: Sequence[str]) -> Trained:
    """What the lines of metrics.jsonl say."""
    events = [json.loads(line) for line in lines]
    accuracies = [event["acc1"] for event in events if event["event"] == "evaluated"]
    sent = [event["sent"] for event in events if event["event"] == "step" and event.get("sent") is not None]
    return Trained(accuracy=accuracies[-1], least=min(sent), mean=statistics.mean(sent))


HEADER = table_head(["`compress`", "accuracy", "mean", "MB a step", "in the mean"])


def row(way: str, found: Sequence[Trained]) -> str:
    """A way's line of the table; the trainings are those of the seeds."""
    accuracies = ", ".join(f"{one.accuracy:.4f}" for one in found)
    mean, least = statistics.mean(one.accuracy for one in found), min(one.least for one in found)
    sent = statistics.mean(one.mean for one in found)
    return table_row([f"`{way}`", accuracies, f"{mean:.4f}", f"{least / 1e6:.3g}", f"{sent / 1e6:.3g}"])


if __name__ == "__main__":
    main()
