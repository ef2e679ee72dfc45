"""Runs of a function in a separate process: of a user's code, whose effects must not stay in a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

Result = dict[str, Any]
"""JSON values; under "arrays", a list of NumPy arrays."""
ProcessRunner = Callable[[Callable[[], Result]], Result]
"""Runs a function in a separate process, which starts with this one's state, and returns its result
(`assembly.sample_trial.ForkRunner`)."""


SECONDS = 5.0  # after which a process answers with the results it has: a later one may take too long


def in_this_process(function: Callable[[], Result]) -> Result:
    """Runs the function in this process: a `ProcessRunner` for functions without lasting effects."""
    return function()


def results_of(
    run: ProcessRunner, functions: Sequence[Callable[[], Result]], state: Callable[[], Any]
) -> Iterator[Result]:
    """Yields the result of each function, run from this process's state: functions share a process as long as `state()`
    compares equal after each to that before the first. Raises a function's error in its turn."""
    while functions:
        try:
            answer = run(partial(_until_changed, functions, state))
        except Exception as error:  # or the end of the process, in any of them
            if len(functions) == 1:
                raise
            try:
                answer = run(partial(_until_changed, functions[:1], state))
            except Exception:  # noqa: BLE001 - perhaps only that the time is over by now
                raise error from None
        arrays = iter(answer["arrays"])
        for result, count in answer["results"]:
            yield result if count is None else {**result, "arrays": list(islice(arrays, count))}
        functions = functions[len(answer["results"]) :]


def _until_changed(functions: Sequence[Callable[[], Result]], state: Callable[[], Any]) -> Result:
    """Returns results, each with its number of arrays, up to a function that changes the state or before a failure."""
    before, results, arrays, begun = state(), list[Any](), list[Any](), time.monotonic()
    for function in functions:
        try:
            result = function()
        except Exception:
            if not results:
                raise
            break  # it fails again, alone
        arrays += result.get("arrays", ())
        count = len(result["arrays"]) if "arrays" in result else None
        results.append([{name: value for name, value in result.items() if name != "arrays"}, count])
        if time.monotonic() - begun > SECONDS or state() != before:
            break
    return {"results": results, "arrays": arrays}
