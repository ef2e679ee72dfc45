"""Assigns gradients to buckets on an accelerator: arithmetic, without processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

SMALLEST, LARGEST = 1 << 18, 25 << 20  # bytes of a bucket
# A bucket is this fraction of all gradients, within those bounds: the link is idle until the first bucket is full, the
# last one overlaps with nothing, and a layer's exchange, for which compute waits, may queue after a bucket.
MIN_BUCKETS = 32


@dataclass(frozen=True)
class BucketSizes:
    """A bucket is full from `most` bytes on; `last`: the size of the bucket that backward fills last, 0 for `most`."""

    most: int
    last: int = 0


SINGLE_BUCKET = BucketSizes(1 << 62)
BUCKET_PER_GRADIENT = BucketSizes(1)


@dataclass(frozen=True)
class Bucket:
    """A flat tensor of `size` elements with the gradients `indices` at offsets `starts` (in elements).

    `kind`: their common property, such as owner and dtype.
    """

    kind: Hashable
    indices: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def called(number: int, size: int, last: int | None = None) -> str:
    """The timeline's name of a bucket of `size` bytes: "bucket 0, 25.2 MB"; of several, with `last`: "bucket 1–2, 8.5
    MB"."""
    return f"bucket {number}{'' if last in (None, number) else f'–{last}'}, {size / 1e6:.3g} MB"


def fill(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    width: int,
    owners: int = 1,
    requested: BucketSizes | None = None,
) -> list[Bucket]:
    """Assigns gradients of these `sizes`, in elements of `width` bytes, to buckets of one kind each.

    Returns the buckets in the order in which backward, last gradient first, completes them. `requested`: bucket sizes,
    derived from the total if None.

    A bucket is full once it has reached its size, so that no gradient waits for a later one that fits. The result
    depends on the model and the layout alone: the bits of a fused all-reduce depend on a gradient's offset in it.
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
    """Incomplete buckets, in the order in which backward completes them."""
    return sorted(filling.values(), key=lambda bucket: -bucket[-1])


def _last(sizes: Sequence[int], width: int, most: int) -> int:
    """The number of gradients, from the first layer on, that fill a bucket of `most` bytes."""
    for count in range(len(sizes)):
        if width * sum(sizes[:count]) >= most:
            return count
    return len(sizes)
