"""What can be dealt to stages, and a weight that two of them share, saved and loaded."""

import numpy as np
import pytest
from paddle import nn

from paddle_dp.axes.pipeline.stages import build_stages
from paddle_dp.core.placement import Placements
from paddle_dp.errors import UsageError
from tests.parity import train, truth
from tests.ranks import run_ranks


class Outside(nn.Layer):
    """A list of blocks, and a layer beside it."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.LayerList([nn.Linear(2, 2)]))


@pytest.mark.parametrize(
    ("names", "said"), [([], "no ordered `blocks`"), (["blocks", "last"], "'last.0.bias' outside")]
)
def test_a_model_is_its_blocks_or_cannot_be_staged(names, said):
    with pytest.raises(UsageError, match=said):
        build_stages(Outside(*names), None, None, Placements())


@pytest.mark.long
def test_a_tied_checkpoint_goes_on_in_other_layouts(tmp_path):
    """Interleaved stages, in mid-epoch to tensor × pipeline, and to one process."""
    tied = "gpt, tied: true"

    def rows(ranks, strategy, until, resume):
        found = run_ranks(train, ranks, str(tmp_path), strategy, until, resume, model=tied, timeout=200)
        return found[0]["rows"]

    found = rows(2, "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved}", "3 steps", False)
    found += rows(4, "{use: hybrid, pipeline: 2, tensor: 2}", "7 steps", True)
    found += rows(1, "{use: single}", "10 steps", True)
    np.testing.assert_allclose(found, truth(model=tied)["rows"], rtol=1e-5)
