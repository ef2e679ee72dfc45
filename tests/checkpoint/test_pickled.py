"""Weights in pickle files: what paddle.save and torch.save write, and nothing that would run code."""

from __future__ import annotations

import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.checkpoint import pickled
from paddle_dp.checkpoint.pickled import PickledFile
from paddle_dp.errors import CheckpointError
from tests.checkpoint.torch_files import Tensor, save

DRAW = np.random.default_rng(0)
LARGE = DRAW.normal(size=(60, 40)).astype("float32")  # more bytes than are read at once
SMALL = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_paddle_saves_is_read(tmp_path: Path, protocol: int) -> None:
    layer = paddle.nn.Linear(60, 40)
    half = layer.bias.astype("bfloat16")
    state = {**layer.state_dict(), "half": half, "inner": {"step": 3, "mean": layer.weight}}
    paddle.save(layer.state_dict(), str(tmp_path / "plain.pdparams"), protocol=protocol)
    paddle.save(state, str(tmp_path / "w.pdparams"), protocol=protocol)
    plain, file = PickledFile(tmp_path / "plain.pdparams"), PickledFile(tmp_path / "w.pdparams")
    assert plain.names == ("bias", "weight") and file.names == ("bias", "half", "inner.mean", "weight")
    assert file.from_torch is False and file.dtype("half") == "bfloat16" and file.shape("weight") == (60, 40)
    for read, name in ((plain, "weight"), (file, "weight"), (file, "inner.mean")):
        np.testing.assert_array_equal(read.read(name), layer.weight.numpy())
    np.testing.assert_array_equal(file.read("weight", (7, 3), (5, 20)), layer.weight.numpy()[7:12, 3:23])
    np.testing.assert_array_equal(file.read("half"), half.numpy())


@pytest.mark.parametrize("size", [6, 60_000])
def test_numbers_of_every_dtype_are_read(tmp_path: Path, size: int) -> None:
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    state = {name: paddle.arange(size).astype(name) for name in dtypes}
    paddle.save(state, str(tmp_path / "w.pdparams"))
    file = PickledFile(tmp_path / "w.pdparams")
    for name, tensor in state.items():
        assert file.dtype(name) == name
        np.testing.assert_array_equal(file.read(name, (3,), (2,)), tensor.numpy()[3:5])


def test_a_slice_is_read_from_the_file_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "w.pdparams").open("wb") as opened:
        pickle.dump({"w": LARGE, "columns": np.asfortranarray(LARGE)}, opened, 4)
    file, read = PickledFile(tmp_path / "w.pdparams"), []
    original = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *a, **k: read.append(a[2]) or original(*a, **k))
    np.testing.assert_array_equal(file.read("w", (10, 0), (2, 40)), LARGE[10:12])
    np.testing.assert_array_equal(file.read("columns", (0, 10), (60, 2)), LARGE[:, 10:12])
    assert read == [80, 120]


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    flat = LARGE.reshape(-1)
    content = OrderedDict(
        w=Tensor(LARGE), turned=Tensor(LARGE, 0, (40, 60), (1, 40)), part=Tensor(LARGE, 45, (3, 2), (40, 1)),
        count=Tensor(np.array(7, "int64")), half=Tensor(SMALL.astype("float16")),
        bf16=Tensor((SMALL.view("uint32") >> 16).astype("uint16")), epoch=3, inner={"w": Tensor(SMALL)},
    )  # fmt: skip
    file = PickledFile(save(content, tmp_path / "w.bin"))
    assert file.from_torch is True
    assert file.names == ("bf16", "count", "half", "inner.w", "part", "turned", "w")
    np.testing.assert_array_equal(file.read("w"), LARGE)
    np.testing.assert_array_equal(file.read("turned"), LARGE.T)
    np.testing.assert_array_equal(file.read("turned", (2, 50), (3, 4)), LARGE.T[2:5, 50:54])
    np.testing.assert_array_equal(file.read("part"), [flat[45:47], flat[85:87], flat[125:127]])
    np.testing.assert_array_equal(file.read("inner.w"), SMALL)
    assert (file.dtype("half"), file.dtype("bf16"), file.read("count")[()]) == ("float16", "bfloat16", 7)
    widened = (file.read("bf16").astype("uint32") << 16).view("float32")
    np.testing.assert_array_equal(widened, SMALL)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never-written-by-a-pickle",)


@pytest.mark.parametrize("where", ["top", "value", "argument"])
def test_what_would_run_code_is_refused_with_what_it_asks_for(tmp_path: Path, where: str) -> None:
    content = {"top": Evil(), "value": {"w": Tensor(SMALL), "x": Evil()}, "argument": [Tensor(SMALL, Evil())]}  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"w\.pt is not read: it asks for (posix|os)\.system, which"):
        PickledFile(save(content[where], tmp_path / "w.pt"))
    (tmp_path / "w.pdparams").write_bytes(pickle.dumps({"w": SMALL, "x": Evil()}, 4))
    with pytest.raises(CheckpointError, match=r"it asks for (posix|os)\.system"):
        PickledFile(tmp_path / "w.pdparams")


CALLS = {
    "eval": b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "a class of torch": b"\x80\x02ctorch.nn.modules.linear\nLinear\n)\x81.",
    "an instance": b"\x80\x02(ios\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
}
REFUSED = {name: (content, r"it asks for|it uses") for name, content in CALLS.items()}
REFUSED["bad keys"] = (pickle.dumps({(1, 2): 3}, 4), "a dict has keys other than numbers and texts")


@pytest.mark.parametrize("name", REFUSED)
def test_other_ways_to_call_and_other_keys_are_refused(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    (tmp_path / "w.pdparams").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        PickledFile(tmp_path / "w.pdparams")


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(5, (2,), (1,)), (0, (7,), (1,)), (0, (100,), (0,)), (-1, (2,), (1,)), (0, (2, 2), (1,)), (0, (3,), (-1,))],
)  # fmt: skip
def test_a_tensor_that_reaches_out_of_its_storage_is_refused(
    tmp_path: Path, offset: int, shape: Any, strides: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"describes w wrongly|it calls torch\._utils\._rebuild"):
        PickledFile(save({"w": Tensor(SMALL, offset, shape, strides)}, tmp_path / "w.pt"))


def test_what_is_damaged_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save({"w": Tensor(LARGE)}, tmp_path / "w.pt").read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 30):
        (tmp_path / "cut.pt").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="is not read"):
            PickledFile(tmp_path / "cut.pt")
    with pytest.raises(CheckpointError, match="it is compressed, which torch"):
        PickledFile(save({"w": Tensor(LARGE)}, tmp_path / "packed.pt", zipfile.ZIP_DEFLATED))
    with tarfile.open(tmp_path / "tar.pt", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tmp_path / "w.pt", "storages")
    (tmp_path / "serial.pt").write_bytes(
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps({"w": SMALL}, 2)
    )
    for name in ("tar.pt", "serial.pt"):
        with pytest.raises(
            CheckpointError, match=rf"{name} is not read: it has a format from before PyTorch 1\.6"
        ):
            PickledFile(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("readme", "no tensors")
    with pytest.raises(CheckpointError, match="a zip archive, and not one that"):
        PickledFile(tmp_path / "other.pt")
    deep: Any = {}
    for _ in range(40):  # stands for 2 ** 40 values
        deep = {"a": deep, "b": deep}
    (tmp_path / "deep.pdparams").write_bytes(pickle.dumps(deep, 4))
    monkeypatch.setattr(pickled, "_MOST", 1000)
    with pytest.raises(CheckpointError, match="more values than any model has"):
        PickledFile(tmp_path / "deep.pdparams")
    with pytest.raises(CheckpointError, match=r"nowhere\.pt cannot be read: No such file"):
        PickledFile(tmp_path / "nowhere.pt")
