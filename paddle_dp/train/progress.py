"""The position in a training: an immutable count that is replaced after every update, and that a resume starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`epoch`: complete epochs. `batch`: global batches done in the current epoch. `step`: updates done. `samples`:
    samples read in them, by all ranks together."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Progress:
        """The progress after one update from a global batch of `samples`."""
        return replace(self, batch=self.batch + 1, step=self.step + 1, samples=self.samples + samples)

    def next_epoch(self) -> Progress:
        """The progress after the last batch of an epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Progress:
        """Restores the result of `state`. Raises ValueError for other counts: it would be another training."""
        if (counts := sorted(state)) != (known := sorted(field.name for field in fields(cls))):
            raise ValueError(f"progress has {', '.join(counts)}, not {', '.join(known)}")
        return cls(**state)
