"""What a model remembers besides its parameters and BatchNorm's statistics: the same on all ranks, and rank 0's.

A buffer that forward updates from its samples (a moving centre, a codebook's counts, a queue) goes apart, because each
rank sees other samples. An average would be of no meaning for most of them, and taking it when a checkpoint is written
would make what is learned depend on when that is. So every rank goes on with the values of the first one after each
update, as with torch's `broadcast_buffers`: what is saved, evaluated and resumed is what everybody computes with. It is
not what one process learns, whose buffers see all samples: `differences` says so.

A buffer that depends on the weights alone (spectral norm's vectors, weight norm's product) is the same on all ranks by
itself; nothing is sent for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.mesh import Mesh
from paddle_dp.parallel.consistency import digests

Named = list[tuple[str, paddle.Tensor]]


class Buffers:
    """The buffers of a model that go apart over the ranks, and their meeting.

    `named` gives this rank's buffers of now under their whole-model names: a forward may put another tensor in one's
    place. `groups` are those of the ranks that hold the same ones, None for all ranks; the first of each counts.
    """

    def __init__(self, named: Callable[[], Named], mesh: Mesh, groups: Sequence[Any] = (None,)):
        self._named, self._mesh, self._groups = named, mesh, groups
        self._updates, self._any = 0, mesh.ranks > 1
        self._apart: list[str] = []

    def sync(self) -> None:
        """After an update: gives all ranks the first one's values of those that go apart. Collective.

        Which do is looked up after the updates 1, 2, 4, 8, …: at moments that no checkpoint and no evaluation moves.
        """
        if not self._any:
            return
        self._updates += 1
        if self._updates & (self._updates - 1) == 0:
            self._look()
        if self._apart:
            held = dict(self._named())
            for name in self._apart:
                if name in held:
                    self._share(held[name])

    def differences(self) -> list[str]:
        """What one process would hold other values in: a sentence, or nothing. On every rank alike."""
        if not self._apart:
            return []
        more = len(self._apart) - 1
        who = f"buffer {self._apart[0]}" + (f" and {more} more are" if more else " is")
        return [
            f"{who} updated by forward from each rank's own samples, and all ranks go on with the first one's; "
            "one process updates from all samples"
        ]

    def _look(self) -> None:
        named = self._named()
        found = digests(tensor for _, tensor in named)
        told = self._mesh.gather([[name, *sums] for (name, _), sums in zip(named, found, strict=True)])
        self._any = any(told)
        first: dict[str, list[int]] = {}
        for name, *sums in (row for rows in told for row in rows):
            if first.setdefault(name, sums) != sums and name not in self._apart:
                self._apart.append(name)

    @paddle.no_grad()
    def _share(self, tensor: paddle.Tensor) -> None:
        """Sends the bits: gloo does not carry every type."""
        is_bool = tensor.dtype == paddle.bool
        flat = tensor.detach().contiguous().reshape([-1])
        bits = (flat.astype("uint8") if is_bool else flat.view("uint8")).clone()
        for group in self._groups:
            dist.broadcast(bits, group.ranks[0] if group is not None else 0, group)
        tensor.set_value(
            bits.astype("bool").reshape(tensor.shape)
            if is_bool
            else bits.view(tensor.dtype).reshape(tensor.shape)
        )
