"""Splits independent branches of a model among ranks; and the data.

A layer's `branches` table lists them: each is a chain of its sublayers that begins with one of the layer's inputs. A
rank computes its local chains, receives the other chains' outputs, and runs the layer's forward with these outputs in
place of the chains. All ranks compute the same before and after the layer, so every rank has the gradient of every
branch's output, and backward only sums the gradients of the layer's inputs. Only the rank of a branch keeps its
weights; a weight shared by branches of several ranks is kept by all, and its gradients are summed.

`branch_trace` reads and tries the tables, `branched_model` gives each branch a rank and changes a model in place,
`branch_exchange` sends its tensors, and `forecast` assigns branches before there are ranks.

In a step, for n ranks of a group, a rank sends (n−1)·O for the outputs O of its branches, 2(n−1)/n·I for the inputs I
of their layers that have a gradient, and 2(m−1)/m·Ψ of gradients for the weights Ψ that branches of several ranks
share, m: all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.exchange import axes_gradients
from paddle_dp.plan.layout import Blocks, Layout, RankMemory, Sent, distinct_weights, on_rank
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.units import Positive

if TYPE_CHECKING:
    from paddle import nn

    from paddle_dp.core.data_group import CommGroups
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class BranchLayout(Layout):
    """The tensor ranks have branches of layers, and no slices.

    `outputs`: bytes that the branches of each of these ranks give in one step, for all samples of a dp_rank; empty: not
    measured. `inputs`: bytes of their layers' inputs that have a gradient.
    """

    outputs: tuple[float, ...] = ()
    inputs: float = 0.0

    def called(self, axis: str) -> str:
        return "branches" if axis == "tensor" else axis

    @property
    def unequal_ranks(self) -> range:
        return range(self.degrees.tensor)

    def transfers(self, blocks: Blocks, memory: RankMemory) -> list[Sent]:
        """Outputs to every other rank; all-reduces of input and weight gradients."""
        tp_rank, ranks, every = memory.coords["tensor"], self.degrees.tensor, self.degrees.ranks
        weights = distinct_weights(on_rank(blocks, tp_rank), range(len(blocks)))
        local = [weight for weight in weights if len(weight.at) < 2]
        shared = sum(weight.size for weight in weights if len(weight.at) > 1 and not weight.frozen)
        size = 2 * (every - 1) / every * shared * self.widths.gradient
        transfers = [
            *axes_gradients(blocks, self, memory, local, 1),
            Sent(axis="branches", payload="gradients", bytes=size, when="last backward"),
        ]
        if self.outputs:
            out = self.outputs[tp_rank]
            transfers += [
                Sent(
                    axis="branches", payload="activations", bytes=(ranks - 1) * out,
                    received=sum(self.outputs) - out, when="every forward", hides=False,
                ),
                Sent(
                    axis="branches", payload="activations", bytes=2 * (ranks - 1) / ranks * self.inputs,
                    when="every backward", hides=False,
                ),
            ]  # fmt: skip
        return [each for each in transfers if each.bytes]


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    """The `branches` tables of the model's layers name the branches (docs/parallelism.md). Ranks that split the
    branches read the same samples; messages and layouts call their axis tensor."""

    over: Positive = 2
    """Ranks among which the branches of each layer are dealt."""

    data: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; `auto`: all ranks divided by `over`."""

    sync_batch_norm: bool = True
    """BatchNorm over the samples of all data ranks, as on one process. `false`: over each rank's own."""

    def layout(self, ranks: int) -> Layout:
        data = max(ranks // self.over, 1) if self.data == "auto" else self.data
        degrees = Degrees(data=data, tensor=self.over)
        return BranchLayout(degrees=degrees, recompute=self.recompute)

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError unless `over` × `data` are the ranks, and the model has branches for `over` of them."""
        from paddle_dp.checks.preflight import built_without_memory, preflight_check
        from paddle_dp.strategies.branches.branch_trace import chains_of, tables_of
        from paddle_dp.strategies.branches.branched_model import too_few

        if self.recompute.blocks or str(self.recompute) != "none":
            raise UsageError("strategy branches runs each branch once: set strategy.recompute=none.")
        model = built_without_memory(recipe.build_model)
        tables = {} if model is None else tables_of(model)
        if model is not None and not tables:
            raise UsageError(
                f"strategy.branches: model {recipe.model.name} has no layer with a `branches` table. Give it one in "
                "the recipe, model.branches: {pattern of layers: [[layer, …], …]} (docs/parallelism.md)."
            )
        branches = [len(chains_of(layer)) for layer in tables.values()]
        if branches and max(branches) < self.over:
            raise UsageError(too_few(branches, self.over))
        self._check(ranks)
        preflight_check(recipe, self.layout(ranks), model)

    def assigned(self, recipe: Recipe, layout: Layout, blocks: Blocks, width: int) -> tuple[Layout, Blocks]:
        from paddle_dp.strategies.branches.forecast import planned_branches

        assert isinstance(layout, BranchLayout)
        plan = planned_branches(recipe, self.over)
        size = width * -(-recipe.train.batch // layout.degrees.dp_size)
        outputs = tuple(numbers * size for numbers in plan.outputs)
        blocks = [[replace(weight, at=plan.at.get(weight.name, ())) for weight in block] for block in blocks]
        return replace(layout, outputs=outputs, inputs=plan.inputs * size), blocks

    def rank_layers(self, recipe: Recipe, memory: RankMemory) -> list[nn.Layer]:
        from paddle_dp.strategies.branches.forecast import rank_model

        return [rank_model(recipe, self.over, memory.coords["tensor"])]

    def _check(self, ranks: int) -> None:
        degrees = self.layout(ranks).degrees
        if degrees.ranks == ranks:
            return
        if self.data == "auto":
            least = -(-ranks // self.over) * self.over
            raise UsageError(
                f"strategy.over={self.over} deals each layer's branches to {self.over} ranks, and this job has "
                f"{ranks}: start it with --ranks {least}, or another multiple of {self.over}, or set strategy.over."
            )
        raise UsageError(
            f"strategy.over={self.over} × strategy.data={self.data} are {degrees.ranks} ranks, and this job has "
            f"{ranks}: start it with --ranks {degrees.ranks}, or leave strategy.data out."
        )

    def build(self, mesh: Mesh) -> Branches:
        """Prepares Paddle's groups on CPUs; on accelerators it changes nothing. Collective."""
        from paddle_dp.gloo import install

        self._check(mesh.ranks)
        if mesh.ranks > 1:
            install(mesh.device)
        return Branches(self, replace(mesh, degrees=self.layout(mesh.ranks).degrees))


@dataclass(frozen=True)
class Branches:
    """Places a model: each branch on one rank of its group, all other layers on every rank."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """Returns a learner for this rank's branches and all other layers. Collective. Raises UsageError for a table
        that contradicts the model."""
        from paddle_dp.axes.axes_exchange import gathered_samples
        from paddle_dp.core.batch_norm import RunningStatistics, synchronize
        from paddle_dp.core.buffers import Buffers
        from paddle_dp.core.data_group import PaddleGroup
        from paddle_dp.core.optimizer import take_clips
        from paddle_dp.core.placement import Placements
        from paddle_dp.core.split_models import mark_split
        from paddle_dp.learner import full_model_learner, prepare
        from paddle_dp.learner.update import PlacedNorm
        from paddle_dp.strategies.branches.branch_exchange import BranchExchange
        from paddle_dp.strategies.branches.branched_model import branch_gradient_exchange, branched

        axes, me = self.mesh.axes, self.mesh.rank
        if self.mesh.ranks == 1:
            return full_model_learner(task, self.mesh)
        mark_split(task.model)
        group, data = PaddleGroup.create(axes, me, "tensor"), PaddleGroup.create(axes, me, "data")
        if axes.data > 1 and self.config.sync_batch_norm:
            synchronize(task.model, data)
        placements = Placements()
        wires = BranchExchange(group, self._lanes())
        branched_model = branched(task.model, task.samples, wires, placements, compare=not task.compared)
        every = PaddleGroup(range(self.mesh.ranks), me, None)
        if branched_model.shared and self.mesh.device != "cpu":
            every = PaddleGroup.create(axes, me, "data", "tensor")
        prepared = prepare(task, self.mesh)
        clips = take_clips(prepared.optimizer)
        placed = prepared.placed(placements=placements, rank_local_layers=branched_model.layers)
        groups = (data.group,) if len(data.ranks) > 1 else ()
        learner = prepared.learner(
            placed,
            exchange=branch_gradient_exchange(placed, branched_model, data, every),
            norm=PlacedNorm(placed, clips),
            statistics=RunningStatistics(prepared.model, self.mesh, data.sum_tensor),
            buffers=Buffers(placed.named_buffers, self.mesh, groups),
            gathered=gathered_samples,
        )
        learner.check_placed()
        return learner

    def _lanes(self) -> CommGroups | None:
        """Creates groups for the outputs of each rank's branches, on accelerators. Collective."""
        from paddle_dp.core.data_group import CommGroups

        if self.mesh.device == "cpu" or self.mesh.axes.tensor == 1:
            return None
        return CommGroups.make(self.mesh.axes.groups("tensor"), self.mesh.rank)
