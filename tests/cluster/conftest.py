"""Fixtures of the tests of clusters: a real Slurm, where one can be started, and the weights that two nodes learn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from tests.cluster.slurm_engine import Slurm, started
from tests.faults.slow_run import right_weights

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Skips the test where no Slurm can be started."""
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"no Slurm here: {', '.join(lacking)} is missing")
    if os.geteuid():
        pytest.skip("only root may make the nodes' networks")
    with started(tmp_path_factory.mktemp("slurm")) as engine:
        yield engine


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights of one machine's two ranks."""
    return right_weights(tmp_path_factory.mktemp("right"), 2)
