"""A source of weights under a model's own names, which has them under others, transposed, or apart.

Where a tensor is there is said by plain data, which a model gives (`names_of` in `checkpoint.other_names`):

| said                                   | is                                                                      |
|----------------------------------------|-------------------------------------------------------------------------|
| `"a.weight"`                           | that tensor                                                             |
| `"a.weight.T"`                         | the same, transposed: PyTorch's Linear is [outputs, inputs]             |
| `"a.weight[0]"`                        | the same, without its first dim, which is 1                             |
| `(("q.weight.T", "k.weight.T", "v.weight.T"), 16)` | the three joined along the last dim, head by head of width 16: [q, k, v] of one head together |
| `(("qkv.weight",), 16)`                | likewise, where one tensor has all of q, then all of k, then all of v   |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_dp.checkpoint.source import WeightSource

NameSpec = str | tuple[tuple[str, ...], int]
Names = Mapping[str, NameSpec]


@dataclass(frozen=True)
class Piece:
    """A tensor of a source, as it is to be seen."""

    name: str
    transposed: bool = False
    first: bool = False  # without its first dim

    @staticmethod
    def parse(spec: str) -> Piece:
        if spec.endswith(".T"):
            return Piece(spec.removesuffix(".T"), transposed=True)
        return Piece(spec.removesuffix("[0]"), first=spec.endswith("[0]"))

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shape = source.shape(self.name)
        if self.first and shape[:1] != (1,):
            return shape  # which does not fit, and is named so
        return shape[::-1] if self.transposed else shape[1:] if self.first else shape

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.transposed:
            return np.ascontiguousarray(source.read(self.name, offset[::-1], shape[::-1]).T)
        if self.first:
            return source.read(self.name, (0, *offset), (1, *shape))[0]
        return source.read(self.name, offset, shape)

    def written(self, array: np.ndarray) -> np.ndarray:
        """The whole tensor as the other side has it."""
        return np.ascontiguousarray(array.T) if self.transposed else array[None] if self.first else array


@dataclass(frozen=True)
class Origin:
    """The pieces that a tensor of a model is made of; `head_width`: joined head by head."""

    pieces: tuple[Piece, ...]
    head_width: int | None = None

    @staticmethod
    def parse(spec: NameSpec) -> Origin:
        if isinstance(spec, str):
            return Origin((Piece.parse(spec),))
        names, head_width = spec
        return Origin(tuple(map(Piece.parse, names)), head_width)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shapes = [piece.shape(source) for piece in self.pieces]
        if len(shapes) == 1 or len(set(shapes)) > 1:  # unequal ones do not fit, and are named so
            return shapes[0]
        return (*shapes[0][:-1], 3 * shapes[0][-1])

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.head_width is None:
            return self.pieces[0].read(source, offset, shape)
        width, (*above, start), (*sizes, columns) = self.head_width, offset, shape
        # The heads of which at least a part is asked for.
        heads = range(start // (3 * width), -(-(start + columns) // (3 * width)))
        third = self.shape(source)[-1] // 3
        each = self.pieces if len(self.pieces) == 3 else self.pieces * 3
        shifts = (0, 0, 0) if len(self.pieces) == 3 else (0, third, 2 * third)
        arrays = [
            piece.read(source, (*above, heads.start * width + shift), (*sizes, len(heads) * width))
            for piece, shift in zip(each, shifts, strict=True)
        ]
        joined = np.stack([part.reshape(*sizes, len(heads), width) for part in arrays], axis=-2)
        at = start - heads.start * 3 * width
        return np.ascontiguousarray(joined.reshape(*sizes, -1)[..., at : at + columns])

    def written(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of the other side, from the whole tensor of the model."""
        if self.head_width is None:
            return {self.pieces[0].name: self.pieces[0].written(array)}
        above = array.shape[:-1]
        apart = array.reshape(*above, -1, 3, self.head_width)
        arrays = [apart[..., number, :].reshape(*above, -1) for number in range(3)]
        if len(self.pieces) == 1:
            arrays = [np.concatenate(arrays, axis=-1)]
        return {
            piece.name: piece.written(np.ascontiguousarray(joined))
            for piece, joined in zip(self.pieces, arrays, strict=True)
        }


class Translated:
    """`source` under a model's names: those of `origins` whose pieces are all there, and as they are what is left.

    `passed_over`: names of the source that the model has no use for.
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
        """The names that a tensor has in the source."""
        inner = self._source.called if isinstance(self._source, Translated) else str
        return " + ".join(map(inner, self._origins[name].names))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._origins[name].shape(self._source)

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._origins[name].names[0])

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        whole = self.shape(name)
        start = tuple(offset or (0,) * len(whole))
        size = tuple(whole if shape is None else shape)
        return self._origins[name].read(self._source, start, size)


def origins_of(names: Names) -> dict[str, Origin]:
    """The table that a model gives, read."""
    return {name: Origin.parse(spec) for name, spec in names.items()}
