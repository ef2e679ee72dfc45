"""Arrays of unequal lengths, padded to a given one."""

import numpy as np
import pytest

from paddle_dp.data.prepared import pad, prepared
from paddle_dp.data.sample import Named, class_names, read_sample, read_samples, read_seeded
from paddle_dp.data.stream import as_dataset
from paddle_dp.errors import DataError, RecipeError, UsageError
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.schema import LoaderSettings, Pad
from paddle_dp.recipe.write import recipe_text
from tests.house.recipes import small_recipe


class Texts:
    """Sample i has i + 1 tokens, and as many labels."""

    classes = ("a", "b")

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"ids": np.arange(1, i + 2), "number": np.float32(i)}, np.ones(i + 1, "int64")


PADS = {"ids": Pad(length=5, mask="ids_mask"), "targets": Pad(length=5, value=-100)}


def test_samples_of_unequal_lengths_are_stacked_with_masks_beside_them():
    data = prepared(Texts(), LoaderSettings(pad=PADS))
    inputs, targets = read_samples(data, np.array([0, 3]), 0, 0)
    assert inputs["ids"].tolist() == [[1, 0, 0, 0, 0], [1, 2, 3, 4, 0]]
    assert inputs["ids_mask"].tolist() == [[True] + [False] * 4, [True] * 4 + [False]]
    assert inputs["number"].tolist() == [0.0, 3.0]
    assert targets.tolist() == [[1] + [-100] * 4, [1] * 4 + [-100]]
    assert (len(data), data.classes) == (5, ("a", "b"))


def test_names_are_those_of_the_structure():
    sample = ((np.ones(2), [np.ones((3, 2))]), np.ones(1))
    (one, (other,)), target = pad(sample, {"inputs[1][0]": Pad(length=4, value=7), "[0]": Pad(length=3)})
    assert one.tolist() == [1, 1, 0]
    assert other.tolist() == [[1, 1]] * 3 + [[7, 7]]
    assert target.shape == (1,)
    assert pad(([1, 2], 0), {"inputs": Pad(length=3)})[0].tolist() == [1, 2, 0]


def test_what_is_longer_is_named_with_its_sample():
    class Files(Texts):
        def name_of(self, i):
            return f"{i}.txt"

    data = prepared(Files(), LoaderSettings(pad={"ids": Pad(length=3)}))
    assert isinstance(data, Named)
    with pytest.raises(DataError, match=r"sample 4: ids is 5 long, and loader\.pad\.ids\.length is 3"):
        read_sample(data, 4)
    assert not isinstance(prepared(Texts(), LoaderSettings(pad=PADS)), Named)


@pytest.mark.parametrize(
    ("pads", "said"),
    [
        ({"idz": Pad(length=5)}, r"no array of a sample is called 'idz'\. .*inputs\.ids"),
        ({"inputs": Pad(length=5)}, "no array of a sample is called 'inputs'"),
        ({"ids": Pad(length=5, mask="number")}, "the inputs have a 'number' already"),
    ],
)
def test_names_that_mean_nothing_are_refused(pads, said):
    with pytest.raises(UsageError, match=said):
        pad(Texts()[0], pads)


def test_a_mask_needs_inputs_with_names():
    with pytest.raises(UsageError, match="inputs must be a dict"):
        pad((np.ones(2), 0), {"inputs": Pad(length=3, mask="mask")})


def test_a_number_has_no_length():
    with pytest.raises(DataError, match="number is a single number"):
        pad(Texts()[0], {"number": Pad(length=3)})


def test_streams_are_padded_too():
    def generate():
        yield from (Texts()[i] for i in range(5))

    stream = prepared(as_dataset(generate, None, "train"), LoaderSettings(pad=PADS))
    assert [stream[i][0]["ids"].tolist()[:2] for i in (0, 4, 1)] == [[1, 0], [1, 2], [1, 2]]


def test_a_padded_stream_is_still_told_its_epoch_and_its_position():
    class Told:
        classes = ("a", "b")

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            raise AssertionError("it can begin in the middle")

        def __len__(self):
            return 9

        def iterate_from(self, position):
            return (({"ids": np.full(1, 10 * self.epoch + i)}, np.ones(1)) for i in range(position, 9))

    stream = prepared(as_dataset(Told(), None, "train"), LoaderSettings(pad=PADS))
    assert (len(stream), class_names(stream)) == (9, ("a", "b"))
    assert read_seeded(stream, 0, 3, 7)[0]["ids"].tolist() == [37, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", -100), ("int64", 0.5), ("int32", float("nan")), ("bool", 2)]
)
def test_a_value_that_the_array_cannot_hold_is_refused(dtype, value):
    with pytest.raises(UsageError, match=f"is of type {dtype}, which has no"):
        pad((np.ones(2, dtype), 0), {"inputs": Pad(length=3, value=value)})


def test_without_pads_a_data_set_stays_what_it_is():
    data = Texts()
    assert prepared(data, LoaderSettings()) is data
    assert prepared(None, LoaderSettings(pad=PADS)) is None


def test_the_words_of_a_recipe(tmp_path):
    pad = "{pad: {ids: {length: 5, mask: ids_mask}}}"
    text = small_recipe("length: 1 epoch, batch: 10", loader=pad)
    (tmp_path / "r.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "r.yaml")
    assert recipe.loader.pad == {"ids": Pad(length=5, mask="ids_mask")}
    (tmp_path / "again.yaml").write_text(recipe_text(recipe))
    assert read_recipe(tmp_path / "again.yaml").loader == recipe.loader
    (tmp_path / "r.yaml").write_text(text.replace("length: 5", "lenght: 5"))
    with pytest.raises(RecipeError, match="lenght"):
        read_recipe(tmp_path / "r.yaml")
