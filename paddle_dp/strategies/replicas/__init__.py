"""Copies of the model in one process, each with a part of the batch, like torch's nn.DataParallel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Blocks, Layout, RankMemory
from paddle_dp.strategies._base import StrategyConfig

if TYPE_CHECKING:
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class CopiesLayout(Layout):
    """`count` copies of the whole model are in each process; with `separate_devices` each on an accelerator, if any."""

    count: int
    separate_devices: bool

    @property
    def devices(self) -> int:
        return self.count if self.separate_devices and self.accelerator else 1

    @property
    def state_label(self) -> str:
        return f"its {self.count} copies: " if self.devices == 1 else "the first copy's device: "

    def memory(self, blocks: Blocks, rank: int) -> RankMemory:
        """Of the first device: weights and gradients of each copy there, and optimizer states once."""
        memory, times = super().memory(blocks, rank), self.count // self.devices
        state = memory.state
        parameters, gradients = times * state.parameters, times * state.gradients
        return replace(memory, state=replace(state, parameters=parameters, gradients=gradients))


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    """Scatters each micro-batch, copies the weights, gathers the outputs, and sums the gradients on the first copy. On
    accelerators each copy computes on a separate one. On a CPU they compute one after another, which costs memory and
    saves no time (docs/parallelism.md)."""

    count: Annotated[int, Ge(2)] = 2
    """Copies of the model."""

    devices: Literal["each", "one"] = "each"
    """On accelerators: `each` copy computes on a separate one, or all on `one`, one after another."""

    def layout(self, ranks: int) -> CopiesLayout:
        return CopiesLayout(
            degrees=Degrees(data=ranks), recompute=self.recompute, count=self.count,
            separate_devices=self.devices == "each",
        )  # fmt: skip

    @property
    def batch_chunks(self) -> int:
        return self.count

    @property
    def single_process(self) -> bool:
        return True

    @property
    def accelerators(self) -> int:
        return self.count if self.devices == "each" else 1

    @property
    def with_fewer(self) -> str:
        if self.accelerators == 1:
            return super().with_fewer
        return (
            f"strategy replicas computes each of its {self.count} copies on a separate one: set strategy.count lower, "
            "or strategy.devices=one, which lets all copies compute on one"
        )

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError for more than one rank, and for weights of 16 bits."""
        _check(ranks)
        if recipe.train.precision.level == "O2":
            raise UsageError(
                "strategy replicas copies weights that are as the optimizer has them: set train.precision to a level "
                "O1 (bfloat16), or to float32."
            )
        super().refuse(recipe, ranks, device)

    def build(self, mesh: Mesh) -> Replicas:
        from paddle_dp.mesh.device import devices_of

        _check(mesh.ranks)
        devices = [mesh.device] * self.count
        if mesh.device != "cpu" and self.devices == "each":
            there = devices_of(mesh.device)
            if len(there) < self.count:
                raise UsageError(f"This process has {', '.join(there)}, and {self.with_fewer}.")
            devices = there[: self.count]
        return Replicas(self, mesh, tuple(devices))


def _check(ranks: int) -> None:
    if ranks > 1:
        raise UsageError(
            f"strategy replicas is one process with copies of the model, and this job has {ranks}: start it with "
            "--ranks 1, or choose strategy.use=data_parallel."
        )


@dataclass(frozen=True)
class Replicas:
    """Places a model and its copies in this process, each on its device."""

    config: Config
    mesh: Mesh
    devices: tuple[str, ...]

    def place(self, task: Task) -> Learner:
        """Returns a learner of the model and its copies. Raises UsageError for a model that cannot be copied."""
        from paddle_dp.learner import prepare
        from paddle_dp.learner.runner import BatchRunner
        from paddle_dp.model.recompute import recomputed
        from paddle_dp.strategies.replicas.replicas import (
            CopiedWeights,
            Copies,
            CopiesCheck,
            CopiesExchange,
            copied,
        )

        replicas = copied(task.model, self.devices[1:])
        for model in (task.model, *replicas):
            recomputed(model, self.config.recompute)
        prepared = prepare(task, self.mesh)
        for model, device in zip(replicas, self.devices[1:], strict=True):
            prepared.prepare_copy(model, device)
        copies = Copies(prepared.model, replicas, self.devices)
        return prepared.learner(
            exchange=CopiesExchange(copies),
            weights=partial(CopiedWeights, copies=copies),
            runner=partial(BatchRunner, copies=len(self.devices)),
            parallel_model=copies.replicated,
            batch_norm_check=partial(CopiesCheck, copies),
        )
