"""Every test in this folder runs with the simulated accelerator, or is skipped with one sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import UNTRIED
from tests.sim.build import built, why_not

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("sim")
            item.add_marker(
                pytest.mark.timeout(900)
            )  # a first one builds the device's library, minutes under load


@pytest.fixture(scope="session")
def library() -> Path:
    """The folder with the device's library, built now if no earlier session has built it."""
    if reason := why_not():
        pytest.skip(reason)
    return built()


@pytest.fixture(autouse=True)
def _on_the_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test starts finds the device. The tests' own process has none: its paddle may be loaded already.

    Forks do not try their recipes on CPUs, for which each would start a process (but `tried`).
    """
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(library))
    monkeypatch.setenv(UNTRIED, "1")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test they try them."""
    monkeypatch.delenv(UNTRIED)
