"""Packed documents: every token is predicted once and from its own document, in windows of (seed, epoch) alone."""

import json

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.data.prepared import each
from paddle_dp.datasets._packing import IGNORED, BestFit, Consecutive, Documents, Packed
from paddle_dp.datasets.packed_texts import Config
from paddle_dp.errors import DataError

LENGTH = 32


def documents(lengths, learned=None):
    """Documents of these lengths, whose tokens are 1000 × the document's number + 1, 2, 3 …"""
    tokens = np.concatenate([np.arange(1, n + 1) + 1000 * number for number, n in enumerate(lengths)])
    return Documents.until(np.cumsum(lengths), tokens, learned)


def packed(kind, lengths, fixed=False, learned=None):
    all_documents = documents(lengths, learned)
    return Packed(all_documents, kind(all_documents.inputs, LENGTH), LENGTH, None, fixed)


def windows(data, seed=0, epoch=0):
    """Tokens, positions and targets of an epoch, [windows, LENGTH] each."""
    of_epoch = data.at_epoch(seed, epoch)
    pairs = [of_epoch[index] for index in range(len(data))]
    return tuple(
        np.stack(arrays) for arrays in zip(*((x["tokens"], x["positions"], y) for x, y in pairs), strict=True)
    )


SHORT_AND_LONG = [*np.random.default_rng(0).integers(1, 20, 60).tolist(), 100, 33, 1, 2]


def test_consecutive_windows_are_full_and_predict_each_token_once_from_its_document():
    tokens, positions, targets = windows(packed(Consecutive, SHORT_AND_LONG))
    assert (targets == tokens + 1).all()  # of one document: the next has other thousands
    inputs = sum(n - 1 for n in SHORT_AND_LONG)
    assert targets.size == len(np.unique(targets)) == inputs - inputs % LENGTH
    begins = (tokens % 1000 == 1) | (
        np.arange(LENGTH) == 0
    )  # of a document, or of its rest in the next window
    assert ((positions == 0) == begins).all()
    assert (np.diff(positions, axis=1)[~begins[:, 1:]] == 1).all()


def test_a_long_document_goes_on_in_the_next_window_with_positions_from_0():
    tokens, positions, targets = windows(packed(Consecutive, [2 * LENGTH + 1]))
    assert tokens.tolist() == [list(range(1, LENGTH + 1)), list(range(LENGTH + 1, 2 * LENGTH + 1))]
    assert (positions == np.arange(LENGTH)).all() and targets[0, -1] == tokens[1, 0]


def test_whole_documents_are_each_in_one_window():
    lengths = [n for n in SHORT_AND_LONG if 2 <= n <= LENGTH + 1]
    data = packed(BestFit, lengths)
    assert len(data) <= 1.15 * sum(n - 1 for n in lengths) / LENGTH + 1
    for epoch in range(3):
        tokens, positions, targets = windows(data, epoch=epoch)
        counts = targets != IGNORED
        assert (targets[counts] == tokens[counts] + 1).all() and counts.sum() == sum(n - 1 for n in lengths)
        assert (positions[counts] == tokens[counts] % 1000 - 1).all()  # no document is cut
        assert (tokens[~counts] == 0).all() and (positions[~counts] == 0).all()
        assert len({number for row in tokens for number in set(row[row > 0] // 1000)}) == len(lengths)


@pytest.mark.parametrize("length", [100, 128, 1000, 2048])
def test_a_window_of_any_length_has_room_for_its_documents(length):
    inputs = np.random.default_rng(1).integers(0, length + 1, 500)
    inputs[:3] = length, length - 1, 1
    arrange = BestFit(inputs, length)
    order, counts = arrange(np.random.default_rng(2).random(500))
    assert (
        sorted(order[order >= 0]) == list(range(500))
        and (counts[order >= 0] == inputs[order[order >= 0]]).all()
    )
    assert counts.min() >= 0 and counts.sum() == arrange.windows * length
    assert set(np.cumsum(counts)) >= {length * n for n in range(1, arrange.windows + 1)}


@pytest.mark.parametrize("kind", [Consecutive, BestFit])
def test_windows_are_of_the_seed_and_the_epoch(kind):
    lengths = [7] * 40
    first = windows(packed(kind, lengths))[0]
    assert (windows(packed(kind, lengths))[0] == first).all()
    for other in ({"epoch": 1}, {"seed": 1}, {"seed": -1}):
        tokens = windows(packed(kind, lengths), **other)[0]
        assert tokens.shape == first.shape and (tokens != first).any()
    fixed = packed(kind, lengths, fixed=True)
    assert (windows(fixed, 3, 4)[0] == windows(fixed)[0]).all()
    assert (fixed[1][0]["tokens"] == windows(fixed)[0][1]).all()


def test_only_learned_tokens_count():
    learned = np.arange(sum([9] * 8)) % 9 >= 4
    tokens, _, targets = windows(packed(BestFit, [9] * 8, learned=learned))
    assert ((targets != IGNORED) == ((tokens > 0) & (tokens % 1000 >= 4))).all()


@pytest.fixture
def texts(tmp_path):
    """60 documents of 1 to 90 letters in a .jsonl file, and a Config that reads them."""
    random = np.random.default_rng(0)
    lines = ["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(1, 90, 60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["", *lines]))
    return lambda **more: Config(
        **{"path": str(tmp_path / "texts.jsonl"), "cache": str(tmp_path / "cache"), "length": LENGTH} | more
    )


def test_texts_end_with_the_token_that_ends_a_text(texts):
    data = texts(held_out=0.5).build("train")
    tokens, _, targets = windows(data)
    assert (targets == 0).sum() >= 25 and not (tokens == 0).any()
    assert data.tokenizer.vocab == 256
    held_out = texts(held_out=0.5).build("test")
    assert not set(map(bytes, windows(held_out)[0].astype(np.uint8))) & set(
        map(bytes, tokens.astype(np.uint8))
    )
    with pytest.raises(DataError, match=r"the test split has .* a sample needs 5001"):
        texts(length=5000).build("test")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_batches_are_the_same_on_any_ranks_and_workers_and_from_the_middle(texts, workers):
    data = texts().build("train")
    sampler = Sampler(len(data), 6, seed=5)

    def batches(dp_rank, dp_size, start=0):
        """The tokens and targets that a rank reads of each batch of epoch 1."""
        of_rank = Sampler(len(data), 6, dp_rank, dp_size, seed=5)
        with Loader(texts().build("train"), of_rank, num_workers=workers) as loader:
            rows = []
            for batch in loader.read(1, start):
                (micro_batch,) = batch.micro_batches
                arrays = [micro_batch.inputs["tokens"], micro_batch.inputs["positions"], micro_batch.targets]
                rows.append(np.stack([array.numpy() for array in arrays], 1)[: micro_batch.samples])
            return rows

    whole = batches(0, 1)
    expected = np.stack(windows(data, 5, 1), 1)[sampler.order(1)]
    np.testing.assert_array_equal(np.concatenate(whole), expected)
    for ranks in (2,) if workers else (2, 3):
        parts = [batches(rank, ranks) for rank in range(ranks)]
        for k, batch in enumerate(whole):
            np.testing.assert_array_equal(np.concatenate([part[k] for part in parts]), batch)
    np.testing.assert_array_equal(np.concatenate(batches(0, 1, 2)), np.concatenate(whole[2:]))


def test_a_transformed_data_set_has_its_epochs_too():
    data = packed(Consecutive, [7] * 40)
    transformed = each(data, lambda sample: (sample[0]["tokens"] + 1, sample[1]))
    assert (transformed.at_epoch(0, 3)[2][0] == data.at_epoch(0, 3)[2][0]["tokens"] + 1).all()
    assert (transformed[2][0] == data[2][0]["tokens"] + 1).all()


class Numbers:
    """A data set in memory without epochs."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.float32(index), np.float32(index)


def test_a_transformed_data_set_without_epochs_has_none():
    transformed = each(Numbers(), lambda sample: sample)
    assert transformed.at_epoch(0, 3) is transformed


def test_padding_sees_itself_alone():
    tokens, positions, targets = windows(packed(BestFit, [9]))
    assert positions.tolist() == [[*range(8), *[0] * 24]] and tokens[0, 8:].tolist() == [0] * 24
    assert (targets[0, 8:] == IGNORED).all()
