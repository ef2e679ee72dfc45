"""Data and disks that fail in the middle of a training, and another user's umask (see test_deeds.py)."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.checkpoint import checkpoints
from tests.faults import deeds, nfs_like
from tests.faults.conftest import ROOT
from tests.faults.deeds import LAYOUTS, Draw, Layout, Record, Training
from tests.faults.lost import train
from tests.faults.namespaces import begin, finish
from tests.faults.wire import wired
from tests.strangers import NOBODY, needs_another_user

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]

# Data that is cut short. Each maker returns the overrides, and the files of which one will be cut.


def parquet(folder: Path) -> tuple[list[str], Callable[[], list[Path]]]:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(7)
    for name in ("train-000", "train-001", "test-000"):
        rows = draw.standard_normal((100, 64)).astype("float32")
        table = pa.table({"inputs": list(rows), "target": draw.integers(200, size=100)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=10)
    dataset = f"dataset={{use: parquet_arrays, path: {folder}, memory: 8 KB, cache: {folder / 'cache'}}}"
    return [dataset, "train.length=300 steps"], lambda: sorted(folder.glob("train-*.parquet"))


def texts(folder: Path) -> tuple[list[str], Callable[[], list[Path]]]:
    draw = np.random.default_rng(7)
    for number in range(5):
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text("".join(map(chr, draw.integers(97, 123, size=4000))))
    dataset = f"dataset={{use: text_files, path: {folder / 'texts'}, length: 64, cache: {folder / 'cache'}}}"
    model = "model={use: gpt, vocab: 257, width: 16, depth: 1, heads: 2, length: 64}"
    return [dataset, model, "loss={use: cross_entropy}", "train.length=200 steps"], lambda: [
        max((folder / "cache").glob("*.npy"), key=lambda file: file.stat().st_size)
    ]


def images(folder: Path) -> tuple[list[str], Callable[[], list[Path]]]:
    pictures = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(7)
    for split, count in (("train", 24), ("test", 4)):
        for kind in ("left", "right"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(256, size=(8, 8, 3)).astype("uint8")
                pictures.fromarray(pixels).save(folder / split / kind / f"{number}.png")
    return [
        f"dataset={{use: image_folder, path: {folder}, size: 8}}",
        "model={use: convnet, channels: 3, widths: [4], classes: 2}",
        "loss={use: cross_entropy}",
        "train.length=300 steps",
    ], lambda: sorted(folder.glob("train/*/*.png"))


TRUNCATED = {
    "a Parquet file": (parquet, 1, r"{file}"),
    "a token file": (texts, 1, r"data worker 0 .*ended by SIGBUS.*cut short"),
    "an image": (images, 1, r"{file}"),
}


@pytest.mark.parametrize("data", TRUNCATED)
def test_data_that_is_cut_short(start: Any, tmp_path: Path, noted: Any, capsys: Any, data: str) -> None:
    """The file is named; made whole again, the training goes on from its newest checkpoint."""
    make, expected, cause = TRUNCATED[data]
    (tmp_path / "data").mkdir()
    overrides, files = make(tmp_path / "data")
    length = int(re.search(r"train.length=(\d+)", " ".join(overrides))[1])
    way = Layout(overrides=tuple(overrides), steps=length)
    train(way.path, way.overrides, 2, str(tmp_path / "undisturbed"), None)
    draw = Draw(f"cut short · {data}", length, 0.5)
    (tmp_path / "temporary").mkdir()
    job = start(
        "train", recipe=str(way.path), overrides=overrides, env={"TMPDIR": str(tmp_path / "temporary")}
    )
    training = Training(job.process.pid, lambda: "")
    done = training.reach(max(draw.step, 45), 2)
    victim = draw.random.choice(files())
    content, times = victim.read_bytes(), victim.stat()
    os.truncate(victim, len(content) // 3)
    status, _, complained = job.finish(timeout=60)
    with capsys.disabled():
        print(f"\ncut short · {data}: after step {done} (drawn: {draw.step}, seed {deeds.SEED}): {status}")
    pattern = cause.replace("{file}", re.escape(victim.name))
    assert status == expected and re.search(pattern, complained), (status, pattern, complained)
    assert job.gone_within(10.0)
    victim.write_bytes(content)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    train(way.path, way.overrides, 2, str(job.out), "newest")
    left = deeds.left_behind(job.out, tmp_path / "temporary", deeds.in_shared_memory([*training.pids]))
    faults = deeds.apart(Record.of(job.out), Record.of(tmp_path / "undisturbed"), "bits", length)
    assert not left and not faults, (left, faults)
    noted("data that is cut short", data, done, status, "bits")


# Another user


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user can reach and write, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="deeds-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


# Root's home is closed to others, and Python may be installed there: in a mount namespace of its own, it alone is open.
OPEN_PYTHON = """
set -e
if [ "${1#/root/}" != "$1" ]; then
    mkdir "$2/python" && mount --bind "$1" "$2/python" && mount -t tmpfs -o mode=755 none /root
    mkdir -p "$1" && mount --bind "$2/python" "$1"
fi
shift 2
exec "$@"
"""


def as_user(umask: str, public: Path, user: int = NOBODY) -> list[str]:
    """The words before a command that another user types, with this umask."""
    identity = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    own = Path(tempfile.mkdtemp(dir=public, prefix="namespace-"))
    own.chmod(0o755)
    opened = ["unshare", "-m", "sh", "-c", OPEN_PYTHON, "sh", sys.base_prefix, str(own)]
    return [*opened, *identity, "sh", "-c", f'umask {umask}; exec "$@"', "sh"]


@needs_another_user
@pytest.mark.parametrize("umask", ["077", "000"])
def test_another_user_with_another_umask(
    start: Any, public: Path, undisturbed: Any, noted: Any, capsys: Any, umask: str
) -> None:
    """A rank is killed; all files are the user's, and nobody else can reach them."""
    way, row = LAYOUTS["data"], f"umask {umask}"
    (public / "temporary").mkdir()
    (public / "temporary").chmod(0o777)
    job = start(
        "train", recipe=str(way.path), restarts=4, before=as_user(umask, public), output_dir=str(public / "run"),
        env={"TMPDIR": str(public / "temporary"), "HOME": str(public)},
    )  # fmt: skip
    training = Training(job.process.pid, lambda: "")
    draw = Draw(row, way.length)
    done = training.reach(draw.step, 2)
    deeds.kill(training.ranks[victim := draw.rank(2)])
    status, _, complained = job.finish(timeout=60)
    with capsys.disabled():
        print(f"\n{row}: after step {done} (drawn: {draw.step}, seed {deeds.SEED}): {status}")
    assert status == 0, complained
    assert re.search(rf"attempt-001 failed: rank {victim} of 2 on \S+: ended by SIGKILL", complained)
    run = public / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert {path.stat().st_uid for path in (run, *run.rglob("*"))} == {NOBODY}
    writable = [
        path.name for path in run.rglob("*") if path.stat().st_mode & (0o077 if umask == "077" else 0o002)
    ]
    assert not writable or umask == "000", writable
    left = deeds.left_behind(run, public / "temporary", deeds.in_shared_memory([*training.pids]))
    faults = deeds.apart(Record.of(run), undisturbed(way), "bits", way.length)
    assert not left and not faults, (left, faults)
    noted("another user, kill -9 of a rank", row, done, status, "bits")


@needs_another_user
def test_the_run_of_another_user_is_refused_in_a_sentence(public: Path, noted: Any) -> None:
    """With umask 077, closed, and opened in parts by its owner: a resume and an evaluation say which file is closed."""
    way, run = LAYOUTS["data"], public / "run"
    overrides = ("train.length=60 steps",)
    previous = os.umask(0o077)
    try:
        train(way.path, (*way.overrides, *overrides), 2, str(run), None)
    finally:
        os.umask(previous)
    for path in (run, *run.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    newest = checkpoints(run / "checkpoints")[-1]
    commands = {
        "resume": ["train", str(run / "recipe.yaml"), "--ranks", "2", "--output-dir", str(run), "--resume"],
        "evaluate": ["evaluate", str(run)],
    }  # fmt: skip
    opened: list[Path] = []
    for stage in ([], [run], [run / "recipe.yaml", run / "checkpoints"], [newest]):
        for path in stage:
            path.chmod(0o755 if path.is_dir() else 0o644)
        opened += stage
        for name, words in commands.items():
            done = subprocess.run(
                [*as_user("077", public, 65533), sys.executable, "-m", "paddle_dp", *words], cwd=ROOT, timeout=60,
                capture_output=True, text=True, env={**os.environ, "HOME": str(public), "COLUMNS": "300"},
            )  # fmt: skip
            screen = done.stdout + done.stderr
            reply = (name, [*map(str, opened)], done.returncode, screen)
            assert done.returncode == 2 and "Traceback" not in screen and str(run) in screen, reply
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    noted("another user, the run of a third one", "umask 077", 60, 2, "unchanged")


# A disk like NFS

needs_fuse = pytest.mark.skipif(bool(nfs_like.why_not()), reason=nfs_like.why_not())
NFS_ROWS = [
    ("kill -9 of a rank", "data"),
    ("kill -9 of a rank", "background"),
    ("kill -9 of paddle-dp", "sharding 3"),
    ("errors of fsync for a while", "data"),
    ("errors of fsync for a while", "background"),
]


@needs_fuse
@pytest.mark.parametrize(("deed", "layout"), NFS_ROWS, ids=[f"{deed}, {layout}" for deed, layout in NFS_ROWS])
def test_a_disk_like_nfs(
    start: Any, tmp_path: Path, undisturbed: Any, noted: Any, capsys: Any, deed: str, layout: str
) -> None:
    way = LAYOUTS[layout]
    with ExitStack() as stack:
        disk, control = tmp_path / "disk", tmp_path / "control"
        stack.enter_context(nfs_like.mounted(tmp_path / "backing", disk, control))
        (tmp_path / "temporary").mkdir()
        job = start(
            "train", recipe=str(way.path), overrides=[*way.overrides], restarts=4, output_dir=str(disk / "run"),
            env={"TMPDIR": str(tmp_path / "temporary")},
        )  # fmt: skip
        training = Training(job.process.pid, lambda: "")
        draw = Draw(f"NFS · {deed}, {layout}", way.length, 0.6)
        done = training.reach(max(draw.step, deeds.PERIOD[way.recipe] + 5), 2)
        expected, cause = 0, r"attempt-001 failed: rank {} of 2 on \S+: ended by SIGKILL"
        if deed == "kill -9 of a rank":
            victim = draw.rank(2)
            deeds.kill(training.ranks[victim])
            cause = cause.format(victim)
        elif deed == "kill -9 of paddle-dp":
            expected, cause = -9, ""
            deeds.kill(job.process.pid)
        else:
            (control / "eio").touch()
            training.reach(done + 2 * deeds.PERIOD[way.recipe] + 5, 2)
            (control / "eio").unlink()
            cause = "was not saved: Input/output error"
        status, said, complained = job.finish(timeout=100)
        with capsys.disabled():
            print(
                f"\nNFS-like, {deed}, {layout}: after step {done} (drawn: {draw.step}, seed {deeds.SEED}): {status}"
            )
        assert status == expected and re.search(cause, said + complained), (status, said, complained)
        assert job.gone_within(10.0)
        if expected:
            train(way.path, way.overrides, 2, str(job.out), "newest")
        time.sleep(nfs_like.MEMORY)
        left = deeds.left_behind(job.out, tmp_path / "temporary", deeds.in_shared_memory([*training.pids]))
        faults = deeds.apart(Record.of(job.out), undisturbed(way), way.promise, way.length)
    left = [name for name in left if expected == 0 or not name.startswith("TMPDIR")]
    assert not left and not faults, (left, faults, said, complained)
    noted(f"NFS-like disk, {deed}", layout, done, status, way.promise)


NODE_ROWS = ["data", "background"]


@needs_fuse
@pytest.mark.parametrize("layout", NODE_ROWS)
def test_two_nodes_on_a_disk_like_nfs(
    tmp_path: Path, undisturbed: Any, noted: Any, capsys: Any, layout: str
) -> None:
    """Each has a mount of its own, and sees the other's files late. A rank of node 1 is killed."""
    way, folder = LAYOUTS[layout], tmp_path / "disk"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    mounts = [tmp_path / f"mount-{node}" for node in range(2)]
    with ExitStack() as stack:
        cable = stack.enter_context(wired())
        for mount in mounts:
            stack.enter_context(nfs_like.mounted(tmp_path / "backing", mount, tmp_path / "control"))
        processes = [
            begin(
                space,
                node,
                folder / "run",
                "train",
                *way.overrides,
                job={"recipe": str(way.path), "ranks": 1, "restarts": 4},
                env={"TMPDIR": str(tmp_path / "temporary")},
                before=["sh", "-c", f'mount --bind {mounts[node]} {folder} && exec "$@"', "sh"],
            )
            for node, space in enumerate(cable.spaces)
        ]
        training = Training(processes[1].pid, lambda: "")
        # Early: what node 0 sees too late of the killed rank's files goes with a save MEMORY seconds afterwards.
        draw = Draw(f"NFS · two nodes · {layout}", way.length, 0.3)
        done = training.reach(draw.step, 1)
        [pid] = training.ranks.values()
        deeds.kill(pid)
        ended = finish(processes, timeout=150)
        with capsys.disabled():
            print(
                f"\nNFS-like, two nodes · {layout}: after step {done} (drawn: {draw.step}, seed {deeds.SEED})"
            )
        assert [status for status, _, _ in ended] == [0, 0], ended
        assert all("failed: rank 1 of 2 on" in screen for _, _, screen in ended), ended
        run = tmp_path / "backing" / "run"
        left = deeds.left_behind(run, tmp_path / "temporary", set())
        faults = deeds.apart(Record.of(run), undisturbed(way), way.promise, way.length)
    assert not left and not faults, (left, faults, ended)
    noted("NFS-like disk of two nodes, kill -9 of a rank", layout, done, 0, way.promise)
