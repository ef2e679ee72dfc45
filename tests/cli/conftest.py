"""The command line in this process: what it would run, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paddle_dp import cli
from paddle_dp.launch.command import Job


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """The jobs that would have been run; each ends with status 7."""
    from paddle_dp.launch import start as supervise

    asked: list[Job] = []
    monkeypatch.setattr(supervise, "run", lambda job: asked.append(job) or 7)
    return asked


@pytest.fixture
def leave() -> Callable[..., int]:
    """`leave("train", "a.yaml")`: the exit status of these words."""

    def of(*words: str) -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        return int(caught.value.code or 0)

    return of
