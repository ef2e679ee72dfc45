"""Every rank holds the whole model and computes its share of each batch (paddle.DataParallel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.units import Bytes, Recompute

if TYPE_CHECKING:
    from paddle import nn

    from paddle_dp.mesh import Mesh
    from paddle_dp.parallel import Learner, Task


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    comm_buffer_size: Bytes = Bytes.parse("25 MB")
    """Gradients that are all-reduced together; on CPUs each is sent alone, as soon as it is there."""

    last_comm_buffer_size: Bytes = Bytes.parse("1 MB")
    """The same for the last gradients; smaller, so that the last exchange is short."""

    find_unused_parameters: bool = False
    """A parameter may be without a gradient on some ranks, or in some steps, as experts are that a gate chooses: what
    a rank lacks counts as zeros."""

    sync_batch_norm: bool = False
    """BatchNorm over the samples of all ranks, as on one process."""

    init: Literal["broadcast", "seed"] = "broadcast"
    """How initial weights are made equal: `broadcast` rank 0's, or draw them from one `seed` on each rank."""

    def build(self, mesh: Mesh) -> DataParallel:
        return DataParallel(self, mesh)


@dataclass(frozen=True)
class DataParallel:
    """Places a model on all ranks of the mesh. On one rank it is the plain model, without a wrapper."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """A learner with bit-equal weights on all ranks. Raises DivergenceError where they are not. Collective."""
        from paddle_dp.parallel import Learner, place_whole, prepare
        from paddle_dp.parallel.batch_norm import needs_ours, synchronize
        from paddle_dp.parallel.blocks import check_table
        from paddle_dp.parallel.consistency import check_equal
        from paddle_dp.parallel.data_parallel_learner import DataParallelLearner
        from paddle_dp.parallel.recompute import recomputed
        from paddle_dp.parallel.samplewise import mixing

        again, many = self.config.recompute, self.mesh.ranks > 1
        if again.blocks:
            check_table(task.model, task.samples, "strategy.recompute")
        if self.config.sync_batch_norm and (many or needs_ours(task.model)):
            synchronize(task.model, self.mesh)
        recomputed(task.model, again)
        if not many:
            return place_whole(task, self.mesh)
        if self.config.init == "seed":
            check_equal(task.model.named_parameters(), self.mesh, "after drawing the weights from one seed")
        prepared = prepare(task, self.mesh)
        absent = again != Recompute() or self.config.find_unused_parameters
        noticed = mixing(prepared.model, task.samples, task.dropout == "exact")
        kind: type[Learner] = Learner
        fields: dict[str, Any] = {"dp_world_size": self.mesh.ranks}  # Paddle's exchange is an average
        if absent or self.mesh.device == "cpu":
            kind, fields = DataParallelLearner, {"absent": absent}
        parallel_model = self._wrap(prepared.model)
        learner = prepared.learner(kind, parallel_model=parallel_model, noticed=noticed, **fields)
        learner.check("after the weights were made equal")
        return learner

    def _wrap(self, model: nn.Layer) -> nn.Layer:
        import paddle

        return paddle.DataParallel(
            model,
            comm_buffer_size=self.config.comm_buffer_size.megabytes,
            last_comm_buffer_size=self.config.last_comm_buffer_size.megabytes,
        )
