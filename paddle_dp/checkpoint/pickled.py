"""Reads weights from pickle files without running code: Paddle's `.pdparams` and PyTorch's `.bin`, `.pt` and `.pth`.

`paddle_dp.unpickle` reads the pickle and calls only the functions listed here. The numbers stay in the file; each rank
reads its slices. PyTorch writes a zip archive with one uncompressed file for the pickle and one per storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html). Its formats before 1.6 are refused.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.checkpoint.shards import DTYPES, Dims
from paddle_dp.checkpoint.tensors import box_at
from paddle_dp.errors import CheckpointError
from paddle_dp.unpickle import ARRAYS, SCALARS, Function, Lying, PickleMachine, PickleName, expect

_MOST = 1_000_000  # tensors and values of one file
_SERIAL = 0x1950A86A20F9469CFC6C  # the first of the pickles that PyTorch wrote from 0.1.10 to 1.5
_TAR, _TAR_AT = b"ustar", 257  # before, it wrote a tar archive
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
# In Paddle's pickles uint16 stands for bfloat16.
_NUMPY = {np.dtype(code).str: name for name, (_, code) in DTYPES.items() if name != "uint16"}


@dataclass(frozen=True)
class Storage:
    """A flat array of `size` numbers, of which tensors are views."""

    dtype: str
    key: str
    size: int


@dataclass(frozen=True)
class View:
    """A tensor as a view of a storage; `offset` and `strides` count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """A tensor in a file, at the byte `start`; `strides` count numbers. `array`: its content, if it was read."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    start: int = 0
    array: np.ndarray | None = None


class PickledFile:
    """The tensors of one pickle file; nested dicts give names with dots.

    Raises CheckpointError for a file that is damaged, calls functions that weights do not need, or cannot be read.
    """

    def __init__(self, path: Path):
        self.folder = path
        self.from_torch: bool | None
        try:
            with path.open("rb") as file:
                self.from_torch, tensors = _read(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        except Exception as error:  # a damaged pickle may raise anything
            hint = " A file of weights holds tensors only: save its state_dict, or take a .safetensors file."
            wants_more = isinstance(error, ValueError) and str(error).startswith(("it asks for", "it uses"))
            reason = f"{error or type(error).__name__}.{hint if wants_more else ''}"
            raise CheckpointError(f"{path} is not read: {reason}") from error
        self._numbers = tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._numbers))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._numbers[name].shape

    def dtype(self, name: str) -> str:
        return self._numbers[name].dtype

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        tensor = self._numbers[name]
        box = box_at(self, name, offset, shape)
        if tensor.array is not None:
            return tensor.array[box.slices].copy()
        kind = np.dtype(DTYPES[tensor.dtype][1])
        if not box.size:
            return np.empty(box.shape, kind)
        first = sum(a * step for a, step in zip(box.offset, tensor.strides, strict=True))
        count = 1 + sum((n - 1) * step for n, step in zip(box.shape, tensor.strides, strict=True))
        flat = np.fromfile(self.folder, kind, count, offset=tensor.start + first * kind.itemsize)
        if flat.size != count:
            raise OSError(f"{self.folder} ends too early")
        strides = [step * kind.itemsize for step in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat, box.shape, strides).copy()


def _read(file: BinaryIO) -> tuple[bool, dict[str, Numbers]]:
    """Returns (True if PyTorch wrote the file, its tensors by name)."""
    head = file.read(_TAR_AT + len(_TAR))
    if head.startswith(b"PK\x03\x04"):
        return True, _read_zip(file)
    if head[_TAR_AT:] != _TAR:
        file.seek(0)
        loaded = _machine(leave=True).run(file)
        if type(loaded) is not int or loaded != _SERIAL:
            return False, _paddle_tensors(loaded)
    raise ValueError(
        "it has a format from before PyTorch 1.6: load it with torch, and save it again with torch.save"
    )


def _machine(leave: bool = False, persistent: Any = None) -> PickleMachine:
    """The unpickling machine for weights: containers may be nested; `_flat` limits the number of values."""
    functions = {**ARRAYS, **_CONTAINERS, **_TORCH}
    return PickleMachine(functions, nested=True, most=20 * _MOST, persistent=persistent, leave=leave)


def _paddle_tensors(loaded: Any) -> dict[str, Numbers]:
    tensors = {}
    for name, value in _flat(loaded):
        if isinstance(value, Lying):
            steps = _contiguous(value.shape[::-1])[::-1] if value.is_fortran else _contiguous(value.shape)
            tensors[name] = Numbers(_dtype(value.dtype), value.shape, steps, value.start)
        elif isinstance(value, np.ndarray):
            tensors[name] = Numbers(_dtype(value.dtype), value.shape, array=value)
    return _joined(tensors, loaded)


def _joined(tensors: dict[str, Numbers], loaded: Any) -> dict[str, Numbers]:
    """Joins the tensors that Paddle has split, because old pickles hold 4 GiB at most."""
    layouts = loaded.get("UnpackBigParamInfor@@", {}) if isinstance(loaded, dict) else {}
    for name, layout in expect(dict, layouts).items():
        arrays = [tensors.pop(key).array for key in expect(list, layout["slices"])]
        if any(array is None for array in arrays):
            raise ValueError(f"{name} is in parts that this version does not know")
        joined = np.concatenate([array for array in arrays if array is not None]).reshape(
            layout["OriginShape"]
        )
        tensors[name] = Numbers(_dtype(joined.dtype), joined.shape, array=joined)
    return tensors


def _read_zip(file: BinaryIO) -> dict[str, Numbers]:
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        inside = [name for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(inside) != 1:
            raise ValueError("it is a zip archive, and not one that torch.save writes")
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
            raise ValueError("it is compressed, which torch.save does not do: unpack it, or save it again")
        folder = inside[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in infos and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers have the bytes of another kind of processor (big-endian)")
        with archive.open(inside[0]) as pickled:
            loaded = _machine(persistent=_storage).run(pickled)  # type: ignore[arg-type]
        tensors = {}
        for name, view in _views(loaded):
            info = infos[f"{folder}data/{view.storage.key}"]
            width = np.dtype(DTYPES[view.storage.dtype][1]).itemsize
            if info.file_size < view.storage.size * width:
                raise ValueError(f"it describes {name} wrongly")
            begin = _begin(file, info) + view.offset * width
            tensors[name] = Numbers(view.storage.dtype, view.shape, view.strides, begin)
        return tensors


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """The offset of a member's content: after its local header, which alone states its length."""
    file.seek(info.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"it has no {info.filename} where its table says")
    name, extra = struct.unpack("<HH", header[26:30])
    begin = info.header_offset + 30 + int(name) + int(extra)
    file.seek(0, 2)
    if begin + info.file_size > file.tell():
        raise ValueError(f"{info.filename} ends too early")
    return begin


def _views(loaded: Any) -> Iterator[tuple[str, View]]:
    """Yields the tensors. Raises ValueError for one that exceeds its storage."""
    for name, value in _flat(loaded):
        if not isinstance(value, View):
            continue
        shape, strides = value.shape, value.strides
        last = value.offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        count = int(math.prod(shape))
        wrong = min((value.offset, *shape, *strides)) < 0 or count > value.storage.size
        if wrong or (count and last >= value.storage.size):
            raise ValueError(f"it describes {name} wrongly")
        yield name, value


def _flat(loaded: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values in nested dicts, and in pairs of a name and an array, with their dotted keys."""
    count, left = 0, [("", loaded)]
    while left:
        name, value = left.pop()
        count += 1
        if count > _MOST or name.count(".") > 50:
            raise ValueError("it stands for more values than any model has")
        if isinstance(value, dict):
            left += [(f"{name}.{key}".lstrip("."), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (np.ndarray, Lying)):
            yield name, value[1]
        else:
            yield name, value


def _storage(persistent_id: Any) -> Storage:
    """The storage of a pickle's persistent id."""
    tag, kind, key, _, size = expect(tuple, persistent_id)[:5]
    if tag != "storage" or expect(PickleName, kind).name.removeprefix("torch ") not in _STORAGES:
        raise ValueError(f"it holds {kind}, which this version does not know")
    return Storage(_STORAGES[kind.name.removeprefix("torch ")], str(key), expect(int, size))


def _tensor(storage: Storage, offset: int, shape: Any, strides: Any, *_: Any) -> View:
    sizes = [expect(tuple, each) for each in (shape, strides)]
    if len(sizes[0]) != len(sizes[1]):
        raise ValueError
    return View(
        expect(Storage, storage),
        expect(int, offset),
        tuple(expect(int, n) for n in sizes[0]),
        tuple(expect(int, n) for n in sizes[1]),
    )


def _parameter(view: View, *_: Any) -> View:
    return expect(View, view)


def _dict(pairs: Any = ()) -> dict[str, Any]:
    """The dict for an OrderedDict, which is created empty or, in old pickles, from a list of pairs."""
    return {str(expect(SCALARS, key)): value for key, value in pairs}


def _pair(pair: Any) -> tuple[Any, ...]:
    """The pair tuple((name, array)), as paddle.save writes a tensor within other objects."""
    return tuple(expect(tuple, pair))


def _kind(*_: Any) -> Any:
    raise ValueError


_CONTAINERS: dict[str, Function] = {
    "collections OrderedDict": _dict,
    "builtins tuple": _pair,
    "__builtin__ tuple": _pair,
}
_TORCH: dict[str, Function] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    **{f"torch {name}": _kind for name in _STORAGES},
}


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in numbers."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _dtype(kind: np.dtype[Any]) -> str:
    code = kind.str
    if code not in _NUMPY:
        raise ValueError(f"it holds numbers of NumPy's type {code}, which this version does not know")
    return _NUMPY[code]
