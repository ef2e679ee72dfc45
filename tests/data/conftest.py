"""What tests of worker processes share."""

import gc

import psutil
import pytest

from tests.rank_pool import children


@pytest.fixture
def nothing_left_behind():
    """After the test there is no process and no open file more than before it."""
    import paddle  # noqa: F401 - its import opens files that stay open

    gc.collect()  # files of earlier tests, which would be closed at any time within this one
    this = psutil.Process()
    files = this.num_fds()
    yield
    assert children() == []
    assert this.num_fds() == files
