"""Paddle is imported without a look for garbage, and Python looks for it again afterwards."""

from __future__ import annotations

import contextlib
import gc

import pytest

from paddle_dp.launch.silence import nothing_collected


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_within_it_and_what_was_made_there_never(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(ImportError), nothing_collected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is collects
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
