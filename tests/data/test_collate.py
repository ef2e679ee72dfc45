"""A data set's own collate_fn: the same rows on any number of ranks, workers and micro-batches."""

import random

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.data.collate import NEIGHBOUR_DEPENDENCE
from paddle_dp.data.fingerprint import COLLATING, fingerprint
from paddle_dp.data.prepared import prepared
from paddle_dp.data.sample import read_sample, read_samples
from paddle_dp.data.stream import as_dataset
from paddle_dp.errors import DataError, UsageError
from paddle_dp.recipe.schema import LoaderSettings, Pad


class Texts:
    """Sample i has i % 5 + 1 tokens; a sample is what no reader takes for one."""

    classes = ("a", "b")

    def __init__(self, collate_fn):
        self.collate_fn = collate_fn

    def __len__(self):
        return 13

    def __getitem__(self, i):
        return {"text": [i] * (i % 5 + 1), "label": i}


def to_longest(samples):
    longest = max(len(one["text"]) for one in samples)
    ids = np.zeros((len(samples), longest), "int64")
    for row, one in zip(ids, samples, strict=True):
        row[: len(one["text"])] = one["text"]
    return {"ids": ids, "mask": ids > 0}, np.array([one["label"] for one in samples])


def to_five(samples):
    found = to_longest([*samples, {"text": [0] * 5, "label": 0}])
    return {name: array[:-1] for name, array in found[0].items()}, found[1][:-1]


def masked(samples):
    """Draws for each number, as a masked language model does."""
    inputs, labels = to_five(samples)
    drawn = np.random.random(inputs["ids"].shape) < 0.5
    return {"ids": np.where(drawn, -1, inputs["ids"])}, labels


def mixed(samples):
    """Mixes each sample with another one of its batch."""
    inputs, labels = to_five(samples)
    other = np.random.permutation(len(samples))
    return inputs["ids"] + 0.5 * inputs["ids"][other], np.stack([labels, labels[other]], 1)


def settings(collate="samples", **more):
    return LoaderSettings(collate=collate, **more)


def rows(data, ranks, micro_batches=1, workers=0, start=0):
    """{position in the epoch: (inputs, targets) as lists} of epoch 1 on all ranks."""
    found = {}
    whole = data[0].is_global_batch
    for rank in range(ranks):
        sampler = Sampler(13, 4, rank, ranks, seed=3, micro_batches=micro_batches)
        with Loader(data, sampler, num_workers=workers, global_batches=whole) as loader:
            for batch in loader.read(1, start):
                for part in batch.micro_batches:
                    inputs = part.inputs if isinstance(part.inputs, dict) else {"x": part.inputs}
                    for n in range(part.samples):
                        values = {name: array[n].tolist() for name, array in inputs.items()}
                        place = 4 * batch.index + part.first + n
                        found[place] = values, part.targets[n].tolist()
    return found


@pytest.mark.parametrize(
    ("collate_fn", "over"),
    [(to_five, "samples"), (masked, "samples"), (to_longest, "batch"), (masked, "batch"), (mixed, "batch")],
)
def test_the_rows_are_the_same_on_any_number_of_ranks(collate_fn, over):
    data = prepared(Texts(collate_fn), settings(over))
    one = rows(data, 1)
    assert len(one) == 13
    assert rows(data, 2) == rows(data, 3, micro_batches=2) == one
    assert rows(data, 3, start=2) == {place: found for place, found in one.items() if place >= 8}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("collate_fn", "over"), [(masked, "samples"), (to_longest, "batch"), (mixed, "batch")]
)
def test_the_rows_are_the_same_in_workers(collate_fn, over, nothing_left_behind):
    data = prepared(Texts(collate_fn), settings(over))
    assert rows(data, 2, micro_batches=2, workers=2) == rows(data, 1)


def test_a_batch_is_as_long_as_its_longest_sample_on_every_rank():
    data = prepared(Texts(to_longest), settings("batch"))
    loaders = [Loader(data, Sampler(13, 4, r, 3, shuffle=False), global_batches=True) for r in range(3)]
    widths = [[b.micro_batches[0].inputs["ids"].shape[1] for b in loader.read(0)] for loader in loaders]
    assert widths == [[4, 5, 5, 3]] * 3


def test_a_stream_is_collated_too():
    def generate():
        yield from (Texts(None)[i] for i in range(13))

    data = Texts(to_longest)
    stream = prepared(as_dataset(generate, None, "train"), settings("batch"), to_longest)
    for ranks in (1, 2):
        found = []
        for rank in range(ranks):
            loader = Loader(stream, Sampler(13, 4, rank, ranks, shuffle=False), global_batches=True)
            found += [
                row
                for b in loader.read(0)
                for row in b.micro_batches[0].targets.tolist()[: b.micro_batches[0].samples]
            ]
        assert sorted(found) == list(range(13))
    assert (
        read_sample(stream, 7)[0]["ids"].tolist()
        == read_sample(prepared(data, settings()), 7)[0]["ids"].tolist()
    )


@pytest.mark.parametrize("collate_fn", [to_longest, mixed])
def test_what_depends_on_the_samples_beside_it_is_told(collate_fn):
    told = fingerprint(prepared(Texts(collate_fn), settings()), 0)[COLLATING]
    assert told.startswith(NEIGHBOUR_DEPENDENCE) and "loader.collate to batch" in told
    assert not fingerprint(prepared(Texts(collate_fn), settings("batch")), 0)[COLLATING].startswith(
        NEIGHBOUR_DEPENDENCE
    )


@pytest.mark.parametrize("collate_fn", [to_five, masked])
def test_what_does_not_is_taken(collate_fn):
    assert fingerprint(prepared(Texts(collate_fn), settings()), 0)[COLLATING] == "of single samples"


def test_a_fingerprint_knows_what_a_batch_is_made_of():
    def other(samples):
        inputs, labels = to_longest(samples)
        return {**inputs, "ids": inputs["ids"] + (len(samples) > 1)}, labels

    one, two = (fingerprint(prepared(Texts(f), settings("batch")), 0) for f in (to_longest, other))
    assert {key for key in one if one[key] != two[key]} == {COLLATING}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ((np.zeros((5, 2)), np.zeros(5)), r"made .float64\[5, 2\].*of 3\. Every array needs one row"),
        ((np.zeros(3), np.float32(0)), "Every array needs one row"),
        ({"ids": np.zeros(3)}, r"the result of collate_fn is dict: return \(input, target\)"),
        (([np.zeros(2)] * 3, np.zeros(3)), "Every array needs one row"),
    ],
)
def test_what_cannot_be_cut_into_shares_is_refused(returned, said):
    data = prepared(Texts(lambda samples: returned), settings("batch"))
    with pytest.raises(DataError, match=f"samples 4, 5, 6 cannot be collated: .*{said}"):
        read_samples(data, np.array([4, 5, 6]), 0, 0)


def test_a_collate_fn_that_fails_is_named_with_its_samples():
    data = prepared(Texts(lambda samples: samples[0]["nothing"]), settings())
    with pytest.raises(DataError, match="sample 4 cannot be collated: KeyError: 'nothing'"):
        read_sample(data, 4)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match=r"loader\.collate: batch needs a collate_fn"):
        prepared([(0, 0)], settings("batch"))
    with pytest.raises(UsageError, match=r"loader\.pad pads the samples"):
        prepared(Texts(to_five), settings(pad={"ids": Pad(length=3)}))


def test_the_data_set_keeps_its_classes_and_random_numbers_stay_as_they_were():
    data = prepared(Texts(masked), settings())
    assert data.classes == ("a", "b")
    before = random.getstate(), np.random.get_state()[1].tolist()
    rows(data, 2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class Lengths(Texts):
    """Each sample is there twice, one behind the other, and the two longest ones are equal."""

    def __getitem__(self, i):
        return {"text": [7] * (1 + i // 2 % 4 // 2), "label": 0}


def counted(samples):
    return np.zeros((len(samples), 2)), np.array([len({len(one["text"]) for one in samples})] * len(samples))


@pytest.mark.parametrize("collate_fn", [to_longest, counted])
def test_equal_neighbours_hide_no_dependence(collate_fn):
    told = fingerprint(prepared(Lengths(collate_fn), settings()), 0)[COLLATING]
    assert told.startswith(NEIGHBOUR_DEPENDENCE)
