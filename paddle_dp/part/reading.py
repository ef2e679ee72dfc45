"""Who reads a data set: the key `reading` beside its own settings, whatever data set it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

READING = "reading"
Readers = Literal["each", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The key beside a data set's own settings."""

    reading: Readers = "each"
    """`each`: every rank reads its own samples. `scatter`: rank 0 reads all and sends each rank its own, for data that
    only one machine can see ([parallelism.md](parallelism.md#who-reads-the-data))."""
