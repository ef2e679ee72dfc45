"""Inside a process of a comparison: puts a mutant into the live functions, or notes the lines that it runs."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

from paddle_dp.launch.recipe_rank import work
from paddle_dp.proof import trace
from paddle_dp.proof.sides import common_failure
from tests.proof.mutants.sites import ROOT, changed_codes


def run_side(
    mutant: Sequence[Any] | None,
    lines: str | None,
    recipe: str,
    overrides: list[str],
    options: dict[str, Any],
) -> None:
    """Traces a side with the mutant [file, number], if any; writes the lines that it runs into the folder `lines`, if
    any."""
    # A rank that fails alone in float64 need not wait long for the others, which would fail at the same place.
    soon = mock.patch.object(trace, "common_failure", partial(common_failure, wait=2.0))
    if mutant is not None:
        put_in(*mutant)
    executed: dict[str, set[int]] = {}
    with soon, nullcontext() if lines is None else _noting(mutable_files(), executed):
        work("trace", Path(recipe), overrides, options)
    if lines is None:
        return
    sheet = Path(lines, f"{os.environ.get('PADDLE_TRAINER_ID', '0')}.json")
    sheet.write_text(json.dumps({file: sorted(numbers) for file, numbers in executed.items()}))


def put_in(file: str, number: int) -> None:
    """Gives the live functions of a file of the package the code with the change at its site `number`."""
    import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    path = ROOT / file
    changed = changed_codes(path, number)
    gc.unfreeze()  # the waiting process has frozen what it imported, and what is frozen is not listed
    functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    gc.freeze()
    here = [each for each in functions if each.__code__.co_filename == str(path)]
    count = 0
    for plain, other in changed:
        for function in here:
            if function.__code__ == plain:
                function.__code__ = other
                count += 1
    assert count, f"no live function has the code of site {number} of {file}"


MUTABLE = (
    "learner/learner", "learner/runner", "learner/update", "axes/axes_exchange",
    "core/batch_norm", "core/data_group", "core/gradients", "core/optimizer", "core/gathered_samples",
    "model/recompute", "core/parameter_groups", "exchange/*", "axes/sharding/*",
    "axes/tensor/*", "axes/pipeline/*", "axes/sequence/*", "core/dropout/*", "core/precision",
    "data/sampler", "mesh/mesh", "mesh/messages",
)  # fmt: skip


def mutable_files() -> list[str]:
    """The files that compute what ranks train, from the root of the repository."""
    package = ROOT / "paddle_dp"
    files = {file for name in MUTABLE for file in package.glob(f"{name}.py")}
    return sorted(str(file.relative_to(ROOT)) for file in files)


@contextmanager
def _noting(files: Sequence[str], executed: dict[str, set[int]]) -> Iterator[None]:
    """Adds the lines of `files` that this process runs meanwhile, in threads that begin meanwhile, too."""
    executed |= {file: set() for file in files}
    of_path = {str(ROOT / file): numbers for file, numbers in executed.items()}

    def inside(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        of_path[frame.f_code.co_filename].add(frame.f_lineno)
        return inside

    def call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return inside if frame.f_code.co_filename in of_path else None

    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
