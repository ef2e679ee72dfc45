"""The key `reading` of any data set, which selects the reading ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

READING = "reading"
Readers = Literal["each", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The additional key of every data set."""

    reading: Readers = "each"
    """`each`: every rank reads its samples. `scatter`: rank 0 reads all samples and sends each rank its part, for data
    that only one machine can see ([parallelism.md](parallelism.md#who-reads-the-data))."""
