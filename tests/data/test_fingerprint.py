"""What a fingerprint of a data set notices, in how much time, and what does not disturb it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.data.fingerprint import FAULT, RANDOM, SECONDS, common, fingerprint, order
from paddle_dp.data.prepared import prepared
from paddle_dp.recipe.schema import LoaderSettings
from tests.house import datasets as house


class Points(house.Points):
    def __init__(self, samples: int = 24, draw: int = 0):
        super().__init__(samples, seed=draw, by_index=True)


class Taken(Points):
    """In memory: many are read at once."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices], indices % 4


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 4, 5, 7, 24, 1437, 10007])
def test_the_order_holds_every_sample_and_the_first_groups_are_spread(samples: int) -> None:
    groups = list(order(samples))
    read = np.concatenate([*groups, np.array([], np.int64)])
    assert set(read.tolist()) == set(range(samples))
    assert len(groups) < 40
    if samples > 1000:
        spread = np.sort(np.concatenate(groups[:12]))
        assert np.diff(spread).max() < 5 * samples / len(spread)


def test_the_order_of_very_many_samples_does_not_overflow() -> None:
    for indices in islice(order(10**12), 25):
        assert indices.min() >= 0 and indices.max() < 10**12 and len(set(indices.tolist())) == len(indices)


@pytest.mark.processes
def test_it_is_of_the_samples_wherever_they_are_read() -> None:
    found = fingerprint(Points(), 1)
    assert list(found)[:5] == ["sample 0", "sample 8", "sample 16", "sample 23", "samples 17, 10, 3, 20"]
    assert (
        found["sample 0"].startswith("inputs float32[1, 6] ") and ", targets int64[1] " in found["sample 0"]
    )
    assert fingerprint(Points(), 1, in_fork=True) == found != fingerprint(Points(draw=1), 1)
    assert list(fingerprint(Points(1), 0)) == ["sample 0"] and fingerprint(Points(0), 0) == {}


@pytest.mark.parametrize("kind", [Points, Taken])
@pytest.mark.parametrize("changed", range(24))
def test_one_number_of_one_sample_of_a_small_data_set_is_noticed(
    kind: Callable[..., Points], changed: int
) -> None:
    one, other = kind(), kind()
    other.inputs[changed, 5] += 1e-6
    assert fingerprint(one, 0) != fingerprint(other, 0)


@pytest.mark.parametrize("kind", [Points, Taken])
def test_two_samples_that_changed_places_are_noticed(kind: Callable[..., Points]) -> None:
    one, other = kind(), kind()
    other.inputs[[3, 20]] = other.inputs[[20, 3]]  # of one group
    assert fingerprint(one, 0) != fingerprint(other, 0)


@pytest.mark.processes
def test_other_programs_on_the_processor_leave_no_sample_of_a_small_data_set_out() -> None:
    """Six of them make each sample take seven times as long; a replaced sample at the end went unnoticed."""

    class Slow(Points):
        def __getitem__(self, i: int) -> Any:
            end = time.thread_time() + 0.0003
            while time.thread_time() < end:
                pass
            return super().__getitem__(i)

    allowed = os.sched_getaffinity(0)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        for pid in (0, *(process.pid for process in others)):
            os.sched_setaffinity(pid, {min(allowed)})
        time.sleep(0.2)  # all of them run by then, or soon
        texts = fingerprint(Slow(100), seed=0)
    finally:
        os.sched_setaffinity(0, allowed)
        for process in others:
            process.kill()
            process.wait()
    assert len(texts) == len(list(order(100)))


def test_a_stall_of_the_process_leaves_no_sample_of_a_small_data_set_out() -> None:
    """As on a busy machine: with fewer samples, one that was replaced would not be noticed."""

    class Stalls(Points):
        def __getitem__(self, index: int) -> Any:
            if index == 99 and not self.stalled:
                self.stalled = True
                time.sleep(6 * SECONDS)
            return super().__getitem__(index)

        stalled = False

    assert len(fingerprint(Stalls(100), 0)) == len(list(order(100)))


def test_a_slow_data_set_takes_its_time_and_no_more_and_has_the_same_text_under_fewer_keys() -> None:
    class Slow(Points):
        def __getitem__(self, i: int) -> Any:
            time.sleep(0.004)
            return super().__getitem__(i)

    began = time.perf_counter()
    slow = fingerprint(Slow(5000), 0, seconds=0.2)
    assert time.perf_counter() - began < 5  # 20 s without the limit
    quick = fingerprint(Points(5000), 0, seconds=5)
    assert 4 <= len(slow) < len(quick) and common(slow, quick) == list(slow) and slow.items() <= quick.items()
    assert len(fingerprint(Slow(5000), 0, seconds=0)) == 4


@pytest.mark.processes
def test_a_sample_that_cannot_be_read_says_so_and_is_not_compared() -> None:
    class Broken(Points):
        def __getitem__(self, i: int) -> Any:
            if i:
                os._exit(3) if os.getpid() != me else None
            raise OSError(f"no file {i}")

    me = os.getpid()
    found = fingerprint(Broken(), 0)
    assert "cannot be read: sample 0: OSError: no file 0" in found["sample 0"]
    assert common(found, fingerprint(Points(), 0)) == []
    assert "exit status 3" in fingerprint(Broken(), 0, in_fork=True)["samples"]


@pytest.mark.processes
def test_a_sample_that_nobody_seeds_is_told_wherever_it_is_read() -> None:
    class Own(Points):
        """A generator that begins alike in every process, and goes on with every reading."""

        def __getitem__(self, i: int) -> Any:
            self.draw = getattr(self, "draw", np.random.default_rng(0))
            return self.inputs[i] + self.draw.normal(), i % 4

    class Seeded(Points):
        def __getitem__(self, i: int) -> Any:
            return self.inputs[i] + np.random.randn(), i % 4

    assert fingerprint(Own(), 0) == fingerprint(Own(), 0, in_fork=True) == {"sample 0": RANDOM}
    found = fingerprint(Seeded(), 0)
    assert RANDOM not in found.values() and len(found) > 4
    assert found == fingerprint(Seeded(), 0, in_fork=True) != fingerprint(Seeded(), 1)


class Reused(Points):
    """Each sample is written into one array, which is given every time."""

    memory = np.zeros(6, "float32")

    def __getitem__(self, index: int) -> Any:
        self.memory[:] = self.inputs[index]
        return self.memory, index % 4


class ReusedRows(Taken):
    memory = np.zeros([24, 6], "float32")

    def take(self, indices: Any) -> Any:
        self.memory[: len(indices)] = self.inputs[indices]
        return self.memory[: len(indices)], indices % 4


class Centred(Taken):
    """The rows of a `take` are centred together."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices] - self.inputs[indices].mean(0), indices % 4


class Rounded(Taken):
    """The last digits of a row depend on the number of rows, as those of a product may."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices] * np.float32(1 + 1e-7 * len(indices)), indices % 4


class Padded(Taken):
    """Sample i is i % 5 + 1 long, and rows are as long as the longest."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices, : (indices % 5).max() + 1], indices % 4


class Drawn(Taken):
    """A `take` that draws numbers of a generator of its own."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices] + RANDOMLY.standard_normal([len(indices), 6]), indices % 4


class Augmented(Taken):
    """Half of its samples are flipped, and an inherited `take` knows nothing of it."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs[::-1] if np.random.random() < 0.5 else inputs, target


class OtherTypes(Taken):
    """One by one the numbers have other types than those of `take`."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs.astype("float64"), np.float32(target)


class Untaken(Augmented):
    take = None  # type: ignore[assignment]


RANDOMLY = np.random.default_rng(0)


def joined(samples: list[Any]) -> Any:
    return np.stack([array for array, _ in samples]), np.array([target for _, target in samples])


def collating(kind: Callable[[], Points], collate: Any) -> Callable[[], Any]:
    return lambda: prepared(kind(), LoaderSettings(collate=collate), joined)


@pytest.mark.parametrize("by_workers", [False, pytest.param(True, marks=pytest.mark.processes)])
@pytest.mark.parametrize(
    ("kind", "fault", "fault_of_workers"),
    [
        (Points, "", ""), (Taken, "", ""), (Rounded, "", ""), (Drawn, "", ""), (ReusedRows, "", ""),
        (Augmented, "take = None", "take = None"), (Untaken, "", ""), (OtherTypes, "", ""),
        (Reused, "return a copy", ""),
        (collating(Points, "batch"), "", ""), (collating(Reused, "samples"), "", ""),
        (collating(Reused, "batch"), "return a copy", "return a copy"),
        (Centred, "depends on the other indices", "depends on the other indices"),
        (Padded, "set loader.pad", "set loader.pad"),
    ],
)  # fmt: skip
def test_samples_that_other_reads_change_are_a_fault(
    kind: Callable[[], Any], fault: str, fault_of_workers: str, by_workers: bool
) -> None:
    """Where they are kept: workers copy each sample before they read the next, but for a collate_fn of batches."""
    told, expected = fingerprint(kind(), 0, by_workers), fault_of_workers if by_workers else fault
    assert expected in told.get(FAULT, "") and (FAULT in told) == bool(expected)
    assert (RANDOM in told.values()) == (kind is Drawn)


def test_reading_leaves_the_generators_as_they_were() -> None:
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    fingerprint(Points(), 0)
    assert np.random.rand() == expected


class Files(Points):
    """Files, of which only names and sizes are compared here."""

    def __init__(self, folder: Path, samples: int = 200):
        super().__init__(samples)
        self.files = [folder / f"class_{n % 3}" / f"{n}.bin" for n in range(samples)]
        for file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(9))

    def name_of(self, i: int) -> str:
        return str(self.files[i])


def names(files: Files) -> dict[str, str]:
    return {key: text for key, text in fingerprint(files, 0, seconds=4).items() if key.startswith("file")}


def test_of_files_names_and_sizes_are_looked_at(tmp_path: Path) -> None:
    one, copied = Files(tmp_path / "one"), Files(tmp_path / "copy")
    told = names(one)
    assert len(told) > 10 and names(copied) == told
    copied.files[123].write_bytes(bytes(10))
    assert len(told.items() ^ names(copied).items()) == 2
    copied.files[123].unlink()
    assert any("cannot be read" in text for text in names(copied).values())


class FlatFiles(Files):
    """All files lie in one folder, which is the data set's."""

    def __init__(self, folder: Path, samples: int = 200):
        Points.__init__(self, samples)
        self.files = [folder / f"{n}.bin" for n in range(samples)]
        folder.mkdir()
        for file in self.files:
            file.write_bytes(bytes(9))


def test_the_folder_of_flat_files_may_have_another_name(tmp_path: Path) -> None:
    """Each file's folder was compared: a copy under another name was other data."""
    one, copied = FlatFiles(tmp_path / "imagenet"), FlatFiles(tmp_path / "in1k")
    read = fingerprint(one, 0, seconds=4)
    flat = {key: text for key, text in read.items() if key.startswith("flat file")}
    assert len(flat) > 10 and names(one) == {} and fingerprint(copied, 0, seconds=4) == read
    copied.files[123].rename(copied.files[123].with_name("other.bin"))
    copied.files[123] = copied.files[123].with_name("other.bin")
    assert len(read.items() ^ fingerprint(copied, 0, seconds=4).items()) == 2


def test_names_in_several_folders_are_as_checkpoints_have_them(tmp_path: Path) -> None:
    crcs = {f"file {n}": zlib.crc32(f"class_{n % 3}/{n}.bin 9".encode()) for n in range(4)}
    told = names(Files(tmp_path, 4))
    assert {key: told[key] for key in crcs} == {key: f"{crc:08x}" for key, crc in crcs.items()}


def test_names_that_are_no_files_are_no_obstacle() -> None:
    class Named(Points):
        def name_of(self, i: int) -> str:
            return f"row {i}"

    found = fingerprint(Named(), 0)
    assert common(found, found) == list(fingerprint(Points(), 0))
