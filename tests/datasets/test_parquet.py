"""Parquet files: texts and conversations as .jsonl has them, images as a folder has them, columns as arrays."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paddle_dp.data import Loader
from paddle_dp.data.prepared import prepared
from paddle_dp.data.sampler import Sampler
from paddle_dp.datasets import chat, packed_texts, parquet_arrays, parquet_images, text_files
from paddle_dp.datasets._tokenizers import tokenizer
from paddle_dp.datasets.image_list import Config as ImageList
from paddle_dp.errors import DataError, InstallError, UsageError
from paddle_dp.recipe import LoaderSettings
from paddle_dp.recipe.schema import Pad
from paddle_dp.units import Bytes

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'paddle_dp[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

IMAGES, GROUP = 40, 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files and indices are not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(file: Path, columns: dict[str, Any], group: int = GROUP, **settings: Any) -> Path:
    pq.write_table(pa.table(columns), file, row_group_size=group, **settings)
    return file


def numbers(root: Path, count: int = 100, group: int = GROUP, **settings: Any) -> Any:
    """`count` rows with the number of the row as input and target."""
    write(root / "train-0.parquet", {"inputs": np.arange(count), "target": np.arange(count)}, group)
    return parquet_arrays.Config(path=str(root), cache=str(root / "cache"), **settings).build("train")


# --- texts


@pytest.mark.parametrize("kind", [text_files, packed_texts])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_rows_of_a_column_are_the_documents_of_a_jsonl_file(
    tmp_path: Path, kind: Any, split: str
) -> None:
    texts = [f"document {number} " * (1 + number % 3) for number in range(40)]
    write(tmp_path / "a.parquet", {"text": texts, "more": range(40)})
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tables = []
    for suffix in ("parquet", "jsonl"):
        config = kind.Config(path=str(tmp_path / f"a.{suffix}"), length=16, held_out=0.2)
        tables.append(config.texts(split, tokenizer("bytes"), 2)[1])
    for one, other in zip(*tables, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(tables[0][1]) == {"train": 32, "test": 8}[split]


def test_conversations_are_those_of_a_jsonl_file(tmp_path: Path) -> None:
    lines = [
        [
            {"role": "user", "content": f"What is {number}?", "weight": None},
            {"role": "assistant", "content": "A number.", "weight": None if number % 2 else 0},
            {"role": "assistant", "content": "Indeed."},
        ]
        for number in range(40)
    ]
    write(tmp_path / "a.parquet", {"messages": lines, "source": ["x"] * 40})
    plain = [[{k: v for k, v in m.items() if v is not None} for m in line] for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": line}) for line in plain))
    for split in ("train", "test"):
        table, text = (
            chat.Config(path=str(tmp_path / f"a.{suffix}"), length=128, held_out=0.2).build(split)
            for suffix in ("parquet", "jsonl")
        )
        assert len(table) == len(text) > 0
        for index in range(len(table)):
            for one, other in zip(table[index], text[index], strict=True):
                np.testing.assert_equal(one, other)


def test_a_row_that_is_no_document_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["a"] * 8 + [None], "n": range(9)})
    with pytest.raises(DataError, match=r"a\.parquet:9: there is no field 'text'"):
        text_files.Config(path=str(file), length=1, held_out=0.01).build("train")
    with pytest.raises(DataError, match=r"a\.parquet:1: the field 'n' is int, not a text"):
        text_files.Config(path=str(file), field="n").build("train")
    with pytest.raises(DataError, match=r"no column 'txt'; it has text, n\. Name .*dataset\.field=…"):
        text_files.Config(path=str(file), field="txt").build("train")
    (tmp_path / "b.parquet").write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as a Parquet file: .*cut off"):
        text_files.Config(path=str(tmp_path / "b.parquet")).build("train")
    file.rename(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt is a Parquet file.*: call it \.parquet"):
        text_files.Config(path=str(tmp_path / "a.txt")).build("train")


# --- images


def make(root: Path, save_image: Callable[..., Path], struct: bool = True) -> list[bytes]:
    """Two files to train on and one to evaluate on, and the same images by lists."""
    contents = []
    for number in range(IMAGES):
        path = save_image(root / f"{number:02}.png", colour=(5 * number, 100, 250 - 5 * number))
        contents.append(path.read_bytes())
    images = [{"bytes": each, "path": "a"} for each in contents] if struct else contents
    labels = [number % 3 for number in range(IMAGES)]
    for name, start, stop in (("train-0", 0, 17), ("train-1", 17, 34), ("test-0", 34, IMAGES)):
        write(root / f"{name}.parquet", {"image": images[start:stop], "label": labels[start:stop]})
    lines = [f"{number:02}.png {label}\n" for number, label in enumerate(labels)]
    (root / "train_list.txt").write_text("".join(lines[:34]))
    (root / "val_list.txt").write_text("".join(lines[34:]))
    return contents


def images(root: Path, **settings: Any) -> parquet_images.Config:
    return parquet_images.Config(path=str(root), size=16, resize=20, cache=str(root / "cache"), **settings)


@pytest.mark.parametrize("struct", [True, False])
def test_images_are_those_of_the_files(tmp_path: Path, save_image: Callable[..., Path], struct: bool) -> None:
    make(tmp_path, save_image, struct)
    table = images(tmp_path).build("test")
    files = ImageList(path=str(tmp_path), size=16, resize=20).build("test")
    assert len(table) == len(files) == 6 and table.classes == files.classes == ("0", "1", "2")
    for index in range(6):
        np.testing.assert_array_equal(table[index][0], files[index][0])
        assert table[index][1] == files[index][1]
    train = images(tmp_path).build("train")
    np.testing.assert_array_equal(train.labels, [number % 3 for number in range(34)])
    assert train.name_of(0).endswith("train-0.parquet:1")
    assert train.name_of(33).endswith("train-1.parquet:17")
    assert train.file_of(17) == str(tmp_path / "train-1.parquet")


def test_a_file_that_is_learned_is_not_held_out(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    make(tmp_path, save_image)
    message = r"dataset\.test: .*test-0\.parquet is one of the files of dataset\.train, too"
    for config in (
        images(tmp_path, train="*.parquet"),
        parquet_arrays.Config(path=str(tmp_path), train="*t"),
    ):
        with pytest.raises(UsageError, match=message):
            config.build("train")
    assert len(images(tmp_path, train="*.parquet").build("test")) == IMAGES - 34


def test_a_file_that_changes_ends_the_training_and_makes_another_index(
    tmp_path: Path, save_image: Callable[..., Path]
) -> None:
    make(tmp_path, save_image)
    data = images(tmp_path).build("train")
    data[0]
    write(tmp_path / "train-1.parquet", {"image": [b"x"] * 9, "label": [2] * 9})
    with pytest.raises(DataError, match=r"train-1\.parquet has changed after its index was made"):
        data[20]
    again = images(tmp_path).build("train")
    assert len(again) == 26
    with pytest.raises(DataError, match=r"train-1\.parquet:9 cannot be read as an image"):
        again[25]


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([0, None], r"1 labels are null"),
        (["cat", "dog"], r"the labels are string, not class numbers"),
        ([0, -1], r"train-0\.parquet:2: -1 is no class number"),
        ([0.0, 1.0], r"the labels are double, not class numbers"),
    ],
)
def test_labels_are_class_numbers(tmp_path: Path, labels: list[Any], problem: str) -> None:
    write(tmp_path / "train-0.parquet", {"image": [b"", b""], "label": labels})
    with pytest.raises(DataError, match=problem):
        images(tmp_path).build("train")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "column image is string, not the bytes of image files.*image_list"),
        ({"image": "img"}, r"no column 'img'; it has image, label\..*dataset\.image=…"),
        ({"label": "y"}, r"no column 'y'.*dataset\.label=…"),
        (
            {"train": "val-*.parquet"},
            r"dataset\.train: .*val-\*\.parquet does not exist; .* has cache, train-0",
        ),
    ],
)
def test_columns_and_kinds_are_refused_at_the_door(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    write(tmp_path / "train-0.parquet", {"image": ["a.jpg"], "label": [0]})
    (tmp_path / "cache").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=said):
        images(tmp_path, **settings).build("train")


# --- arrays


def test_columns_are_one_vector_in_their_order(tmp_path: Path) -> None:
    columns = {"a": [1, 2, 3], "b": [[1.5, 2.5]] * 3, "c": [True, False, True], "target": [0.5, 1.5, 2.5]}
    write(tmp_path / "train-0.parquet", columns)
    data = parquet_arrays.Config(path=str(tmp_path), inputs=("c", "b", "a"), cache=str(tmp_path / "c")).build(
        "train"
    )
    inputs, target = data[1]
    assert inputs.dtype == target.dtype == np.float32 and target.shape == () and target == 1.5
    assert inputs.tolist() == [0.0, 1.5, 2.5, 2.0]


def test_nested_lists_keep_their_shape_or_get_one(tmp_path: Path) -> None:
    pictures = np.arange(24).reshape(2, 3, 4)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24)), 12)
    columns = {"inputs": pictures.tolist(), "flat": fixed, "target": np.array([3, 4], np.uint8)}
    write(tmp_path / "train-0.parquet", columns)
    settings: dict[str, Any] = {"path": str(tmp_path), "cache": str(tmp_path / "c")}
    for config in (
        parquet_arrays.Config(**settings),
        parquet_arrays.Config(**settings, inputs=("flat",), shape=(3, 4)),
    ):
        data = config.build("train")
        np.testing.assert_array_equal(data[1][0], pictures[1].astype("float32"))
        assert data[1][1].dtype == np.int64 and data[1][1] == 4
    with pytest.raises(DataError, match=r"inputs have 12 numbers, and dataset\.shape \[5, 5\] has 25"):
        parquet_arrays.Config(**settings, shape=(5, 5)).build("train")[0]


def test_tokens_of_unequal_lengths_are_padded(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4], [], [5, 6]]
    write(tmp_path / "train-0.parquet", {"ids": rows, "next": rows}, group=4)
    config = parquet_arrays.Config(
        path=str(tmp_path), inputs=("ids",), target="next", dtype="int64", cache=str(tmp_path / "c")
    )
    data = prepared(
        config.build("train"),
        LoaderSettings(pad={"inputs": Pad(length=3), "targets": Pad(length=3, value=-100)}),
    )
    assert [data[index][0].tolist() for index in range(4)] == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]]
    assert data[1][1].tolist() == [4, -100, -100]


@pytest.mark.parametrize(
    ("column", "dtype", "problem"),
    [
        ([1.0, None], "float32", r"column inputs has 1 nulls"),
        ([[1.0], [None]], "float32", r"column inputs has 1 nulls"),
        ([1.0, float("nan")], "float32", r"has nan, which is no finite number of float32"),
        ([1.0, 1e300], "float32", r"has 1e\+300, which is no finite number of float32"),
        ([1, 2**24 + 1], "float32", r"has 16777217, .*dataset\.dtype=int64"),
        ([1.0, 1.5], "int64", r"has 1\.5, which is no finite number of int64.*dataset\.dtype=float32"),
        (["a", "b"], "float32", r"column inputs is string, not numbers"),
        ([[[1], [2, 3]], [[1], [2, 3]]], "float32", r"the nested lists of column inputs differ in length"),
        (
            None,
            "float32",
            "column target has 9223372036854775809",
        ),  # an unsigned number does not become negative
    ],
)
def test_numbers_are_never_changed_in_silence(tmp_path: Path, column: Any, dtype: Any, problem: str) -> None:
    target = np.array([0, 1 if column else 2**63 + 1], np.uint64)
    write(tmp_path / "train-0.parquet", {"inputs": column or [1.0, 2.0], "target": target})
    config = parquet_arrays.Config(path=str(tmp_path), dtype=dtype, cache=str(tmp_path / "c"))
    with pytest.raises(DataError, match=rf"train-0\.parquet, row group 0: .*{problem}"):
        config.build("train")[0]


# --- order, memory, ranks


def test_an_epoch_reads_each_row_once_and_each_group_about_once_within_the_memory(tmp_path: Path) -> None:
    data = numbers(tmp_path, 3000, 50)
    sizes = data._rows._index["bytes"]
    memory = int(8 * sizes.max())
    data = numbers(tmp_path, 3000, 50, memory=Bytes(memory))
    rows, read = data._rows, list[int]()
    original = type(rows)._file
    rows._file = lambda number: read.append(number) or original(rows, number)
    orders = [data.epoch_order(seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert all(np.array_equal(np.sort(order), np.arange(3000)) for order in orders)
    assert np.array_equal(orders[0], orders[3]) and not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    for batch in orders[0].reshape(-1, 30):
        for index in np.random.default_rng(0).permutation(batch).tolist():  # a worker's, in any order
            assert data[index][0] == data[index][1] == index
        assert rows._used <= memory and rows._used == sum(size for _, size in rows._groups.values())
    assert len(read) == 60  # groups
    spread = [np.ptp(order[:200] // 50) for order in orders[:3]]
    assert min(spread) > 20  # the first rows are of groups from all over the file


def test_memory_is_that_of_the_arrays_which_are_kept(tmp_path: Path) -> None:
    """Pixels of a byte take four as float32, and numbers that repeat take less in the file."""
    pixels = [[number % 7] * 12 for number in range(3000)]
    columns = {"pixels": pa.array(pixels, pa.list_(pa.uint8())), "half": np.zeros(3000, "float16")}
    write(tmp_path / "train-0.parquet", columns, 50)
    settings: dict[str, Any] = {"path": str(tmp_path), "cache": str(tmp_path / "c"), "target": "half"}
    a_group = 50 * (12 + 1) * 4
    config = parquet_arrays.Config(**settings, inputs=("pixels",), memory=Bytes(8 * a_group))
    data, read = config.build("train"), list[int]()
    rows, original = data._rows, type(data._rows)._file
    rows._file = lambda number: read.append(number) or original(rows, number)
    for index in data.epoch_order(0, 0):
        assert data[index][0].tolist() == pixels[index]
        kept = sum(array.nbytes for group, _ in rows._groups.values() for array in group)
        assert kept == rows._used <= 8 * a_group
    assert len(read) == 60  # each group once
    with pytest.raises(DataError, match=r"a row group of 50 rows and 0\.00248 MB in memory"):
        replace(config, memory=Bytes(a_group - 1)).build("train")


def test_images_that_repeat_are_kept_within_the_memory(tmp_path: Path) -> None:
    """The file has each once, and 15 KB of each row group are kept."""
    write(tmp_path / "train-0.parquet", {"image": [bytes(3000)] * 50, "label": [0] * 50})
    rows = images(tmp_path, memory=Bytes(40_000)).build("train")._rows
    assert rows._index["bytes"].max() < 10_000
    for number in range(50):
        rows.row(number)
        assert sum(group.nbytes for group, _ in rows._groups.values()) == rows._used <= 40_000


def test_a_column_that_is_input_and_target_is_kept_twice(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", {"a.b": np.arange(5), "a": np.arange(5)})
    config = parquet_arrays.Config(
        path=str(tmp_path), inputs=("a.b",), target="a.b", cache=str(tmp_path / "c")
    )
    assert config.build("train")._rows._index["bytes"].tolist() == [5 * (4 + 8)]


def test_a_row_group_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"a row group of 3,000 rows .* a process keeps 1 KB: raise it, or write"
    ):
        numbers(tmp_path, 3000, 3000, memory=Bytes(1024))


@pytest.mark.processes
def test_workers_and_ranks_read_what_one_process_reads(tmp_path: Path) -> None:
    data = numbers(tmp_path)
    data[3]  # a file and a group are open when the workers are forked
    plain, forked = [], []
    for count, read in ((0, plain), (2, forked)):
        with Loader.plain(data, 7, num_workers=count) as loader:
            read += [batch.micro_batches[0].targets.tolist() for batch in loader.read(1)]
    assert plain == forked and sorted(n for batch in plain for n in batch) == list(range(100))
    alone = Sampler.for_dataset(data, 7, micro_batches=2)
    three = [replace(alone, dp_rank=rank, dp_size=3) for rank in range(3)]
    for k in range(alone.batches):
        parts = [indices for sampler in three for indices in sampler.local_batch(2, k)]
        assert sorted(np.concatenate(parts)) == sorted(np.concatenate(alone.local_batch(2, k)))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(tmp_path)  # also where the index is known
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InstallError, match=r"needs the package pyarrow: pip install 'paddle_dp\[parquet\]'"):
        parquet_arrays.Config(path=str(tmp_path), cache=str(tmp_path / "cache")).build("train")
    with pytest.raises(InstallError, match=r"paddle_dp\[parquet\]"):
        text_files.Config(path=str(tmp_path / "train-0.parquet")).build("train")


def test_an_image_that_is_null_is_named(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (20, 20)).save(image, "PNG")
    write(tmp_path / "train-0.parquet", {"image": [image.getvalue(), None], "label": [0, 1]})
    data = images(tmp_path).build("train")
    assert data[0][0].shape == (3, 16, 16)
    with pytest.raises(DataError, match=r"train-0\.parquet:2 has no image"):
        data[1]
