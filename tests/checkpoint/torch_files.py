"""Files as torch.save writes them, without torch: arrays as tensors, in a zip archive."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

KINDS = {
    "<f4": "FloatStorage", "<f8": "DoubleStorage", "<f2": "HalfStorage", "<i8": "LongStorage",
    "<u2": "BFloat16Storage",
}  # fmt: skip


@dataclass
class Tensor:
    """A view of `storage`, given in numbers; by default all of it, as it is shaped."""

    storage: np.ndarray
    offset: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    def __reduce__(self) -> Any:
        shape = self.storage.shape if self.shape is None else self.shape
        strides = tuple(n // self.storage.itemsize for n in self.storage.strides)
        strides = strides if self.strides is None else self.strides
        function = sys.modules["torch._utils"]._rebuild_tensor_v2
        return function, (Stored(self.storage), self.offset, shape, strides, False, OrderedDict())


@dataclass
class Stored:
    numbers: np.ndarray


class Pickler(pickle.Pickler):
    def __init__(self, file: Any):
        super().__init__(file, 2)
        self.storages: list[np.ndarray] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Stored):
            return None
        known = [number for number, one in enumerate(self.storages) if one is obj.numbers]
        number = known[0] if known else len(self.storages)
        self.storages += [] if known else [obj.numbers]
        kind = getattr(sys.modules["torch"], KINDS[obj.numbers.dtype.str])
        return "storage", kind, str(number), "cpu", obj.numbers.size


@contextmanager
def torch_pretended() -> Iterator[None]:
    """Modules that a pickle can name, where torch is not installed, and where it is not imported."""
    torch, inside = ModuleType("torch"), ModuleType("torch._utils")
    for name in KINDS.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2() -> None: ...

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    inside._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    kept = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules.update({"torch": torch, "torch._utils": inside})
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def save(content: Any, path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    """As torch.save does."""
    text = io.BytesIO()
    with torch_pretended():
        pickler = Pickler(text)
        pickler.dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        archive.writestr("archive/byteorder", "little")
        for number, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", np.ascontiguousarray(storage).tobytes())
        archive.writestr("archive/version", "3\n")
    return path
