"""Mixtures: exact after any number of samples, every sample of a data set before any again, equal on any ranks."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.assembly.first_forward import answer
from paddle_dp.data import Loader
from paddle_dp.data.fingerprint import fingerprint
from paddle_dp.data.prepared import prepared
from paddle_dp.data.sample import read_samples
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.sources import refuse_targets, sources_targets
from paddle_dp.datasets._interleaved import (
    Concatenated,
    InterleavedSamples,
    draws_of_epoch,
    integer_weights,
    interleave,
)
from paddle_dp.datasets._windows import Windows
from paddle_dp.datasets.mixture import Config
from paddle_dp.errors import DataError, RecipeError, UsageError
from paddle_dp.identity.source_code import recipe_code
from paddle_dp.losses.cross_entropy import CrossEntropy, CrossEntropyIgnoring
from paddle_dp.part import read_part
from paddle_dp.recipe import LoaderSettings, read_recipe
from paddle_dp.recipe.schema import Pad
from tests.house.batches import global_batches
from tests.house.datasets import InMemory, Noisy, Numbers
from tests.house.training import build_trainer
from tests.parity import assert_same, train, train_cases
from tests.ranks import run_ranks

SMALL, LARGE = 3, 20
BATCH = 7


class Drawn:
    """Tokens [16] of 32, half of them drawn again whenever a sample is read, each target the token before."""

    def __init__(self, split: str, samples: int = 10, seed: int = 0):
        self.tokens = np.random.default_rng([seed, split == "test"]).integers(0, 32, (samples, 16))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokens[index].copy()
        tokens[:8] = np.random.randint(0, 32, 8)
        tokens[8] = random.randrange(32)
        return tokens, np.roll(tokens, 1)


class Tens(Numbers):
    """Sample i is (10 + i, 10 + i) and 10 i."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + 10, target


def mixed(
    kind: Any = Numbers, weights: tuple[float, ...] = (0.7, 0.3), sizes: Any = (LARGE, SMALL), **settings: Any
) -> InterleavedSamples:
    names = [f"dataset.sources.{number}" for number in range(len(sizes))]
    sources = {name: kind(size) for name, size in zip(names, sizes, strict=True)}
    return InterleavedSamples(sources, weights, **settings)


def sources_of(data: InterleavedSamples, order: np.ndarray) -> list[int]:
    return [int(data.name_of(index).split(".")[2][0]) for index in order.tolist()]


# --- the arithmetic


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.3), [7, 3]), ((7, 3), [7, 3]), ((1, 1, 1), [1, 1, 1]), ((0.1, 0.2), [1, 2]), ((1e-3, 1), [1, 1000]),
        ((2.5, 5), [1, 2]), ((1e22, 3e22), [1, 3]), ((0.123456789,), [1]),
    ],
)  # fmt: skip
def test_weights_are_their_decimal_digits(weights: tuple[float, ...], expected: list[int]) -> None:
    assert integer_weights(weights) == expected


def test_after_any_draw_each_source_has_its_share_up_to_less_than_one() -> None:
    draw = random.Random(0)
    cases = [
        [draw.randint(1, draw.choice([3, 10, 1000])) for _ in range(draw.randint(1, 9))] for _ in range(300)
    ]
    for weights in [*cases, [1] * 40, [1, 999_983], [10**9 + 7, 3, 10**9], [7, 3]]:
        period = sum(weights)
        sequence = interleave(weights, min(2 * period + 3, 2500))
        taken = np.cumsum(sequence[:, None] == np.arange(len(weights)), axis=0)
        for k, counts in enumerate(taken.tolist(), 1):
            for count, weight in zip(counts, weights, strict=True):
                assert abs(count * period - k * weight) < period, (weights, k)


def test_the_earliest_deadline_is_taken_and_then_the_first_in_the_list() -> None:
    assert interleave([7, 3], 12).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert interleave([1, 1, 1], 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert interleave([1, 2, 1], 4).tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_an_epoch_ends_with_the_last_sample_of_one_data_set_or_of_each(until: Any) -> None:
    draw = random.Random(1)
    for _ in range(200):
        number = draw.randint(1, 5)
        weights = integer_weights([draw.randint(1, 30) for _ in range(number)])
        lengths = [draw.randint(1, 40) for _ in range(number)]
        draws = draws_of_epoch(weights, lengths, until)
        enough = [Counter(interleave(weights, k).tolist()) for k in (draws - 1, draws)]
        full = [[counts[source] >= n for source, n in enumerate(lengths)] for counts in enough]
        check = any if until == "first_exhausted" else all
        assert [check(each) for each in full] == [False, True]


# --- the samples of an epoch


@pytest.mark.parametrize(
    "settings", [{}, {"until": "first_exhausted"}, {"draws": 11}, {"draws": 100}, {"draws": 4}]
)
@pytest.mark.parametrize("sizes", [(LARGE, SMALL), (SMALL, LARGE), (3, 5), (7, 7)])
def test_a_data_set_gives_all_its_samples_before_any_again_over_all_epochs(sizes: Any, settings: Any) -> None:
    data = mixed(sizes=sizes, **settings)
    targets: list[list[int]] = [[], []]
    for epoch in range(9):
        order = data.epoch_order(3, epoch)
        assert len({*order.tolist()}) == len(order) and order.min() >= 0 and order.max() < len(data)
        for source, index in zip(sources_of(data, order), order.tolist(), strict=True):
            targets[source].append(data[index][1] // 10)
    for drawn, size in zip(targets, sizes, strict=True):
        rounds = [drawn[start : start + size] for start in range(0, len(drawn) - size + 1, size)]
        assert all(sorted(each) == [*range(size)] for each in rounds)
        if size >= 7 and len(rounds) > 1:
            assert len({*map(tuple, rounds)}) == len(rounds), "each time in another order"


def test_equal_data_sets_are_not_read_in_the_same_order() -> None:
    data = mixed(weights=(1, 1), sizes=(LARGE, LARGE))
    order = data.epoch_order(0, 0) % LARGE
    assert order[::2].tolist() != order[1::2].tolist()


def test_an_order_is_of_seed_and_epoch_and_the_same_for_ever() -> None:
    data = mixed()
    orders = [data.epoch_order(seed, epoch).tolist() for seed in (-1, 0, 2**40) for epoch in range(3)]
    assert len({*map(tuple, orders)}) == 9
    assert mixed().epoch_order(0, 1).tolist() == orders[4]
    assert orders[3][:12] == [0, 8, 21, 19, 9, 22, 3, 18, 14, 20, 7, 15]


def test_a_mixture_in_a_mixture_is_read_in_its_order() -> None:
    inner = mixed(Tens, sizes=(4, 2))
    data = InterleavedSamples({"dataset.sources.0": Numbers(5), "dataset.sources.1": inner}, (1, 2))
    order = np.concatenate([data.epoch_order(5, epoch) for epoch in range(4)])
    drawn = [data[index] for index, source in zip(order, sources_of(data, order), strict=True) if source == 1]
    rounds = np.concatenate([inner.epoch_order(5, epoch) for epoch in range(50)])[: len(drawn)]
    assert [target for _, target in drawn] == [inner[index][1] for index in rounds.tolist()]
    assert all(inputs[0] >= 10 for inputs, _ in drawn)


class OfEpochs(InMemory):
    """Numbers with the epoch and the seed as the target; an epoch has another order, too."""

    def at_epoch(self, seed: int, epoch: int) -> Any:
        return [(inputs, (epoch, seed)) for inputs, _ in (self[index] for index in range(len(self)))]


def test_a_data_set_with_other_samples_in_each_epoch_counts_how_often_it_was_read() -> None:
    data = mixed(OfEpochs, draws=25)
    assert not hasattr(data, "take") and not hasattr(mixed(), "at_epoch")
    rounds: list[list[tuple[int, int]]] = [[], []]
    for epoch in range(5):
        order, view = data.epoch_order(6, epoch), data.at_epoch(6, epoch)
        for source, index in zip(sources_of(data, order), order.tolist(), strict=True):
            rounds[source].append(view[index][1])
            assert view[index][0].tolist() == data[index][0].tolist()
    for drawn, size in zip(rounds, (LARGE, SMALL), strict=True):
        assert drawn == [(number // size, 6) for number in range(len(drawn))]


def test_a_sample_that_comes_again_in_an_epoch_is_augmented_again() -> None:
    data = mixed(Noisy)
    order = data.epoch_order(0, 0)
    inputs, targets = read_samples(data, order, 0, 0)
    rows = zip(inputs, targets, sources_of(data, order), strict=True)
    repeated = [noise for noise, target, source in rows if source and not target]
    assert len(repeated) > 2 and len({tuple(noise.tolist()) for noise in repeated}) == len(repeated)


# --- the loader


def batches(data: Any, micro_batches: int = 1, **settings: Any) -> list[np.ndarray]:
    """The inputs and targets of each global batch."""
    sampler = Sampler.for_dataset(data, BATCH, seed=3, micro_batches=micro_batches)
    return [
        np.concatenate([inputs.reshape(len(inputs), -1), targets[:, None]], axis=1)
        for inputs, targets in global_batches(data, sampler, **settings)
    ]


@pytest.mark.parametrize("kind", [Numbers, Noisy, InMemory])
@pytest.mark.parametrize(("dp_size", "micro_batches"), [*itertools.product((1, 2, 3), (1, 2))])
def test_global_batches_have_the_order_on_any_ranks_and_micro_batches(
    kind: Any, dp_size: int, micro_batches: int
) -> None:
    data = mixed(kind)
    for epoch, batch in itertools.groupby(
        enumerate(batches(data, dp_size=dp_size, micro_batches=micro_batches)),
        lambda row: row[0] // Sampler.for_dataset(data, BATCH).batches,
    ):
        rows = np.concatenate([rows for _, rows in batch])
        inputs, targets = read_samples(data, data.epoch_order(3, epoch), 3, epoch)
        np.testing.assert_array_equal(rows, np.concatenate([inputs, targets[:, None]], axis=1))


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Noisy, InMemory])
def test_workers_read_the_same_also_from_the_middle_of_an_epoch(kind: Any) -> None:
    data, expected = mixed(kind), batches(mixed(kind))
    per_epoch = len(expected) // 2
    middle = [rows for number, rows in enumerate(expected) if number % per_epoch >= 2]
    for read, rows in zip(batches(data, start=2, dp_size=2, num_workers=2), middle, strict=True):
        np.testing.assert_array_equal(read, rows)


def test_padding_keeps_order_names_and_files() -> None:
    data = prepared(mixed(), LoaderSettings(pad={"inputs": Pad(length=5)}))
    assert Sampler.for_dataset(data, BATCH).order(1).tolist() == mixed().epoch_order(0, 1).tolist()
    assert data.name_of(0) == "dataset.sources.0: 0.jpg" and data.file_of(0) == "0.jpg"


def test_many_samples_are_taken_at_once_and_equal_single_ones() -> None:
    data = mixed(InMemory)
    indices = np.array([24, 0, 26, 19, 21, 20, 5])
    inputs, targets = data.take(indices)
    singles = [data[index] for index in indices.tolist()]
    np.testing.assert_array_equal(inputs, np.stack([each for each, _ in singles]))
    np.testing.assert_array_equal(targets, [target for _, target in singles])
    assert not hasattr(mixed(Numbers), "take")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, InMemory])
def test_samples_of_other_shapes_name_both_data_sets(kind: Any, workers: int) -> None:
    sources = {"dataset.sources.0 (a)": kind(9, 2), "dataset.sources.1 (b)": kind(9, 3)}
    data = InterleavedSamples(sources, (1, 1))
    with Loader.plain(data, BATCH, num_workers=workers) as loader, pytest.raises(DataError) as error:
        next(loader.read(0))
    assert all(name in str(error.value) for name in (*sources, "float32[2]", "float32[3]"))


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (InMemory(9, 3), r"samples of b are input float32\[3\], .*, and of a input float32\[2\]"),
        (InterleavedSamples({"c": InMemory(9, 2), "d": InMemory(9, 3)}, (1, 1)), r"samples of d are"),
        ([({"x": np.zeros(2)}, np.int64(1))], r"samples of b are input {x: float64\[2\]}"),
        ([(np.zeros(2), np.int64(1))], r"samples of b are input float64\[2\]"),
        ([(np.zeros(2, np.float32), np.float32(1))], r"target float32\[\], and of a .*target int64\[\]"),
    ],
)
@pytest.mark.parametrize("kind", [InterleavedSamples, Concatenated])
def test_sources_of_other_forms_are_refused_before_any_batch(kind: Any, second: Any, problem: str) -> None:
    sources = {"a": InMemory(9, 2), "b": second}
    weighted = kind is InterleavedSamples
    data = InterleavedSamples(sources, (999, 1), draws=2000) if weighted else Concatenated(sources)
    with pytest.raises(UsageError, match=problem):
        sources_targets(data, seed=0)


def test_padded_sources_are_of_one_form_and_drawn_ones_take_no_number_from_the_training() -> None:
    data = InterleavedSamples({"a": InMemory(9, 2), "b": InMemory(9, 3)}, (1, 1))
    padded = prepared(data, LoaderSettings(pad={"inputs": Pad(length=4)}))
    assert [*sources_targets(padded, seed=0)] == ["a", "b"]
    assert sources_targets(InMemory(9, 2), seed=0) == {}
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    sources_targets(InterleavedSamples({"a": Drawn("train"), "b": Drawn("test")}, (1, 1)), seed=0)
    np.testing.assert_array_equal(before, np.random.get_state()[1])


def test_targets_of_any_source_that_are_no_class_are_refused() -> None:
    plain, ignoring = CrossEntropy(), CrossEntropyIgnoring(0.0, -100)
    targets = {"a": np.array([0, 5]), "b (chat)": np.array([3, -100])}
    with pytest.raises(UsageError, match=r"b \(chat\) has targets -100, .*loss\.ignore_index=-100"):
        refuse_targets(targets, plain)
    refuse_targets(targets, ignoring)
    with pytest.raises(UsageError, match=r"a has targets -1, "):
        refuse_targets({"a": np.array([-1])}, ignoring)
    refuse_targets({"a": np.array([-1.0], np.float32)}, plain)  # no class numbers: the loss says so
    refuse_targets(targets, lambda outputs, targets: 0)  # a loss that is not known


def test_one_changed_sample_of_a_small_data_set_changes_the_fingerprint() -> None:
    class Changed(Numbers):
        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return inputs + (index == 2), target

    def of(small: Any, weights: tuple[float, float] = (0.7, 0.3)) -> dict[str, str]:
        data = InterleavedSamples({"a": Numbers(100), "b": small}, weights, until="first_exhausted")
        return fingerprint(data, 1)

    plain = of(Numbers(4))
    assert of(Numbers(4)) == plain and of(Changed(4)) != plain
    assert of(Numbers(4), (0.6, 0.4))["order of epoch 0"] != plain["order of epoch 0"]


# --- classes, tokenizers, held-out samples


def test_held_out_samples_are_all_of_each_data_set_one_after_the_other() -> None:
    data = Concatenated({"a": Numbers(3), "b": Tens(2)})
    assert len(data) == 5 and [data[i][0][0] for i in range(5)] == [0, 1, 2, 10, 11]
    assert not hasattr(data, "epoch_order") and data.name_of(4) == "b: 1.jpg"
    with pytest.raises(IndexError):
        data[5]


def classified(classes: Any) -> Numbers:
    data = Numbers(4)
    data.classes = classes  # type: ignore[attr-defined]
    return data


def test_classes_are_the_same_or_those_of_the_larger_list() -> None:
    few, more = classified(("x", "y")), classified(("x", "y", "z"))
    assert Concatenated({"a": few, "b": more}).classes == ("x", "y", "z")
    assert not hasattr(Concatenated({"a": few, "b": Numbers(2)}), "classes")
    with pytest.raises(UsageError, match="b and c have different classes: number 1 is 'dog' and 'y'"):
        Concatenated({"a": classified(("x",)), "b": classified(("x", "dog")), "c": more})


def test_other_tokenizers_are_refused() -> None:
    def windows(identity: str) -> Windows:
        tokenizer: Any = type("Fake", (), {"identity": identity, "vocab": 7})()
        return Windows(np.arange(9), 4, (), tokenizer)

    assert Concatenated({"a": windows("x"), "b": windows("x")}).tokenizer.vocab == 7
    with pytest.raises(UsageError, match="a and b have different tokenizers"):
        Concatenated({"a": windows("x"), "b": windows("y")})


# --- the recipe

RECIPE = """\
model: {use: mlp, classes: 10}
dataset:
  use: mixture
  sources:
    - {use: digits, weight: 0.7}
    - {use: digits, held_out: 0.3, weight: 0.3}
loss: {use: cross_entropy}
optimizer: {use: adamw}
train: {length: 1 epochs, batch: 10}
"""


def read(folder: Path, *words: str) -> Any:
    (folder / "r.yaml").write_text(RECIPE)
    return read_recipe(folder / "r.yaml", words, tries=False)


def mistakes(folder: Path, *lines: str) -> list[str]:
    head, tail = RECIPE.split("    - {use: digits, weight: 0.7}\n")
    path = folder / "r.yaml"
    path.write_text(head + "".join(f"    - {line}\n" for line in lines) + tail.partition("0.3}\n")[2])
    with pytest.raises(RecipeError) as error:
        read_recipe(path, tries=False)
    return [str(mistake).replace(str(folder) + "/", "") for mistake in error.value.mistakes]


def test_a_mistake_in_a_source_has_its_line_and_the_near_miss(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        "{use: digits, hold_out: 0.1, weight: 1}",
        "{use: digit, weight: 0}",
        "{use: digits, weight: '2', as_image: 1}",
        "{use: digits, reading: scatter, weight: 1}",
        "{use: mixture, weight: 1, sources: [{use: digits}, {use: digits, weight: 1}]}",
        "digits",
    )
    expected = [
        "r.yaml:5: dataset digits has no setting 'hold_out'. Did you mean 'held_out'?",
        "r.yaml:6: there is no dataset 'digit'. Did you mean 'digits'",
        "r.yaml:6: dataset.sources.1.weight: 0 is not more than 0",
        "r.yaml:7: dataset.sources.2.as_image: 1 is not true or false",
        "r.yaml:7: dataset.sources.2.weight: '2' is not a number: leave the quotes out",
        "r.yaml:8: dataset.sources.3.reading: one data set of a mixture cannot be scattered",
        "r.yaml:9: dataset.sources.4.sources.0 needs 'weight'",
        "r.yaml:10: dataset.sources.5: a part is a group of settings: write dataset.sources.5: {use: digits}",
    ]
    for one, start in zip(found, expected, strict=True):
        assert one.startswith(start)


@pytest.mark.parametrize("sources", ["[]", "digits", "{use: digits, weight: 1}", "null"])
def test_sources_that_are_no_list_show_one(tmp_path: Path, sources: str) -> None:
    with pytest.raises(
        RecipeError, match=r"sources: needs a list of data sets with weights, such as \[\{use"
    ):
        read(tmp_path, f"dataset.sources={sources}")


def test_a_recipe_is_written_as_it_is_read(tmp_path: Path) -> None:
    written = read(tmp_path, "dataset.sources.0.weight=2").dataset.settings
    assert [source["weight"] for source in written["sources"]] == [2.0, 0.3]
    assert read_part("datasets", written).settings == written
    assert written["sources"][1]["held_out"] == 0.3 and "reading" not in written["sources"][0]


def test_the_code_of_each_source_belongs_to_the_run_and_the_first_has_the_length(tmp_path: Path) -> None:
    inner = "{use: mixture, weight: 1, sources: [{use: tests.datasets.test_mixture.Drawn, weight: 1}]}"
    words = [f"dataset.sources.1={inner}", "dataset.sources.0={use: random_tokens, length: 24, weight: 1}"]
    recipe = read(tmp_path, *words)
    assert "code of datasets tests.datasets.test_mixture.Drawn" in recipe_code(recipe)
    assert recipe.dataset.config.length == 24 and recipe.dataset.config.field is None
    texts = read(tmp_path, "dataset.sources.0={use: text_files, field: body, weight: 1}")
    assert texts.dataset.config.field == "body"


def config(*sources: dict[str, Any], **settings: Any) -> Config:
    built = read_part("datasets", {"use": "mixture", "sources": [*sources], **settings}).config
    assert isinstance(built, Config)
    return built


@pytest.mark.parametrize("epoch", ["all_exhausted", "first_exhausted"])
def test_without_weights_an_epoch_has_each_sample_once_and_every_batch_its_share(epoch: str) -> None:
    kind = "tests.datasets.test_mixture.Drawn"
    built = config({"use": kind, "samples": 25}, {"use": kind, "samples": 75, "seed": 1}, epoch=epoch)
    data = built.build("train")
    assert isinstance(data, InterleavedSamples)
    for number in range(3):
        order = data.epoch_order(0, number).tolist()
        assert len(order) == 100 and len({data.name_of(index) for index in order}) == 100
        firsts = [sum("sources.0" in data.name_of(index) for index in order[:k]) for k in range(101)]
        assert all(abs(count - k / 4) < 1 for k, count in enumerate(firsts))
    alone = read_part("datasets", {"use": "mixture", "sources": [{"use": "digits"}]})
    assert "weight" not in alone.settings["sources"][0]


def test_check_and_train_refuse_a_source_that_the_loss_does_not_take(tmp_path: Path) -> None:
    """Its first sample comes after a hundred of the other's."""
    (tmp_path / "a.txt").write_text("a text to learn from. " * 500)
    lines = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{n}"}] for n in range(200)]
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps({'messages': line})}\n" for line in lines))
    common = f"length: 64, cache: {tmp_path}"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"""\
model: {{use: gpt, vocab: 256, width: 8, depth: 1, heads: 1, length: 64}}
dataset:
  use: mixture
  sources:
    - {{use: packed_texts, path: {tmp_path}/a.txt, weight: 0.99, {common}}}
    - {{use: chat, path: {tmp_path}/b.jsonl, weight: 0.01, {common}}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw}}
train: {{length: 8 steps, batch: 4}}
"""
    )
    refused = "dataset.sources.1 (chat) has targets -100, which are no class"
    assert refused in answer(str(recipe), [])["error"]
    with pytest.raises(UsageError, match=re.escape(refused)):
        build_trainer(recipe.read_text(), str(tmp_path / "run"))
    assert answer(str(recipe), ["loss.ignore_index=-100"]) == {"lines": []}
    windows = "dataset.sources.0={use: text_files, weight: 1, length: 64}"
    other = answer(str(recipe), ["loss.ignore_index=-100", windows])
    assert "dataset.sources.1 (chat) are input {positions: int64[64]" in other["error"]


def test_an_error_of_a_data_set_names_its_key(tmp_path: Path) -> None:
    absent = {"use": "text_files", "path": str(tmp_path / "nowhere"), "weight": 1}
    with pytest.raises(DataError, match=r"^dataset\.sources\.1\.path: .*nowhere does not exist"):
        config({"use": "digits", "weight": 1}, absent).build("train")
    with pytest.raises(
        DataError, match=r"sources\.0\.path is not given: .* \(dataset\.sources\.0\.path=/where"
    ):
        config({"use": "image_folder", "weight": 1}).build("train")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Flow", "is a stream: a mixture takes data sets with"),
        ("Padded", "has a collate_fn"),
        ("Empty", "is empty"),
        ("Absent", "has no training data: its train split is None"),
    ],
)
def test_a_data_set_of_another_kind_is_refused_by_its_key(name: str, problem: str) -> None:
    source = {"use": f"tests.datasets.test_mixture.{name}", "weight": 1}
    with pytest.raises(
        UsageError, match=rf"dataset\.sources\.1 \(tests.*{name}\)(, train split,)? {problem}"
    ):
        config({"use": "digits", "weight": 1}, source).build("train")


class Flow:
    def __init__(self, split: str): ...

    def __iter__(self) -> Any:
        yield 1, 2


class Padded(Drawn):
    def collate_fn(self, samples: Any) -> Any:
        return samples


class Empty(Drawn):
    def __len__(self) -> int:
        return 0


class Absent(Drawn):
    def __new__(cls, split: str) -> Any:
        return None


def test_without_held_out_data_there_is_none_and_one_data_set_may_have_some() -> None:
    absent = {"use": "tests.datasets.test_mixture.Absent", "weight": 1}
    assert config(absent).build("test") is None
    assert len(config(absent, {"use": "digits", "weight": 1}).build("test") or ()) == 360


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"samples": 2}, r"an epoch of 2 samples has none of dataset\.sources\.1"),
        ({}, r"an epoch would have 1[\d,]+ samples, for the smallest weight with the largest data set"),
    ],
)
def test_an_epoch_without_a_data_set_or_without_end_is_refused(settings: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        config({"use": "digits", "weight": 1}, {"use": "digits", "weight": 1e-7}, **settings).build("train")


# --- ranks

MIXTURE = (
    "dataset={use: mixture, samples: 14, sources: ["
    "{use: tests.datasets.test_mixture.Drawn, samples: 25, weight: 0.6}, "
    "{use: tests.datasets.test_mixture.Drawn, samples: 4, seed: 1, weight: 0.4}]}"
)


@pytest.mark.processes
def test_two_ranks_and_one_that_goes_on_learn_what_one_process_learns(tmp_path: Path) -> None:
    how = {"more": ["model.depth=2", MIXTURE]}
    begun = run_ranks(
        train, 2, str(tmp_path / "two"), "{use: data_parallel}", "3 steps", **how
    )  # an epoch has 2
    one = {"strategy": "{use: single}", "until": "5 steps", **how}
    cases = {"alone": one, "resumed": {**one, "resume": begun[0]["saved"]}}
    (found,) = run_ranks(train_cases, 1, str(tmp_path), cases)
    assert found["alone"]["samples"] == 29
    resumed = [{**found["resumed"], "rows": rank["rows"] + found["resumed"]["rows"]} for rank in begun]
    assert_same(resumed, found["alone"])
