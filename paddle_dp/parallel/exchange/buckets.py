"""Which gradients travel together on an accelerator: arithmetic, without processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

SMALLEST, LARGEST = 1 << 18, 25 << 20  # bytes of a bucket
# A bucket is this part of all gradients, between those bounds: the link is idle until the first one is full, nothing
# hides the last one, and what layers exchange, for which compute waits, may wait for one.
PARTS = 32


@dataclass(frozen=True)
class Bucket:
    """The `places` of gradients in a flat tensor, from `starts` on (in elements), `size` elements in all; their `kind`:
    what they have in common, such as owner and dtype."""

    kind: Hashable
    places: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def fill(sizes: Sequence[int], kinds: Sequence[Hashable], width: int, owners: int = 1) -> list[Bucket]:
    """The buckets of gradients of these `sizes`, in elements of `width` bytes, in the order in which they are complete
    when backward computes the last gradient first; each of one kind.

    A bucket is full once it has reached its size, so that no gradient waits for a later one that fits. It is a function
    of the model and the layout alone: the bits of a fused all-reduce depend on where in it a gradient lies.
    """
    cap = min(max(width * sum(sizes) // PARTS // owners, SMALLEST), LARGEST)
    filling: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for place in reversed(range(len(sizes))):
        bucket = filling.setdefault(kinds[place], [])
        bucket.append(place)
        if width * sum(sizes[one] for one in bucket) >= cap:
            full.append(filling.pop(kinds[place]))
    full += sorted(filling.values(), key=lambda bucket: -bucket[-1])
    buckets = []
    for places in full:
        starts = [sum(sizes[one] for one in places[:count]) for count in range(len(places))]
        size = sum(sizes[one] for one in places)
        buckets.append(Bucket(kinds[places[0]], tuple(places), tuple(starts), size))
    return buckets
