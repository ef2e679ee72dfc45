"""A model with dropout and BatchNorm has one held-out accuracy, on any number of ranks: the shipped recipe says so."""

from pathlib import Path

import numpy as np
import pytest

from tests.house.runs import events
from tests.jobs import train_in_forks

RECIPE = Path("configs/digits_dropout.yaml")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_dropout_and_batch_norm_evaluate_alike_on_one_to_four_ranks(tmp_path):
    found = []
    for ranks in (1, 2, 3, 4):
        train_in_forks(RECIPE, tmp_path / str(ranks), ranks)
        found.append([(row["acc1"], row["loss"]) for row in events(tmp_path / str(ranks), "evaluated")])
    truth = np.array(found[0])
    assert len(truth) == 5
    assert truth[-1, 0] > 0.97
    for ours in found[1:]:
        assert (np.array(ours)[:, 0] == truth[:, 0]).all()
        np.testing.assert_allclose(np.array(ours)[:, 1], truth[:, 1], rtol=1e-5)
