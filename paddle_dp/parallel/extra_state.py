"""What a learner keeps beside its model and its optimizer, so that a resumed training goes on bit by bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import paddle


@dataclass(frozen=True, kw_only=True)
class ExtraState:
    """Tensors by name: `shared`, the same on all ranks, and this rank's `local`."""

    shared: Mapping[str, paddle.Tensor] = field(default_factory=dict)
    local: Mapping[str, paddle.Tensor] = field(default_factory=dict)


class SavedExtraState(Protocol):
    """The same in a checkpoint. `local` is empty where that was saved on another number of ranks."""

    @property
    def shared(self) -> Collection[str]: ...

    @property
    def local(self) -> Collection[str]: ...

    def shared_into(self, name: str, tensor: paddle.Tensor) -> None:
        """Writes a shared one into a tensor of its shape."""

    def local_into(self, name: str, tensor: paddle.Tensor) -> None: ...

    def sum_into(self, name: str, tensor: paddle.Tensor) -> bool:
        """The sum of what all ranks saved as their own, whatever their number was; False where there is none."""
