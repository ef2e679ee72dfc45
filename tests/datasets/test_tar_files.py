"""Images in tar files: the bytes of the folder's, an index made once, and hostile archives named by file and member."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.data import Sampler
from paddle_dp.data.fingerprint import fingerprint
from paddle_dp.datasets import _tars
from paddle_dp.datasets.image_list import Config as ImageList
from paddle_dp.datasets.tar_files import Config
from paddle_dp.errors import DataError, UsageError
from tests.house.batches import global_batches

COUNT, SIZE = 13, 16


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def root(tmp_path: Path, save_image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """13 images in files with a list, and the same in two shards; the cache is next to them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(tmp_path, save_image)
    return tmp_path


def make(folder: Path, save_image: Callable[..., Path]) -> None:
    shards: list[dict[str, bytes]] = [{}, {}]
    lines = []
    for number in range(COUNT):
        image = save_image(folder / f"{number:04}.png", colour=(number * 15, 90, 200 - number * 9))
        lines.append(f"{image.name} {number % 3}\n")
        members = shards[number // 7]
        members[f"{number:04}.png"] = image.read_bytes()
        members[f"{number:04}.cls"] = f"{number % 3}\n".encode()
        members[f"{number:04}.json"] = json.dumps({"a": {"label": number % 3}, "text": "猫"}).encode()
    for number, shard in enumerate(shards):
        tar_of(folder / f"train-{number:03}.tar", shard)
    tar_of(folder / "val-000.tar", shards[0])
    (folder / "train_list.txt").write_text("".join(lines))
    (folder / "held_out").symlink_to(folder)  # other names: an image of both lists is refused
    (folder / "val_list.txt").write_text("".join(f"held_out/{line}" for line in lines[:7]))


def config(root: Path, **settings: Any) -> Config:
    return Config(path=str(root), **{"size": SIZE, "resize": 20} | settings)


def batches(data: Any, **settings: Any) -> list[list[np.ndarray]]:
    return global_batches(data, Sampler.for_dataset(data, 5, seed=2), **settings)


@pytest.mark.processes
@pytest.mark.parametrize(("label", "workers"), [("cls", 2), ("json.a.label", 0)])
def test_samples_are_those_of_the_files_with_every_augmentation(root: Path, label: str, workers: int) -> None:
    how = {"augment": "rand", "erase": 0.5, "jitter": 0.2}
    files = ImageList(path=str(root), size=SIZE, resize=20, **how)  # type: ignore[arg-type]
    for split in ("train", "test"):
        tars = config(root, label=label, **how).build(split)
        assert tars.classes == ("0", "1", "2") and len(tars) == (COUNT if split == "train" else 7)
        for expected, read in zip(
            batches(files.build(split)), batches(tars, num_workers=workers), strict=True
        ):
            assert all(map(np.array_equal, read, expected))
    assert tars.name_of(3) == f"{root}/val-000.tar: 0003.png" and tars.file_of(3) == f"{root}/val-000.tar"


def test_the_index_is_made_once_and_again_when_a_shard_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    samples = _tars._samples
    monkeypatch.setattr(_tars, "_samples", lambda shard, *rest: made.append(shard) or samples(shard, *rest))
    for _ in range(3):
        assert len(config(root).build("train")) == COUNT
    assert [shard.name for shard in made] == ["train-000.tar", "train-001.tar"]
    shard = root / "train-001.tar"
    shutil.copy(root / "train-000.tar", shard)
    assert len(config(root).build("train")) == 14 and len(made) == 4
    os.utime(shard, ns=(1, 1))
    config(root).build("train")
    config(root, label="json.a.label").build("train")
    assert len(made) == 8
    assert not list((root / "cache").rglob("*partial*"))


def test_a_cache_that_cannot_be_written_is_no_obstacle(root: Path) -> None:
    (root / "full").write_text("")
    assert len(config(root, cache=str(root / "full")).build("train")) == COUNT


def test_an_index_that_was_cut_off_is_made_again(root: Path) -> None:
    config(root).build("train")
    (index,) = (root / "cache").rglob("*.npy")
    index.write_bytes(index.read_bytes()[:200])
    assert config(root).build("train")[COUNT - 1][1] == 0


def test_a_shard_that_changes_after_the_index_is_never_read(root: Path) -> None:
    data = config(root).build("train")
    shutil.copy(root / "train-000.tar", root / "train-001.tar")
    assert data[0][1] == 0
    with pytest.raises(DataError, match=r"train-001\.tar has changed after its index was made"):
        data[COUNT - 1]
    (root / "train-001.tar").unlink()
    with pytest.raises(DataError, match=r"train-001\.tar cannot be read: No such file"):
        data[COUNT - 1]


def test_few_files_are_open_and_none_afterwards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(
            str(root) in os.readlink(link)
            for link in links
            if link.is_symlink() and ".tar" in os.readlink(link)
        )

    monkeypatch.setattr(_tars, "_MOST_OPEN", 1)
    data = config(root).build("train")
    for index in (0, COUNT - 1, 1):
        data[index]
        assert opened() == 1
    del data
    gc.collect()
    assert opened() == 0


def test_a_byte_of_a_shard_changes_the_fingerprint_and_so_does_its_size(root: Path) -> None:
    data = config(root).build("train")
    plain = fingerprint(data, 1)
    assert any(key.startswith("flat files") for key in plain)
    with (root / "train-000.tar").open("ab") as file:
        file.write(bytes(512))
    longer = fingerprint(config(root).build("train"), 1)
    assert {key.split()[0] for key in plain if plain[key] != longer[key]} == {"flat"}


def test_an_absolute_pattern_is_one_too(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for pattern in (f"{root}/train-*.tar", f"{root}/train-{{000..001}}.tar"):
        assert len(config(elsewhere, train=pattern).build("train")) == COUNT
    odd = (root / "train-001.tar").rename(root / "train-[1].tar")  # a name that does not match itself
    assert len(config(elsewhere, train=str(odd)).build("train")) == COUNT - 7
    with pytest.raises(
        DataError, match=r"/none-\*\.tar does not exist; /.* has 0000\.png, .*Give the pattern"
    ):
        config(elsewhere, train=f"{root}/none-*.tar").build("train")


def test_ranges_keep_their_order_and_each_file_must_exist(root: Path) -> None:
    data = config(root, train="train-{000..001}.tar").build("train")
    assert len(data) == COUNT
    with pytest.raises(DataError, match=r"dataset\.train: .*train-002\.tar does not exist; .* has 0000\.png"):
        config(root, train="train-{000..002}.tar").build("train")
    with pytest.raises(DataError, match=r"dataset\.test: .*none-\*\.tar does not exist"):
        config(root, test="none-*.tar").build("test")
    with pytest.raises(
        DataError, match=r"dataset\.path is not given: give the folder that holds the tar files"
    ):
        Config().build("train")


@pytest.mark.parametrize("test", ["*-000.tar", "link.tar"])
def test_a_shard_that_is_learned_is_not_held_out(root: Path, test: str) -> None:
    (root / "link.tar").symlink_to("train-000.tar")
    with pytest.raises(
        UsageError, match=r"dataset\.test: .*\.tar is one of the files of dataset\.train, too"
    ):
        config(root, test=test).build("train")
    assert len(config(root, test=test).build("test")) >= 7  # evaluated without a training
    for other in ("none-*.tar", "train-{000..001}.tar"):  # all of them are meant
        assert len(config(root, test=other).build("train")) == COUNT


def test_names_of_classes_are_read_and_unknown_classes_refused(root: Path) -> None:
    (root / "names.txt").write_text("cat\ndog\neel\n")
    assert config(root, names="names.txt").build("train").classes == ("cat", "dog", "eel")
    tar_of(root / "val-000.tar", {"x.png": b"", "x.cls": b"7"})
    with pytest.raises(DataError, match=r"val-\*\.tar has classes that .*train-\*\.tar has no image of: 7"):
        config(root).build("test")


def built(root: Path) -> Any:
    """Of one shard."""
    return config(root, train="train-000.tar").build("train")


def test_a_damaged_image_is_named_with_its_member(root: Path) -> None:
    tar_of(root / "train-000.tar", {"a/b.png": b"no image", "a/b.cls": b"0"})
    data = built(root)
    with pytest.raises(DataError, match=r"train-000\.tar: a/b\.png cannot be read as an image"):
        data[0]


def test_samples_may_lie_in_folders_out_of_order_and_beside_hidden_files(root: Path) -> None:
    image = (root / "0001.png").read_bytes()
    members = {
        "./b/1.v2.cls": b"", "./b/1.cls": b" 2 ", "a/1.PNG": image, "._a.png": b"x", "__meta.json": b"",
        "a/1.cls": b"1", "./b/1.png": image, "./b/1.txt": b"a text",
    }  # fmt: skip
    tar_of(root / "train-000.tar", members)
    data = built(root)
    assert data.labels.tolist() == [2, 1] and data[1][0].shape == (3, SIZE, SIZE)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"a.png": b"", "b.cls": b"1"}, r"the sample a has no label, a\.cls \(dataset\.label\); it has png"),
        ({"a.cls": b"1", "a.txt": b""}, r"the sample a has no image \(jpg, .*\); it has cls, txt"),
        (
            {"a.png": b"", "a.jpg": b"", "a.cls": b"1"},
            r"no single image but jpg and png: .* dataset\.image=jpg",
        ),
        (
            {"a.png": b"", "a.cls": b"dog"},
            r"the member a\.cls is not the number of a class: ValueError: 'dog'",
        ),
        ({"a.png": b"", "a.cls": b"-1"}, "is not the number of a class"),
        ({"a.png": b"", "a.cls": b"1.5"}, "is not the number of a class"),
        ({"a.png": b"", "a.cls": b"\xff\xfe"}, "UnicodeDecodeError"),
        ({"a.png": b"", "a.cls": b"1000000"}, "is not the number of a class"),
        ({"/etc/a.png": b"", "/etc/a.cls": b"1"}, r"the member /etc/a\.png leads out of the archive"),
        ({"x/../../a.png": b""}, r"the member x/\.\./\.\./a\.png leads out of the archive"),
        ({}, "hold no sample"),
    ],
)
def test_a_sample_of_another_form_is_named(root: Path, members: dict[str, bytes], problem: str) -> None:
    shard = tar_of(root / "train-000.tar", members)
    with pytest.raises(DataError, match=problem) as error:
        config(root, train="train-*0.tar").build("train")
    assert str(shard) in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "JSONDecodeError"), (b"[1]", "TypeError"), (b"{}", "KeyError: 'a'"), (b'{"a": true}', "'True'"),
        (b'{"a": "3"}', None), (b'{"a": 3}', None), (b'{"a": 1.0}', "'1.0'"), (b"[" * 100_000, "RecursionError"),
        (b'{"a": null}', "'None'"),
    ],
)  # fmt: skip
def test_a_label_in_json_is_a_whole_number(root: Path, text: bytes, problem: str | None) -> None:
    tar_of(root / "train-000.tar", {"a.png": b"", "a.json": text})
    how = config(root, train="train-000.tar", label="json.a")
    if problem is None:
        assert how.build("train").labels.tolist() == [3]
        return
    with pytest.raises(
        DataError, match=rf"a\.json is not an object with a class number as its 'a': .*{problem}"
    ):
        how.build("train")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(root: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("a.png")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(root / "train-000.tar", "w") as archive:
        archive.addfile(info)
    with pytest.raises(
        DataError, match=r"train-000\.tar: the member a\.png is a link or another special file"
    ):
        config(root).build("train")


def test_a_name_that_occurs_twice_is_refused(root: Path) -> None:
    tar_of(root / "train-000.tar", {"a.png": b"", "a.cls": b"1"})
    with tarfile.open(root / "train-000.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo("a.PNG"))
    with pytest.raises(DataError, match=r"train-000\.tar: the member a\.PNG occurs twice"):
        config(root).build("train")


def test_every_cut_damage_and_joint_of_an_archive_is_noticed(root: Path) -> None:
    shard = root / "train-000.tar"
    tar_of(shard, {"a.png": b"x" * 700, "a.cls": b"1", "b.png": b"y" * 30, "b.cls": b"0"})
    data, end = shard.read_bytes(), 1536 + 3 * 1024
    for stop in range(0, end + 512, 100):
        shard.write_bytes(data[:stop])
        with pytest.raises(DataError, match=r"train-000\.tar"):
            built(root)
    for start in range(0, end, 512):
        if start not in (512, 1024, 2048, 3072, 4096):  # contents, and not headers
            shard.write_bytes(data[:start] + b"?" * 512 + data[start + 512 :])
            with pytest.raises(
                DataError, match=r"train-000\.tar (is damaged|cannot be read as a tar file) after its"
            ):
                built(root)
    for more in (data, b"1"):
        shard.write_bytes(data + more)
        with pytest.raises(DataError, match="has more after the end of its archive"):
            built(root)
    import gzip

    shard.write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match="unpack it: gunzip"):
        built(root)
    shard.write_bytes(data)
    assert len(built(root)) == 2


def test_a_name_may_begin_with_a_line_and_hidden_files_are_left_out(
    tmp_path: Path, save_image: Callable[..., Path]
) -> None:
    """Names of videos begin with _ as with any letter: a class of them was gone."""
    image, members = save_image(tmp_path / "a.png").read_bytes(), {}
    for stem, label in (("_vid", b"1"), ("vid", b"0"), (".vid", b"2"), ("__meta__", b"2")):
        members |= {f"{stem}.png": image, f"{stem}.cls": label}
    tar_of(tmp_path / "train-0.tar", members)
    data = config(tmp_path, cache=str(tmp_path / "cache"), train="train-0.tar").build("train")
    assert sorted(int(data[number][1]) for number in range(len(data))) == [0, 1]
