"""Runs a job of any entry point for a benchmark, in a process of its own, as `paddle-dp train` runs its own jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_job(  # noqa: PLR0913 - a job's words
    entry_point: str,
    recipe: Path,
    ranks: int,
    folder: str,
    *,
    overrides: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> None:
    """On so many `ranks`, with the run in FOLDER/run, and `extra` for the entry point; `timeout` in seconds. Raises
    RuntimeError with the last words of one that fails."""
    words = {
        "entry_point": entry_point, "recipe": str(recipe), "ranks": ranks, "quiet": True, "output_dir": f"{folder}/run",
        "overrides": list(overrides), "extra": dict(extra or {}),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(words)], cwd=ROOT, env={**os.environ, **(variables or {})},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{entry_point} on {ranks} ranks: status {done.returncode}\n{said}")


def main(words: dict[str, Any]) -> int:
    """In that process."""
    sys.path.insert(0, str(ROOT))
    from paddle_dp.launch.command import Job
    from paddle_dp.launch.start import run

    return run(Job(**{**words, "recipe": Path(words["recipe"]), "overrides": tuple(words["overrides"])}))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
