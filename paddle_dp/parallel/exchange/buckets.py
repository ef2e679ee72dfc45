"""Which gradients travel together on an accelerator: arithmetic, without processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

SMALLEST, LARGEST = 1 << 18, 25 << 20  # bytes of a bucket
# A bucket is this part of all gradients, between those bounds: the link is idle until the first one is full, nothing
# hides the last one, and what layers exchange, for which compute waits, may wait for one.
MIN_BUCKETS = 32


@dataclass(frozen=True)
class BucketSizes:
    """Bytes from which on a bucket is full; `last`: of the one that backward fills last, where that is another size."""

    most: int
    last: int = 0


ONE_BUCKET = BucketSizes(1 << 62)  # one bucket of all
BUCKET_PER_GRADIENT = BucketSizes(1)  # one for each gradient


@dataclass(frozen=True)
class Bucket:
    """The `indices` of gradients in a flat tensor, from `starts` on (in elements), `size` elements in all; their
    `kind`: what they have in common, such as owner and dtype."""

    kind: Hashable
    indices: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def called(number: int, size: int, last: int | None = None) -> str:
    """A bucket of `size` bytes on a timeline: «bucket 0, 25.2 MB»; several, up to the `last`: «bucket 1–2, 8.5 MB»."""
    return f"bucket {number}{'' if last in (None, number) else f'–{last}'}, {size / 1e6:.3g} MB"


def fill(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    width: int,
    owners: int = 1,
    requested: BucketSizes | None = None,
) -> list[Bucket]:
    """The buckets of gradients of these `sizes`, in elements of `width` bytes, in the order in which they are complete
    when backward computes the last gradient first; each of one kind. `requested`: the buckets' sizes; without, they
    follow from that of all gradients.

    A bucket is full once it has reached its size, so that no gradient waits for a later one that fits. It is a function
    of the model and the layout alone: the bits of a fused all-reduce depend on where in it a gradient lies.
    """
    cap = min(max(width * sum(sizes) // MIN_BUCKETS // owners, SMALLEST), LARGEST)
    cap = cap if requested is None else requested.most
    last = _last(sizes, width, requested.last) if requested is not None and requested.last else 0
    filling: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for index in reversed(range(len(sizes))):
        if index == last - 1:
            full += _in_order(filling)
            filling = {}
        bucket = filling.setdefault(kinds[index], [])
        bucket.append(index)
        if width * sum(sizes[index] for index in bucket) >= cap:
            full.append(filling.pop(kinds[index]))
    full += _in_order(filling)
    buckets = []
    for indices in full:
        starts = [sum(sizes[index] for index in indices[:count]) for count in range(len(indices))]
        size = sum(sizes[index] for index in indices)
        buckets.append(Bucket(kinds[indices[0]], tuple(indices), tuple(starts), size))
    return buckets


def _in_order(filling: Mapping[Hashable, list[int]]) -> list[list[int]]:
    """Buckets that are not full, in the order in which backward ends with them."""
    return sorted(filling.values(), key=lambda bucket: -bucket[-1])


def _last(sizes: Sequence[int], width: int, most: int) -> int:
    """How many gradients, from the first layer on, fill a bucket of `most` bytes."""
    for count in range(len(sizes)):
        if width * sum(sizes[:count]) >= most:
            return count
    return len(sizes)
