"""Presents a source's weights under a model's names, where the source renames, transposes or splits them.

The model describes each tensor's origin as plain data (`names_of` in `checkpoint.other_names`):

| description                            | origin                                                                  |
|----------------------------------------|-------------------------------------------------------------------------|
| `"a.weight"`                           | that tensor                                                             |
| `"a.weight.T"`                         | the same, transposed: PyTorch's Linear is [outputs, inputs]             |
| `"a.weight[0]"`                        | the same, without its first dim, which is 1                             |
| `(("q.weight.T", "k.weight.T", "v.weight.T"), 16)` | the three joined along the last dim, head by head of width 16: [q, k, v] of one head together |
| `(("qkv.weight",), 16)`                | likewise, if one tensor has all of q, then all of k, then all of v      |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_dp.checkpoint.tensors import WeightSource
from paddle_dp.errors import UsageError

NameSpec = str | tuple[tuple[str, ...], int]
Names = Mapping[str, NameSpec]


@dataclass(frozen=True)
class Piece:
    """A tensor of a source, and how to transform it."""

    name: str
    transposed: bool = False
    first: bool = False  # drops the first dim, of length 1

    @staticmethod
    def parse(spec: str) -> Piece:
        if spec.endswith(".T"):
            return Piece(spec.removesuffix(".T"), transposed=True)
        return Piece(spec.removesuffix("[0]"), first=spec.endswith("[0]"))

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shape = source.shape(self.name)
        if self.first and shape[:1] != (1,):
            return shape  # a misfit, which the caller reports
        return shape[::-1] if self.transposed else shape[1:] if self.first else shape

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.transposed:
            return np.ascontiguousarray(source.read(self.name, offset[::-1], shape[::-1]).T)
        if self.first:
            return source.read(self.name, (0, *offset), (1, *shape))[0]
        return source.read(self.name, offset, shape)

    def written(self, array: np.ndarray) -> np.ndarray:
        """Converts the model's whole tensor to the source's form."""
        return np.ascontiguousarray(array.T) if self.transposed else array[None] if self.first else array


@dataclass(frozen=True)
class Origin:
    """The pieces of a model's tensor. With `head_width`, q, k and v are joined head by head."""

    pieces: tuple[Piece, ...]
    head_width: int | None = None

    @staticmethod
    def parse(spec: NameSpec) -> Origin:
        if isinstance(spec, str):
            return Origin((Piece.parse(spec),))
        names, head_width = spec
        if len(names) not in (1, 3):
            raise UsageError(
                f"names_of of the model joins {len(names)} tensors, {' + '.join(names)}: with a head width it names "
                "three (q, k and v), or one with all of them."
            )
        return Origin(tuple(map(Piece.parse, names)), head_width)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shapes = [piece.shape(source) for piece in self.pieces]
        if len(shapes) == 1 or len(set(shapes)) > 1:  # unequal shapes do not fit; the caller reports them
            return shapes[0]
        return (*shapes[0][:-1], 3 * shapes[0][-1])

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.head_width is None:
            return self.pieces[0].read(source, offset, shape)
        width, (*above, start), (*sizes, columns) = self.head_width, offset, shape
        # The heads that the box overlaps.
        heads = range(start // (3 * width), -(-(start + columns) // (3 * width)))
        third = self.shape(source)[-1] // 3
        each = self.pieces if len(self.pieces) == 3 else self.pieces * 3
        shifts = (0, 0, 0) if len(self.pieces) == 3 else (0, third, 2 * third)
        arrays = [
            piece.read(source, (*above, heads.start * width + shift), (*sizes, len(heads) * width))
            for piece, shift in zip(each, shifts, strict=True)
        ]
        joined = np.stack([array.reshape(*sizes, len(heads), width) for array in arrays], axis=-2)
        at = start - heads.start * 3 * width
        return np.ascontiguousarray(joined.reshape(*sizes, -1)[..., at : at + columns])

    def written(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Converts the model's whole tensor to the source's tensors, by name."""
        if self.head_width is None:
            return {self.pieces[0].name: self.pieces[0].written(array)}
        above = array.shape[:-1]
        split = array.reshape(*above, -1, 3, self.head_width)
        arrays = [split[..., number, :].reshape(*above, -1) for number in range(3)]
        if len(self.pieces) == 1:
            arrays = [np.concatenate(arrays, axis=-1)]
        return {
            piece.name: piece.written(np.ascontiguousarray(joined))
            for piece, joined in zip(self.pieces, arrays, strict=True)
        }


class Translated:
    """`source` under a model's names. Tensors that no complete origin uses keep their names.

    `passed_over`: names of the source that the model does not use.
    """

    def __init__(self, source: WeightSource, origins: Mapping[str, Origin], passed_over: Sequence[str] = ()):
        self._source, self.folder, self.passed_over = source, source.folder, tuple(passed_over)
        there = set(source.names)
        self._origins = {name: o for name, o in origins.items() if there.issuperset(o.names)}
        used = {name for origin in self._origins.values() for name in origin.names}
        for name in sorted(there - used - set(passed_over)):
            self._origins.setdefault(name, Origin((Piece(name),)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._origins))

    def called(self, name: str) -> str:
        """A tensor's names in the source, joined by « + »."""
        inner = self._source.called if isinstance(self._source, Translated) else str
        return " + ".join(map(inner, self._origins[name].names))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._origins[name].shape(self._source)

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._origins[name].names[0])

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        full_shape = self.shape(name)
        start = tuple(offset or (0,) * len(full_shape))
        size = tuple(full_shape if shape is None else shape)
        return self._origins[name].read(self._source, start, size)


def origins_of(names: Names) -> dict[str, Origin]:
    """Parses the table that a model gives."""
    return {name: Origin.parse(spec) for name, spec in names.items()}
