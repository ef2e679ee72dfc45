"""A proof reads the first samples as training does, and says before it computes whether it fits."""

import numpy as np
import pytest

from paddle_dp.data import Sampler
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.proof.samples import first_samples
from paddle_dp.proof.trace import DISK, MEMORY, check_fits
from paddle_dp.recipe import read_recipe
from paddle_dp.train.callback import Progress
from tests.house.recipes import small_recipe

RECIPE = small_recipe(
    "length: 2 epochs, batch: 4", model="mlp, inputs: 2, hidden: [4], classes: 2", strategy="data_parallel",
    dataset="stream_for_a_proof.Numbers", schedule="constant, learning_rate: 0.1",
)  # fmt: skip


class Numbers:
    def __init__(self, split: str):
        self.split = split

    def __iter__(self):
        for i in range(21):
            yield np.full(2, i, "float32"), i % 2


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("stream_for_a_proof")
    module.Numbers = Numbers
    monkeypatch.setitem(sys.modules, "stream_for_a_proof", module)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return read_recipe(tmp_path / "r.yaml")


def test_the_first_batches_are_the_streams(recipe):
    chosen = first_samples(recipe, steps=3, ranks=2, mesh=Mesh.alone())
    inputs = [float(chosen[i][0][0]) for i in range(len(chosen))]
    assert inputs == list(map(float, range(len(chosen))))
    assert 2 * 4 < len(chosen) < 3 * 4  # the last batch has unequal shares
    later = first_samples(recipe, steps=8, ranks=2, mesh=Mesh.alone(), after=Progress(batch=3, step=3))
    assert [float(later[i][0][0]) for i in range(len(later))] == list(range(12, 19))  # its end ends the proof
    with pytest.raises(UsageError, match="nothing is left to compare"):
        first_samples(recipe, steps=8, ranks=2, mesh=Mesh.alone(), after=Progress(batch=5, step=5))


def test_later_batches_are_those_of_the_training(tmp_path):
    """Full batches of as many epochs as that takes, from the one on that follows a checkpoint."""
    (tmp_path / "digits.yaml").write_text(
        RECIPE.replace("stream_for_a_proof.Numbers", "digits").replace("batch: 4", "batch: 500")
    )
    digits = read_recipe(tmp_path / "digits.yaml")
    sampler = Sampler(1437, 500, seed=digits.train.seed)
    chosen = first_samples(digits, steps=5, ranks=2, mesh=Mesh.alone())
    batches = [sampler.global_batch(epoch, k) for epoch, k in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    np.testing.assert_array_equal(chosen.indices, np.concatenate(batches)[:-1])
    later = first_samples(
        digits, steps=2, ranks=2, mesh=Mesh.alone(), after=Progress(epoch=1, batch=1, step=4)
    )
    np.testing.assert_array_equal(later.indices, np.concatenate(batches[3:])[:-1])


MANY = 10**8
ROOM = 10**13


def test_what_fits_is_let_through():
    check_fits(MANY, [MANY, MANY], 2 * MEMORY * MANY, DISK * MANY, "/tmp")
    check_fits(MANY, [MANY, MANY], None, DISK * MANY, "/tmp")


def test_two_whole_copies_in_too_little_memory_are_refused_with_the_figure():
    with pytest.raises(
        UsageError, match=r"100\.0 million parameters, 2 ranks take 7\.5 GB.*takes 3\.7 GB.* 7\.0 GB are free"
    ):
        check_fits(MANY, [MANY, MANY], 7 * 2**30, ROOM, "/tmp")


def test_halves_on_ranks_fit_but_the_one_process_must_too():
    check_fits(MANY, [MANY // 2, MANY // 2], MEMORY * MANY, ROOM, "/tmp")
    with pytest.raises(UsageError, match="one process"):
        check_fits(MANY, [MANY // 2, MANY // 2], MEMORY * MANY - 1, ROOM, "/tmp")


def test_a_small_disk_is_named():
    with pytest.raises(UsageError, match="/small, some 210 bytes"):
        check_fits(MANY, [MANY, MANY], ROOM, DISK * MANY - 1, "/small")


def test_without_float64_half_is_enough():
    check_fits(MANY, [MANY], MEMORY * MANY // 2, DISK * MANY // 2, "/tmp", wide=False)
