"""Measures a step with branches on two ranks, beside one rank and beside data parallelism on both, in one job.

    python tools/benchmark/branches.py                     # the siamese network, wider, and Inception v3

The three live in the same ranks and take turns, so that whatever else this machine does meets all of them. A row has
the medians of the turns' milliseconds a step, and of their ratios to one rank.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.run_job import ROOT
from tools.benchmark.turns import ratio, seconds_of_job
from tools.tables import table_head, table_row

WIDE = "model.hidden=[1024,1024]"
CASES = {
    "siamese_digits, towers of 2 × 1024, shared": ("siamese_digits", [WIDE], 10),
    "siamese_digits, towers of 2 × 1024, apart": ("siamese_digits", [WIDE, "model.shared=false"], 10),
    "inception_v3, 75 × 75, batch 8": ("inception_branches", [], 1),
}
TURNS = 5
STRATEGIES = {
    "one rank": "{use: single}",
    "branches": "{use: branches, over: 2}",
    "data": "{use: data_parallel}",
}


def main() -> None:
    print(table_head(["model", "one rank, ms", "branches on 2, ms", "ratio", "data on 2, ms", "ratio"]))
    for case, (name, words, steps) in CASES.items():
        trainers = {way: [f"strategy={strategy}", *words] for way, strategy in STRATEGIES.items()}
        seconds = seconds_of_job(ROOT / "configs" / f"{name}.yaml", 2, trainers, steps, TURNS)
        one, *others = seconds.values()
        cells = [case, f"{1e3 * statistics.median(one):.0f}"]
        for times in others:
            cells += [f"{1e3 * statistics.median(times):.0f}", f"{ratio(times, one):.2f}"]
        print(table_row(cells), flush=True)


if __name__ == "__main__":
    main()
