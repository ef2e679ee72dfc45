"""Windows of text: every token once, no file in two splits, tokens made once by however many processes."""

import gzip
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.data import Sampler
from paddle_dp.datasets import _windows
from paddle_dp.datasets.text_files import Config
from paddle_dp.errors import DataError, InstallError, UsageError
from paddle_dp.units import Bytes
from tests.ranks import run_ranks


@pytest.fixture
def texts(tmp_path):
    """A folder of 30 texts, each of its own letter, and a Config that reads it into its own cache."""
    folder = tmp_path / "texts"
    for number in range(30):
        file = folder / f"{'ab'[number % 2]}/text{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(chr(97 + number) * (50 + 7 * number))
    return lambda **settings: Config(
        **{"path": str(folder), "cache": str(tmp_path / "cache"), "length": 8} | settings
    )


def test_windows_hold_every_token_once(texts):
    data = texts().build("train")
    inputs, targets = data.take(np.arange(len(data)))
    tokens = np.asarray(data.tokens)
    assert (inputs.ravel() == tokens[: inputs.size]).all() and (
        targets.ravel() == tokens[1 : inputs.size + 1]
    ).all()
    assert 0 <= len(tokens) - 1 - targets.size < 8
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape[1:] == (8,)
    text = bytes(tokens.astype(np.uint8))
    assert text == b"".join(file.read_bytes() + b"\0" for file in data.files)
    assert sum(sampler(data, rank) for rank in range(3)) == len(data)


def test_files_of_the_test_split_are_not_learned_and_others_are_all(texts, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.txt").write_text("!" * 40)
    config = texts(test=str(tmp_path / "held"), held_out=0.5)
    assert len(config.build("train").files) == 30
    assert bytes(np.asarray(config.build("test").tokens).astype(np.uint8)) == b"!" * 40 + b"\0"


def sampler(data, rank):
    """How many windows one of three readers takes in an epoch."""
    mine = Sampler(len(data), 10, rank, 3)
    return sum(len(micro_batch) for k in range(mine.batches) for micro_batch in mine.local_batch(0, k))


def test_take_gives_what_one_by_one_gives(texts):
    data = texts().build("train")
    inputs, targets = data.take(np.array([5, 0, 11]))
    for row, index in enumerate((5, 0, 11)):
        assert (inputs[row] == data[index][0]).all() and (targets[row] == data[index][1]).all()
    assert len(list(data)) == len(data)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.99])
def test_no_file_is_in_both_splits_and_none_in_neither(texts, fraction):
    train, test = (texts(held_out=fraction).build(split) for split in ("train", "test"))
    assert len(test.files) == min(29, math.ceil(fraction * 30)) and len({*train.files, *test.files}) == 30
    assert not set(np.asarray(train.tokens)) & set(np.asarray(test.tokens)) - {0}


def test_names_decide_what_is_held_out(texts, tmp_path):
    held = {file.name for file in texts(held_out=0.2).build("test").files}
    (tmp_path / "texts/a/another.txt").write_text("x" * 99)
    now = {file.name for file in texts(held_out=0.2).build("test").files}
    assert len(held - now) <= 1 and len(now - held) <= 1
    assert held != {f"text{number}.txt" for number in range(6)}


def test_a_single_file_is_cut(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 201)))
    config = Config(path=str(tmp_path / "one.txt"), cache=str(tmp_path), length=4, held_out=0.1)
    assert bytes(config.build("train").tokens) == bytes(range(1, 181)) + b"\0"
    assert bytes(config.build("test").tokens) == bytes(range(181, 201)) + b"\0"


def test_paths_are_folders_files_and_globs(texts, tmp_path):
    (tmp_path / "texts/.hidden").write_text("no")
    glob = texts(path=str(tmp_path / "texts/**/text1*.txt"), held_out=0.5)
    names = [file.name for split in ("train", "test") for file in glob.build(split).files]
    assert sorted(names) == ["text1.txt", *(f"text1{number}.txt" for number in range(10))]
    limited = [
        file
        for split in ("train", "test")
        for file in texts(limit=Bytes(500), held_out=0.5).build(split).files
    ]
    assert sum(file.stat().st_size for file in limited) <= 500
    assert sorted(limited) == sorted((tmp_path / "texts/a").iterdir())[: len(limited)] and len(limited) > 2


def test_by_default_python_reads_its_own_sources(tmp_path):
    data = Config(cache=str(tmp_path), limit=Bytes.parse("300 KB")).build("train")
    assert all(file.suffix == ".py" for file in data.files)
    assert not {"test", "tests", "site-packages"} & {part for file in data.files for part in file.parts}
    assert "import" in data.tokenizer.decode(np.concatenate([data[i][0] for i in range(200)]))


def test_tokens_are_made_once_and_anew_when_a_file_changed(texts, tmp_path):
    first = texts().build("train")
    assert isinstance(first.tokens, np.memmap) and first.tokens.dtype == np.uint8
    file = next((tmp_path / "cache").glob("*.npy"))
    made = file.stat().st_mtime_ns
    assert (texts().build("train").tokens == first.tokens).all() and file.stat().st_mtime_ns == made
    assert not [left for left in (tmp_path / "cache").iterdir() if left.suffix != ".npy"]
    first.files[0].write_text("changed, and longer than it was before" * 5)
    assert b"changed" in bytes(texts().build("train").tokens)


def test_a_broken_cache_is_made_anew(texts, tmp_path):
    whole = bytes(texts().build("train").tokens)
    for file in (tmp_path / "cache").glob("*.npy"):
        os.truncate(file, 200)
    assert bytes(texts().build("train").tokens) == whole


def test_a_cache_that_cannot_be_is_done_without(texts, tmp_path):
    (tmp_path / "file").write_text("a file, no folder")
    data = texts(cache=str(tmp_path / "file" / "cache")).build("train")
    assert bytes(data.tokens) == bytes(texts().build("train").tokens)


def test_the_default_cache_is_the_users(texts, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    texts(cache=None).build("train")
    assert len(list((tmp_path / "home/paddle_dp").glob("*.npy"))) == 1


def counted(path, cache):
    """In a process: how often it makes tokens, which takes a while; their sum, and the number of windows."""
    made, encode = [], _windows._encode

    def slowly(*arguments):
        made.append(1)
        time.sleep(0.5)
        return encode(*arguments)

    _windows._encode = slowly
    data = Config(path=path, cache=cache, length=8).build("train")
    return len(made), sum(data.tokens.tolist()), len(data)


def test_processes_that_start_together_make_the_tokens_once(texts, tmp_path):
    found = run_ranks(counted, 4, str(tmp_path / "texts"), str(tmp_path / "cache"))
    data = texts().build("train")
    assert sum(made for made, *_ in found) == 1
    assert [told for _, *told in found] == [[sum(data.tokens.tolist()), len(data)]] * 4


def test_a_tokenizer_json_is_read(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["?", "<|endoftext|>"])
    words.train([str(file) for file in Path(tmp_path / "texts/a").iterdir()], trainer)
    words.save(str(tmp_path / "tokenizer.json"))
    data = texts(tokenizer=str(tmp_path / "tokenizer.json")).build("train")
    assert data.tokenizer.vocab == words.get_vocab_size() and (np.asarray(data.tokens) == 1).sum() == len(
        data.files
    )
    assert len(data.tokens) < sum(file.stat().st_size for file in data.files)


@pytest.mark.parametrize(("file", "package"), [("t.json", "tokenizers"), ("t.model", "sentencepiece")])
def test_a_missing_package_is_named(texts, tmp_path, monkeypatch, file, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).write_text("{}")
    with pytest.raises(InstallError, match=f"pip install {package}"):
        texts(tokenizer=str(tmp_path / file)).build("train")


@pytest.mark.parametrize(
    ("settings", "split", "error", "said"),
    [
        ({"path": "nowhere"}, "train", UsageError, "dataset.path: .*nowhere does not exist"),
        ({"path": "texts/*.md"}, "train", UsageError, "holds no files"),
        ({"tokenizer": "no.json"}, "train", UsageError, r"dataset.tokenizer: .*no\.json does not exist"),
        ({"test": "nowhere"}, "test", UsageError, r"dataset\.test: .*nowhere does not exist"),
        ({"limit": Bytes(9)}, "train", UsageError, r"dataset.limit: .*text0\.txt, is larger"),
        ({"length": 1000}, "test", DataError, "the test split has .* a sample needs 1001"),
        ({"held_out": 1.0}, "train", ValueError, "held_out"),
        ({}, "val", ValueError, "split"),
    ],
)
def test_mistakes_say_what_to_do(texts, tmp_path, monkeypatch, settings, split, error, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        texts(**settings).build(split)


def lines_in(tmp_path: Path, *lines: str, name: str = "data.jsonl", **settings) -> Config:
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return Config(path=str(tmp_path / name), cache=str(tmp_path / "cache"), length=4, **settings)


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    """It was trained as it stands, with its braces, the word "text" and escaped line breaks."""
    config = lines_in(tmp_path, *(f'{{"text": "line {n}\\né", "id": {n}}}' for n in range(10)), held_out=0.2)
    train, test = (bytes(np.asarray(config.build(split).tokens, np.uint8)) for split in ("train", "test"))
    assert train == b"".join(f"line {n}\né".encode() + b"\0" for n in range(8))
    assert test == b"".join(f"line {n}\né".encode() + b"\0" for n in (8, 9))
    windows = list(config.read_file(tmp_path / "data.jsonl"))
    assert bytes(windows[0][0].astype(np.uint8)) == b"line" and len(windows) == 20
    other = lines_in(tmp_path, '{"body": "aaaa"}', '{"body": "bbbb"}', field="body", held_out=0.5)
    assert bytes(np.asarray(other.build("test").tokens, np.uint8)) == b"bbbb\0"


def test_tokens_of_a_jsonl_file_are_not_those_that_were_cached_of_its_bytes(tmp_path):
    config = lines_in(tmp_path, *['{"text": "abcdefgh", "more": "01234567"}'] * 4, held_out=0.5)
    first = np.asarray(config.build("train").tokens).tolist()
    assert np.asarray(replace(config, field="more").build("train").tokens).tolist() != first


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"text": "a"}', '{"text": '], r"data\.jsonl:2: this line is not JSON"),
        (['{"text": "a"}', "", "[1]"], r"data\.jsonl:3: this line is no JSON object"),
        (['{"prompt": "a", "b": ""}'], r"data\.jsonl:1: there is no field 'text'.*prompt, b.*dataset\.field"),
        (['{"text": [{"role": "user"}]}'], r"data\.jsonl:1: the field 'text' is list, not a text"),
    ],
)  # fmt: skip
def test_a_line_that_holds_no_document_is_named(tmp_path, lines, said):
    with pytest.raises(UsageError, match=said):
        lines_in(tmp_path, *lines).build("train")


@pytest.mark.parametrize("name", [f"data{suffix}" for suffix in (
    ".json", ".csv", ".tsv", ".arrow", ".gz", ".jsonl.gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".PDF"
)])  # fmt: skip
def test_a_container_is_refused_with_what_to_do(tmp_path, name):
    with pytest.raises(
        UsageError, match=r"its syntax would be trained as text: (write|unpack|call|take) .*data"
    ):
        lines_in(tmp_path, "a,b", name=name).build("train")


def test_a_parquet_file_needs_pyarrow(tmp_path, monkeypatch):
    """Rows and columns are in test_parquet.py."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InstallError, match=r"a\.parquet needs the package pyarrow.*'paddle_dp\[parquet\]'"):
        Config(path=str(tmp_path / "a.parquet"), cache=str(tmp_path)).build("train")


def test_a_container_is_known_by_its_first_bytes_and_in_a_folder(texts, tmp_path):
    folder = tmp_path / "texts"
    (folder / "a/packed").write_bytes(gzip.compress(b"abc"))
    with pytest.raises(UsageError, match="packed is compressed"):
        texts().build("train")
    (folder / "a/packed").write_bytes("wide".encode("utf-16-le"))
    with pytest.raises(UsageError, match="has a byte 0"):
        texts().build("train")
    (folder / "a/packed").rename(folder / "a/info.json")
    with pytest.raises(UsageError, match=r"give a glob: dataset\.path='.*texts/\*\*/\*\.txt'"):
        texts().build("train")
