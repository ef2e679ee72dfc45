"""Tensors that a checkpoint holds in addition to model and optimizer, so that a resume is bit-equal."""

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
    """An ExtraState in a checkpoint. `local` is empty if another number of ranks has saved it."""

    @property
    def shared(self) -> Collection[str]: ...

    @property
    def local(self) -> Collection[str]: ...

    def shared_into(self, name: str, tensor: paddle.Tensor) -> None:
        """Writes a shared tensor into `tensor`, of the same shape."""

    def local_into(self, name: str, tensor: paddle.Tensor) -> None: ...

    def sum_into(self, name: str, tensor: paddle.Tensor) -> bool:
        """Writes the sum of all ranks' local tensors, for any number of ranks; False if there is none."""
