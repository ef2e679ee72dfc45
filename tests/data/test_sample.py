"""Whose fault it is when a sample cannot be had."""

from argparse import Namespace

import numpy as np
import pytest

from paddle_dp.data.arrays import as_array
from paddle_dp.data.sample import class_names, read_sample, read_samples
from paddle_dp.data.stream import Stream
from paddle_dp.datasets._interleaved import InterleavedSamples
from paddle_dp.errors import DataError


class Named(list):
    def name_of(self, index):
        return f"folder/{index}.jpg"


class Broken(Named):
    def __getitem__(self, index):
        raise OSError("disk on fire")


def test_samples_are_stacked_under_a_new_first_dim():
    data = [(np.full((2, 3), i, np.uint8), i) for i in range(5)]
    inputs, targets = read_samples(data, np.array([4, 1]), seed=0, epoch=0)
    assert inputs.shape == (2, 2, 3) and inputs.dtype == np.uint8 and inputs[:, 0, 0].tolist() == [4, 1]
    assert targets.tolist() == [4, 1] and targets.dtype == np.int64


def test_an_array_of_classes_has_targets_and_a_number_of_them_no_names():
    data = Named()
    assert class_names(data) == ()
    data.classes = ["cat", "dog"]
    assert class_names(data) == ("cat", "dog")
    for of_no_names in (np.array([1, 0, 1]), 2):
        data.classes = of_no_names
        assert class_names(data) == ()


def test_a_python_float_becomes_float32_and_an_array_keeps_its_type():
    assert as_array(0.5).dtype == np.float32
    assert as_array(np.zeros(2)).dtype == np.float64
    assert as_array(3).dtype == np.int64


def test_a_failing_sample_is_named_with_its_file_and_its_cause():
    with pytest.raises(DataError, match=r"sample 1 \(folder/1.jpg\): OSError: disk on fire") as error:
        read_sample(Broken([(0, 0)] * 2), 1)
    assert isinstance(error.value.__cause__, OSError)


def test_a_data_error_keeps_its_words():
    class Unreadable(list):
        def __getitem__(self, index):
            raise DataError("a/b.jpg is no image")

    with pytest.raises(DataError, match=r"^sample 0: a/b.jpg is no image$"):
        read_sample(Unreadable(), 0)


def test_a_name_that_fails_does_not_hide_the_error():
    class Nameless(Broken):
        def name_of(self, index):
            raise KeyError(index)

    with pytest.raises(DataError, match="sample 0: OSError"):
        read_sample(Nameless(), 0)


def test_samples_of_different_shapes_are_named():
    data = Named([(np.zeros((3, 8)), 0), (np.zeros((1, 8)), 0)])
    with pytest.raises(DataError, match=r"1.jpg\) is float64\[1, 8\] but .*0.jpg\) is float64\[3, 8\]"):
        read_samples(data, np.array([0, 1]), seed=0, epoch=0)


class Taking(list):
    """Samples of which many are taken at once, as `answer(indices)` does."""

    def __init__(self, answer):
        super().__init__([0] * 5)
        self.take = answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda indices: (indices * 10, indices[:1]), "2 inputs and 1 targets for 2 indices"),
        (lambda indices: ({"a": indices, "b": indices[:1]}, indices), "-1 inputs and 2 targets for 2 indices"),
        *((lambda indices, dtype=dtype: (np.zeros((len(indices), 2), dtype), np.zeros(len(indices))),
           f"samples 4, 1: the result of take .*type {dtype}") for dtype in ("uint16", "uint32", "object")),
    ],
)  # fmt: skip
def test_take_is_preferred_and_looked_at_as_samples_are(answer, said):
    with pytest.raises(DataError, match=said):
        read_samples(Taking(answer), np.array([4, 1]), seed=0, epoch=0)


class Wrapper:
    """Tens of the samples of other data, and all else that these have."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, target = self.data[index]
        return 10 * inputs, target

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name):
        return getattr(self.data, name)


class Quick(list):
    """Samples with the quicker ways to read them."""

    def take(self, indices):
        return np.stack([self[index][0] for index in indices]), indices

    def iterate_from(self, position):
        return iter(self[position:])


class OfEpochs(Quick):
    def at_epoch(self, seed, epoch):
        return self


@pytest.mark.parametrize("kind", [Quick, OfEpochs])
def test_a_wrapper_that_hands_out_methods_of_its_data_is_read_itself(kind):
    """Under Python 3.10 and 3.11 its data's `take` was called, and under all `at_epoch`: they know of no wrapper."""
    wrapper = Wrapper(kind((np.full(2, i), i) for i in range(5)))
    mixture = InterleavedSamples({"a": wrapper}, (1,))
    read = [read_samples(data, np.array([4, 1]), 0, 0)[0][:, 0].tolist() for data in (wrapper, mixture)]
    stream = Stream(wrapper, 5)
    assert [*read, int(stream[1][0][0])] == [[40, 10], [40, 10], 10]


class Without(Quick):
    """Takes its parent's methods back."""

    take = iterate_from = None


class Sometimes(Quick):
    """Has the methods of data that it does not have."""

    @property
    def take(self):
        raise AttributeError("take")

    @property
    def iterate_from(self):
        raise AttributeError("iterate_from")


@pytest.mark.parametrize("kind", [Without, Sometimes])
def test_a_method_that_a_data_set_does_not_have_is_not_called(kind):
    data = kind((np.full(2, i), i) for i in range(5))
    read, stream = read_samples(data, np.array([4, 1]), 0, 0)[0][:, 0].tolist(), Stream(data, 5)
    assert [*read, int(stream[1][0][0])] == [4, 1, 1]


def test_two_arrays_are_two_inputs_and_a_list_of_numbers_is_one():
    (one, other), target = read_sample([((np.zeros(3), np.zeros(3)), [1, 2])], 0)
    assert one.shape == other.shape == (3,)
    assert target.tolist() == [1, 2]
    assert read_sample([([[1, 2], [3, 4]], 0)], 0)[0].shape == (2, 2)
    assert read_sample([([np.float32(1), np.float32(2)], 0)], 0)[0].shape == (2,)


def test_samples_of_several_inputs_are_stacked_leaf_by_leaf():
    data = [({"ids": np.arange(3) + i, "pair": (np.full(2, i), float(i))}, i) for i in range(4)]
    inputs, targets = read_samples(data, np.array([2, 0]), seed=0, epoch=0)
    assert inputs["ids"].tolist() == [[2, 3, 4], [0, 1, 2]]
    assert [part.shape for part in inputs["pair"]] == [(2, 2), (2,)]
    assert inputs["pair"][1].dtype == np.float32
    assert targets.tolist() == [2, 0]


def test_another_structure_or_shape_is_named_with_both():
    data = Named(
        [({"a": np.zeros(2), "b": np.zeros(3)}, 0), ({"a": np.zeros(2), "b": np.zeros(4)}, 0), ({"a": 0}, 0)]
    )
    with pytest.raises(
        DataError, match=r"1.jpg\) is {a: float64\[2\], b: float64\[4\]} but .*b: float64\[3\]}"
    ):
        read_samples(data, np.array([0, 1]), seed=0, epoch=0)
    with pytest.raises(DataError, match=r"2.jpg\) is {a: int64\[\]} but"):
        read_samples(data, np.array([0, 2]), seed=0, epoch=0)
    with pytest.raises(DataError, match=r"sample 0 is of type <U1 at text, which no tensor can hold"):
        read_sample([({"text": np.array(["a"]), "b": np.zeros(1)}, 0)], 0)


def test_numbers_of_different_types_are_two_targets():
    _, (label, weight) = read_sample([(np.ones(2), [np.int64(1), np.float32(0.5)])], 0)
    assert (label.dtype, weight.dtype) == (np.int64, np.float32)
    assert read_sample([(np.ones(2), [np.int64(1), np.int64(2)])], 0)[1].tolist() == [1, 2]


def test_lists_of_floats_are_float32_and_bytes_are_in_the_machines_order():
    inputs, targets = read_sample([([0.5], np.ones(2, ">f4"))], 0)
    assert inputs.dtype == np.float32
    assert targets.dtype.isnative and targets.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((1, 2, 3), "3 parts"),
        (5, "int"),
        ((np.array(["a"]), 0), "of type <U1"),
        (({1: np.ones(2), "1": np.ones(2)}, 0), "sample 0 is no array: two of the keys 1, '1' are the same word"),
        ((np.ones(2, "uint16"), 0), "uint16, which Paddle takes for the bits of bfloat16: give int32"),
        ((np.ones(2, "uint32"), 0), "of type uint32, which no tensor can hold"),
        (({"a": np.ones(2, "longdouble")}, 0), "at a, which no tensor can hold"),
        ((Namespace(), 0), r"of type object, which no .*: it is a argparse\.Namespace\. Give the arrays that make it"),
        ((np.array([None]), 0), r"of type object, which no tensor can hold$"),
        (({}, 0), "sample 0 has no inputs"),
        ((np.ones(2), {"a": {}}), "sample 0 has no targets"),
    ],
)  # fmt: skip
def test_what_is_no_sample_or_what_paddle_would_take_for_another_is_refused(sample, said):
    with pytest.raises(DataError, match=said):
        read_sample([sample], 0)


def test_a_bfloat16_tensor_is_one():
    import paddle

    inputs, _ = read_sample([(paddle.ones([2]).astype("bfloat16"), 0)], 0)
    assert paddle.to_tensor(inputs).astype("float32").tolist() == [1, 1]


def test_lists_that_take_gives_are_arrays_as_of_samples():
    taking = Taking(lambda indices: ({"x": [[0.5]] * len(indices)}, indices))
    inputs, targets = read_samples(taking, np.array([4, 1]), 0, 0)
    assert inputs["x"].dtype == np.float32 and targets.tolist() == [4, 1]
