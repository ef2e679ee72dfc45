"""Measures the margins of the proof's limit, r ≤ 8, for correct layouts and for small faults; prints markdown tables.

python tools/proof_margins.py                       # several recipes, precisions and optimizers: minutes
python tools/proof_margins.py --only llama_tiny     # rows whose names begin with this
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.errors import EndedError
from paddle_dp.proof import SideRunner, Verdict, compare_sides
from paddle_dp.proof.compare import TraceComparison
from paddle_dp.proof.report import number
from tools.command_line import parser_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DATA = ((2, "data"), (3, "data"))
HYBRID = (
    *DATA, (2, "tensor=2"), (2, "pipeline=2"), (2, "sharding=2"), (4, "tensor=2 pipeline=2"),
    (4, "sharding=4 sharding_stage=3"),
)  # fmt: skip
KINDS = ("gradient", "update", "state")
FAULTS = {
    "any_gradient": "0.1 % in a gradient, one rank",
    "faster": "1 % in a rate",
    "no_decay": "no decay",
    "stale_moment": "stale moment",
}
DECAY = "optimizer.weight_decay=0.05"


@dataclass(frozen=True)
class Case:
    """A recipe of configs/ with overrides, and its correct layouts; faults are put into runs on two ranks."""

    recipe: str
    overrides: tuple[str, ...] = ()
    layouts: tuple[tuple[int, str], ...] = DATA

    @property
    def faults(self) -> list[str]:
        """The faults that are possible: plain gradient descent has no moments."""
        return [fault for fault in FAULTS if fault != "stale_moment" or "sgd" not in self.name]

    @property
    def name(self) -> str:
        """The recipe and its overrides, in short."""
        short = [word.removeprefix("train.precision=").removeprefix("optimizer=") for word in self.overrides]
        return ", ".join(
            [f"`{self.recipe}`", *(f"`{word}`" for word in short if not word.startswith("optimizer."))]
        )


# A stale moment shows at the second update, and in the recipe's own precision only the first is recorded.
SEEN = [
    (fault, run) for fault in FAULTS for run in ("wide", "own") if (fault, run) != ("stale_moment", "own")
]
RUNS = {"wide": "float64", "own": "own"}

CASES = (
    Case("gpt_tiny", (), HYBRID),
    Case("llama_tiny", (), HYBRID),
    Case("gpt_tiny", ("optimizer={use: sgd, clip: 0.5}", DECAY)),
    Case("gpt_tiny", ("optimizer={use: momentum, clip: 0.5}", DECAY)),
    Case("gpt_tiny", ("optimizer={use: lamb, clip: 0.5}", DECAY)),
    Case("gpt_tiny", ("train.precision=bfloat16",)),
    Case("gpt_tiny", ("train.precision=float16",)),
    Case("llama_tiny", ("train.precision=bfloat16",)),
    Case("llama_tiny", ("train.precision=float16",)),
    Case("digits_mlp"),
    Case("digits_convnet", (DECAY,)),
    Case("digits_convnet", ("train.precision=bfloat16", DECAY)),
    Case("digits_convnet", ("train.precision=float16", DECAY)),
    Case("vit_digits"),
    Case("vit_digits", ("train.precision=bfloat16",)),
)


def worst(parts: Sequence[TraceComparison | None], kind: str) -> float | None:
    """The largest r of a kind; None if nothing of it was compared."""
    found = [row.worst.r for part in parts if part is not None for row in part.summaries if row.kind == kind]
    return max(found, default=None)


def words(layout: str) -> list[str]:
    """Overrides of the strategy: "tensor=2 pipeline=2"."""
    if layout == "data":
        return ["strategy={use: data_parallel}"]
    return ["strategy={use: hybrid, data: auto}", *(f"strategy.{word}" for word in layout.split())]


def measured(case: Case, steps: int) -> tuple[list[Verdict], dict[str, Verdict]]:
    """The verdicts of correct layouts, and of two ranks with each fault. One process runs last."""
    recipe = CONFIGS / f"{case.recipe}.yaml"
    with tempfile.TemporaryDirectory(prefix="paddle-dp-margins-") as scratch:
        most = max(ranks for ranks, _ in case.layouts)
        runner = SideRunner(recipe, case.overrides, steps, most, Path(scratch))
        honest = [
            runner.run_candidate(ranks, words(layout), f"{place}")
            for place, (ranks, layout) in enumerate(case.layouts)
        ]
        faulty = {
            fault: runner.run_candidate(2, words("data"), fault, f"tests.proof.faults:{fault}")
            for fault in case.faults
        }
        one = runner.run_reference([*honest, *faulty.values()])
        found = [compare_sides(one, side) for side in honest]
        return found, {fault: compare_sides(one, side) for fault, side in faulty.items()}


def rows(case: Case, honest: Sequence[Verdict], faulty: dict[str, Verdict]) -> tuple[str, str, bool]:
    """The case's lines of both tables, and whether every correct layout is the same and every fault is not."""
    cells = [
        _cell([worst([getattr(verdict, run)], kind) for verdict in honest])
        for run in ("wide", "own")
        for kind in KINDS
        if (run, kind) != ("own", "state")
    ]
    same = sum(verdict.same for verdict in honest)
    shows = max(verdict.native.visible(verdict.candidate.ranks) for verdict in honest)
    first = f"| {case.name} | {same} of {len(honest)} | {' | '.join(cells)} | {100 * shows:.1g} % |"
    cells = []
    for fault, run in SEEN:
        kind = "gradient" if fault == "any_gradient" else "update"
        cells.append(_cell([worst([getattr(faulty[fault], run)], kind)] if fault in faulty else []))
    caught = sum(verdict.status == 1 for verdict in faulty.values())
    second = f"| {case.name} | {' | '.join(cells)} | {caught} of {len(faulty)} |"
    return first, second, same == len(honest) and caught == len(faulty)


def _cell(found: Sequence[float | None]) -> str:
    known = [r for r in found if r is not None]
    return number(max(known)) if known else ""


def main() -> int:
    """Returns 0 if every correct layout is the same, and every fault is caught."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="recipes whose names begin with one of these"
    )
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    judged = ["gradient, float64", "update, float64", "state, float64", "gradient, own", "update, own"]
    first = [f"| recipe | same | {' | '.join(judged)} | shows, own |", "|---" * (3 + len(judged)) + "|"]
    told = [f"{FAULTS[fault]}, {RUNS[run]}" for fault, run in SEEN]
    second = [f"| recipe | {' | '.join(told)} | caught |", "|---" * (2 + len(told)) + "|"]
    good = True
    for case in CASES:
        if case.recipe.startswith(tuple(given.only)):
            honest, faulty, right = rows(case, *measured(case, given.steps))
            print(honest, faulty, sep="\n", file=sys.stderr, flush=True)
            first, second, good = [*first, honest], [*second, faulty], good and right
    print(*first, "", *second, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EndedError as error:
        sys.exit(error.exit_status)
