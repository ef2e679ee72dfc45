"""The examination of many cases in one job: each is traced in turn, its fault put in and taken out again."""

from __future__ import annotations

import json
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.proof.zoo.case import Fault
from tests.proof.zoo.cases import CASES
from tests.proof.zoo.patching import rank


def sit(recipe: Any, options: dict[str, Any]) -> None:
    """The entry point of every rank: examines options["cases"] and leaves each answer in options["folder"]/<case>."""
    for name in options["cases"]:
        folder = Path(options["folder"]) / slug(name)
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        answer, goes_on = _answer(name, folder, options)
        answer["seconds"] = time.perf_counter() - begun
        (folder / f"answer.{rank()}.json").write_text(json.dumps(answer))
        if not goes_on:
            raise SystemExit(1)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _answer(name: str, folder: Path, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """What became of the case on this rank, and whether the ranks can go on together."""
    from paddle_dp.errors import PaddleDPError

    case = CASES[name]
    _forget_the_layout()
    try:
        with case.put_in() if isinstance(case, Fault) else nullcontext():
            EXAMS[getattr(case, "exam", "verify")](case, folder, options["ranks"])
    except PaddleDPError as error:  # said on every rank alike
        return {"raised": type(error).__name__, "message": str(error)}, True
    except Exception as error:  # noqa: BLE001 - one rank's own: the others hang in an exchange
        found = {"raised": type(error).__name__, "message": str(error), "alone": True}
        return {**found, "traceback": traceback.format_exc()}, False
    return {}, True


def _recipe(case: Any, folder: Path, ranks: int) -> Any:
    from paddle_dp.recipe import read_recipe

    words = case.setting.overrides
    if ranks == 1:
        words = (*(w for w in words if not w.startswith("strategy")), "strategy.use=single")
    return read_recipe(case.setting.path, (*words, f'output_dir="{folder}"'))


def _compare(case: Any, folder: Path, ranks: int) -> None:
    from paddle_dp.proof.trace import trace

    steps = getattr(case, "steps", 4)
    asked: dict[str, Any] = {"steps": steps, "ranks": case.setting.ranks, "trace": str(folder / "trace")}
    asked["alone"] = ranks == 1
    beside = folder.parents[1] / str(case.setting.ranks) / folder.name / "trace"  # the ranks go first
    if ranks == 1 and (beside / "side.json").exists():
        asked["candidates"] = [[str(beside), case.setting.ranks]]
    trace(_recipe(case, folder, ranks), asked)


def _rehearse(case: Any, folder: Path, ranks: int) -> None:
    from paddle_dp.proof.rehearsal import rehearse

    asked = {"ranks": case.setting.ranks, "trace": str(folder / "trace"), "alone": ranks == 1}
    rehearse(_recipe(case, folder, ranks), asked)


EXAMS = {"verify": _compare, "rehearsal": _rehearse}


def _forget_the_layout() -> None:
    """fleet.init keeps the first layout of a process ("has been initialized") unless it is forgotten."""
    from paddle.distributed.fleet.base import topology

    topology._HYBRID_PARALLEL_GROUP = None
