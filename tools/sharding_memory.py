"""Measures what each rank holds under each sharding stage, next to ZeRO's formula; prints markdown.

python tools/sharding_memory.py configs/gpt_sharding2.yaml --ranks 2
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.errors import PaddleDPError
from paddle_dp.plan.memory import StateBytes, Widths, formula, state_bytes, states_of
from paddle_dp.proof.sides import Side, SideRunner
from paddle_dp.proof.trace_files import Key
from paddle_dp.recipe import read_recipe
from tools.command_line import parser_of

HEAD = "| stage | parameters | gradients | optimizer states | together | ZeRO's formula | whole parameters |"


def counted(side: Side) -> StateBytes:
    """The bytes of the rank that holds most: gradients at their peak, the rest between updates."""
    most = max(
        side.bytes_by_rank, key=lambda rank: rank["parameters"] + rank["most gradients"] + rank["optimizer"]
    )
    return StateBytes(
        parameters=most["parameters"], gradients=most["most gradients"], optimizer=most["optimizer"]
    )


def sizes_of(side: Side) -> list[int]:
    """The number of elements of each parameter of the whole model."""
    trace = side.trace("own")
    assert trace is not None
    return [trace.array(number).size for number in trace.keys if Key.read(number).kind == "weight"]


def line(stage: int, found: StateBytes, sizes: list[int], ranks: int, widths: Widths) -> str:
    """A line of the table for one stage (0: data parallelism): measured and predicted, in kB."""
    ideal = formula(sum(sizes), ranks, stage, widths)
    dealt = max(state_bytes(sizes, ranks, stage, widths), key=lambda one: one.total)
    name = str(stage) if stage else "none (`data`)"
    numbers = (found.parameters, found.gradients, found.optimizer, found.total, ideal.total, dealt.total)
    return f"| {name} | " + " | ".join(f"{number / 2**10:.0f}" for number in numbers) + " |"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    widths = Widths.for_states(states_of(read_recipe(given.recipe, given.overrides)))
    with tempfile.TemporaryDirectory(prefix="paddle-dp-held-") as scratch:
        overrides = tuple(given.overrides)
        sides = SideRunner(
            given.recipe, overrides, given.steps, given.ranks, Path(scratch), wide=False, measure_memory=True
        )
        print(HEAD, "|---" * 7 + "|", sep="\n", flush=True)
        for stage in range(4):
            words = [
                f"strategy.sharding={given.ranks if stage else 1}",
                f"strategy.sharding_stage={stage or 1}",
            ]
            try:
                side = sides.run_candidate(given.ranks, ["strategy.data=auto", *words], f"stage{stage}")
            except PaddleDPError as error:
                print(f"stage {stage}: {error}", file=sys.stderr)
                return 1
            print(line(stage, counted(side), sizes_of(side), given.ranks, widths), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
