"""Checkpoints with something changed in them, and their checksums made to fit again: as a careless tool, or somebody
who means harm, would leave them.

    python -m tests.checkpoint.fuzz FIRST COUNT        # a line of JSON: the worst time, the peak of memory, the errors

A number is one mutation, always the same.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import Checkpoint, Snapshot, TensorShard, json_codec, load, merge, newest, save
from paddle_dp.checkpoint.disk import digest_of
from paddle_dp.checkpoint.manifest import MANIFEST, _crc
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh

ODD: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 7, 2**31, 10**9, 10**18, -(10**18), 2**64, 1.5, 1e308, "", "x", "..",
    "../x", "a" * 3000,
    "model/w", "float32", "bfloat16", "state.json", "rank-00000.json", [], {}, [[]], [1, 2], [-1, 4], [10**9, 10**9],
    [0] * 40, {"$float": "nan"}, {"$float": "spam"}, {"$float": None}, {"a": 1}, {"progress": {}},
]  # fmt: skip
TEXTS = [
    b"", b"{", b"[" * 100_000, b"null", b"[]", b"0", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"9" * 10_000,
    b"{}" * 9, b"NaN", b'{"a":1,"a":2}', b"[" + b"[]," * 300_000 + b"[]]", b'{"$float": 7}',
]  # fmt: skip


def make(folder: Path) -> Path:
    """A checkpoint of one rank with all that there can be in one, as a training saves it."""
    progress = {"epoch": 1, "batch": 2, "step": 7, "samples": 56}
    state = {
        "format": 1, "progress": progress, "schedule": {"last_lr": 0.1, "last_epoch": 7}, "loss_scale": None,
        "data": {"samples": 64, "batch": 8, "seed": 0}, "ranks": 1, "axes": {"data": 1},
        "recipe": None, "identity": {"facts": {"model": "mlp", "package paddle_dp": "1"}, "data": {}},
    }  # fmt: skip
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    shards = [
        TensorShard("model/w", (6, 4), (0, 0), whole[:2]),
        TensorShard("model/w", (6, 4), (2, 0), whole[2:]),
        TensorShard.full("model/b", np.arange(4, dtype=np.uint16), "bfloat16"),
        TensorShard.full("model/n", np.asarray(3, np.int64)),
        TensorShard.full("optimizer/w/moment1", whole * 2),
    ]
    own = {"rng": {"paddle": {}, "numpy": {"keys": "00", "position": 0}, "python": [3, "00", None]}}
    return save(Snapshot(tensors=dict(enumerate(shards)), state=state, rank_state=own), folder, Mesh.alone())


def refit(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest with the checksums of what is there."""
    for name, entry in manifest.get("files", {}).items() if isinstance(manifest.get("files"), dict) else ():
        path = folder / name
        if isinstance(entry, dict) and path.is_file() and not path.is_symlink():
            digest = digest_of(path)
            entry |= {"size": digest.size, "crc32": digest.crc32}
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("crc32", None)
    try:
        crc = _crc(json_codec.decode(json.dumps(manifest).encode()))
    except (TypeError, ValueError):
        crc = 0
    (folder / MANIFEST).write_text(json.dumps({**manifest, "crc32": crc}))


def mutated(value: Any, draw: random.Random) -> Any:
    """`value`, a tree of JSON, with one thing changed somewhere in it."""
    places: list[tuple[Any, Any]] = []

    def walk(tree: Any) -> None:
        for key, below in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            places.append((tree, key))
            if isinstance(below, dict | list):
                walk(below)

    walk(value)
    tree, key = draw.choice(places)
    how = draw.random()
    if how < 0.15:
        del tree[key]
    elif how < 0.3 and isinstance(tree, dict):
        tree[draw.choice(["x", "model/w@0,0", "../../etc/passwd", "rank-99999.json", ""])] = tree.pop(key)
    elif how < 0.4:
        other, place = draw.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            tree[key] = json.loads(json.dumps(other[place]))
    else:
        tree[key] = draw.choice(ODD)
    return value


def _json_file(name: str) -> Callable[[Path, random.Random, dict[str, Any]], None]:
    def change(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
        path = folder / name
        if draw.random() < 0.25:
            path.write_bytes(draw.choice(TEXTS))
        else:
            path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))

    return change


def _header(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
    path = folder / "rank-00000.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if draw.random() < 0.25:
        text = draw.choice(TEXTS)
    else:
        text = json.dumps(mutated(json.loads(content[8 : 8 + length]), draw)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _bytes(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
    path = folder / draw.choice(sorted(manifest["files"]))
    content = bytearray(path.read_bytes())
    how = draw.randrange(4)
    if how == 0:
        content = content[: draw.randrange(len(content))]
    elif how == 1:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == 2:
        content += bytes(draw.randrange(100))
    else:
        content[:8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(content)]))
    path.write_bytes(content)


def _manifest(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
    if draw.random() < 0.2:
        manifest["ranks"] = draw.choice([10**9, 10**18, 2, 0, -1])
    else:
        mutated(manifest, draw)
    write_manifest(folder, manifest)


def _raw_manifest(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST).write_bytes(draw.choice(TEXTS))


def _kind_of_file(folder: Path, draw: random.Random, manifest: dict[str, Any]) -> None:
    path = folder / draw.choice([*sorted(manifest["files"]), MANIFEST])
    path.unlink()
    how = draw.randrange(5)
    if how == 0:
        path.mkdir()
    elif how == 1:
        path.symlink_to("/etc/passwd")
    elif how == 2:
        os.mkfifo(path)
    elif how == 3:
        path.symlink_to("/dev/zero")


CHANGES: list[tuple[int, Callable[[Path, random.Random, dict[str, Any]], None], bool]] = [
    (6, _json_file("rank-00000.json"), True),
    (4, _json_file("state.json"), True),
    (6, _header, True),
    (3, _bytes, True),
    (4, _manifest, False),
    (1, _raw_manifest, False),
    (1, _kind_of_file, False),
]


def use(folder: Path) -> None:
    """What is done with a checkpoint by those who did not make it."""
    try:
        opened = load(folder)
    finally:
        newest(folder.parent)
    read(opened)
    merge(folder, folder.parent / "merged.safetensors")


def read(opened: Checkpoint) -> None:
    opened.rank_state(0)
    opened.first_nan()
    for name in opened.names:
        opened.read(name)
    opened.digests()


def one(number: int, original: Path, restore: Callable[[Checkpoint], object] | None = None) -> str | None:
    """Does mutation `number`, and uses the checkpoint. Returns the message of the error, or None if there was none.

    Raises what should not have been raised: anything but CheckpointError.
    """
    draw = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        folder = Path(place) / original.name
        shutil.copytree(original, folder)
        manifest = json.loads((folder / MANIFEST).read_text())
        weights = [weight for weight, *_ in CHANGES]
        ((_, change, refits),) = draw.choices(CHANGES, weights)
        change(folder, draw, manifest)
        if refits:
            refit(folder, manifest)
        try:
            use(folder)
            if restore is not None:
                restore(load(folder))
        except CheckpointError as error:
            return str(error)
    return None


def main(first: int, count: int) -> None:
    found, slowest = [], (0.0, -1)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        original = make(Path(place))
        for number in range(first, first + count):
            began = time.perf_counter()
            try:
                found.append(one(number, original))
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                found.append(f"RAW {number}: {type(error).__name__}: {error}")
            slowest = max(slowest, (time.perf_counter() - began, number))
    raw = [text for text in found if text is not None and text.startswith("RAW")]
    # Not of getrusage, which begins with the peak of the process that started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    refused = sum(text is not None for text in found)
    print(json.dumps({"raw": raw, "refused": refused, "slowest": slowest, "peak": peak}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
