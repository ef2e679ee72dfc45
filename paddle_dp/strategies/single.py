"""One process holds everything: the truth that every other strategy is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh
    from paddle_dp.parallel import Learner, Task


@dataclass(frozen=True, kw_only=True)
class Config:
    def build(self, mesh: Mesh) -> Single:
        return Single(mesh)


@dataclass(frozen=True)
class Single:
    """Places a model on one rank. Raises UsageError on a mesh of several."""

    mesh: Mesh

    def place(self, task: Task) -> Learner:
        from paddle_dp.parallel import place_whole

        if self.mesh.ranks > 1:
            raise UsageError(
                f"strategy single runs on one rank, and this job has {self.mesh.ranks}. "
                "Start it with --ranks 1, or choose strategy.use=data_parallel."
            )
        return place_whole(task, self.mesh)
