"""Several traces in one job of a side: one start of its ranks instead of one for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_dp.launch.command import Job
from paddle_dp.proof import Side
from tests.jobs import run_in_forks

Cases = Mapping[
    str, tuple[Sequence[str], Mapping[str, Any]]
]  # overrides of the recipe, and options of the trace


def run_sides(recipe: Path, folder: Path, ranks: int, cases: Cases) -> dict[str, Side]:
    """The side of each case on so many forks, in `folder`/<name>; one rank is the one process of two."""
    extra = {"cases": cases, "folder": str(folder), "recipe": str(recipe), "claimed": True}
    job = Job(
        entry_point="tests.proof.several:trace_each", recipe=recipe, ranks=ranks, output_dir=folder, quiet=True,
        extra=extra | {"alone": ranks == 1},
    )  # fmt: skip
    assert run_in_forks(job) == 0
    return {name: Side(folder / name, ranks) for name in cases}


def trace_each(recipe: Any, options: Mapping[str, Any]) -> None:
    """In a rank: traces the cases in turn, and takes the patch of each out again. A recipe's task is tried once."""
    from paddle_dp.assembly import sample_trial
    from paddle_dp.proof.trace import trace
    from paddle_dp.recipe import read_recipe
    from tests.proof.faults import CHANGED

    alone, findings, in_fork = options["alone"], dict[tuple[str, ...], Any](), sample_trial.in_fork

    def tried_once(*asked: Any) -> Any:
        if tuple(overrides) not in findings:
            findings[tuple(overrides)] = in_fork(*asked)
        return findings[tuple(overrides)]

    sample_trial.in_fork = tried_once  # type: ignore[assignment]
    for name, (overrides, more) in options["cases"].items():
        words = [
            *overrides,
            f"output_dir={options['folder']}",
            *(["strategy={use: single}"] if alone else []),
        ]
        asked = {"ranks": 2, "alone": alone, "trace": f"{options['folder']}/{name}", **more}
        before = [dict(vars(owner)) for owner in CHANGED]
        trace(read_recipe(Path(options["recipe"]), words), asked)
        for owner, attributes in zip(CHANGED, before, strict=True):
            for attribute in vars(owner).keys() - attributes.keys():
                delattr(owner, attribute)
            for attribute, value in attributes.items():
                if vars(owner)[attribute] is not value:
                    setattr(owner, attribute, value)
