"""The table of pieces: which box of which tensor lies under which key of which rank's file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.manifest import pieces_name
from paddle_dp.checkpoint.pieces import DTYPES, Box, Piece, assemble, whole
from paddle_dp.errors import CheckpointError


@dataclass(frozen=True)
class Row:
    """One saved piece."""

    rank: int
    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


def table_of(pieces: Iterable[Piece]) -> tuple[dict[str, Piece], dict[str, Any]]:
    """A rank's pieces by their key in its file, and the same as JSON. A whole tensor's key is its name."""
    keyed = {}
    for piece in pieces:
        is_whole = piece.box == whole(piece.shape)
        key = piece.name if is_whole else f"{piece.name}@{','.join(map(str, piece.offset))}"
        if key in keyed:
            raise CheckpointError(f"two pieces of {piece.name} {piece.box} on one rank")
        keyed[key] = piece
    return keyed, {key: _json(piece) for key, piece in keyed.items()}


def _json(piece: Piece) -> dict[str, Any]:
    offset, size = list(piece.offset), list(piece.array.shape)
    return {
        "name": piece.name,
        "dtype": piece.dtype,
        "shape": list(piece.shape),
        "offset": offset,
        "size": size,
    }


def read_table(folder: Path, rank: int) -> list[Row]:
    """The pieces that a rank saved. Raises ValueError, KeyError or TypeError where the file says nonsense."""
    content = json_codec.decode((folder / pieces_name(rank)).read_bytes())["pieces"]
    return [_row(rank, key, value) for key, value in content.items()]


def _row(rank: int, key: str, value: dict[str, Any]) -> Row:
    shape, offset, size = (tuple(map(int, value[word])) for word in ("shape", "offset", "size"))
    if not len(shape) == len(offset) == len(size) or min((*shape, *offset, *size), default=0) < 0:
        raise ValueError(f"{key} has an impossible piece")
    if value["dtype"] not in DTYPES:
        raise ValueError(f"{key} is of an unknown dtype {value['dtype']}")
    return Row(rank, key, str(value["name"]), value["dtype"], shape, Box(offset, size))


def by_name(tables: Iterable[Iterable[Row]]) -> dict[str, list[Row]]:
    """All ranks' pieces of each tensor."""
    names: dict[str, list[Row]] = {}
    for row in (row for table in tables for row in table):
        names.setdefault(row.name, []).append(row)
    return names


def check_whole(tables: Iterable[Iterable[Row]]) -> dict[str, list[Row]]:
    """The pieces by tensor; CheckpointError where ranks disagree about one, or where no rank holds a part of it."""
    names = by_name(tables)
    for name, rows in names.items():
        first = rows[0]
        for row in rows:
            if (row.shape, row.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{name} is {first.dtype} {first.shape} on rank {first.rank}, {row.dtype} {row.shape} "
                    f"on rank {row.rank}"
                )
        _, missing = assemble(whole(first.shape), [row.box for row in rows])
        if missing:
            raise CheckpointError(f"no rank holds {name}{missing[0]} of {first.shape}")
    return names
