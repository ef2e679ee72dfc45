"""Parameter server: servers own the parameters; workers push gradients to them and pull the parameters.

Li et al. 2014 (OSDI). `served` has the parts of a learner for synchronous updates: owners, exchange, norm, weights.
Also there: gradients copied from an accelerator to the host, and `HostGroup`, which exchanges tensors of the workers'
layers through server 0. `async_worker` computes shares without waiting for other workers, and has the servers' side of
it. With `pulls: rows`, `rows` exchanges the rows of embedding tables that a batch reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.rank_memory import Layout
from paddle_dp.strategies._alone import compared, refuse_across, refuse_shared_decisions
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.units import Positive

if TYPE_CHECKING:
    from paddle_dp.exchange.gradient_exchange import GradientExchange
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    """The first ranks are servers, on their hosts' processors; the others are workers, on accelerators if available
    (docs/parallelism.md)."""

    servers: Positive = 1
    """Ranks that each own a part of the parameters and optimizer states; they read no samples."""

    mode: Literal["sync", "async"] = "sync"
    """`sync`: each update is one process's. `async`: no worker waits for another, or for one that died."""

    pulls: Literal["rows", "all"] = "all"
    """`rows`: of an embedding's table a worker pulls and pushes the rows that its samples read; on CPUs, in step."""

    staleness: Positive = 4
    """Global batches by which a worker may be ahead of the slowest living one, under `mode: async`."""

    sync_batch_norm: bool | None = None
    """BatchNorm over the samples of all workers, as on one process, through server 0. null: only under `mode: sync`."""

    def layout(self, ranks: int) -> Layout:
        degrees = Degrees(data=max(ranks - self.servers, 1), servers=self.servers)
        asynchronous = self.mode == "async"
        by_rows = self.pulls == "rows"
        return Layout(
            degrees=degrees, recompute=self.recompute, asynchronous=asynchronous, pulls_rows=by_rows
        )

    def __post_init__(self) -> None:
        if self.mode == "async" and self.sync_batch_norm:
            raise ValueError(
                "sync_batch_norm: true lets workers wait for one another in every BatchNorm, and mode: async does not: "
                "leave it out, or set mode to sync"
            )
        if self.mode == "async" and self.pulls == "rows":
            raise ValueError(
                "pulls: rows brings rows of one update, and workers of mode: async pull parameters as they are: set "
                "pulls to all, or mode to sync"
            )

    @property
    def may_lose_ranks(self) -> bool:
        return self.mode == "async"

    def not_promised(self, recipe: Recipe) -> str:
        if self.mode == "sync":
            return ""
        return (
            "strategy parameter_server with mode=async promises no other run's result, not even that of the same "
            "command again: which worker learns from which samples, and with how old parameters, depends on time. "
            "strategy.mode=sync is one process's training; or compare held-out numbers of whole trainings "
            "(docs/parallelism.md)."
        )

    @property
    def partitions_model(self) -> bool:
        return True

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError if there is no worker, for weights of 16 bits on accelerators, and for recipes that no
        strategy can train."""
        from paddle_dp.checks.preflight import built_without_memory, preflight_check

        self._check_workers(ranks)
        requested = recipe.train.device
        if (device if requested == "auto" else requested) != "cpu" and recipe.train.precision.level == "O2":
            raise UsageError(
                "strategy parameter_server: servers keep weights of 32 bits on their hosts, and level O2 lets workers' "
                "accelerators keep those of 16: set train.precision to float32 or, as level O1, bfloat16 or float16."
            )
        if recipe.guard.recompute is not None:
            raise UsageError(
                "guard.recompute compares ranks that compute the same samples, and a server has no model to compute "
                "with: leave guard.recompute out under strategy.use=parameter_server."
            )
        if self.mode == "async":
            self._refuse_waiting(recipe)
        if recipe.dataset.reading == "scatter":
            raise UsageError(
                "dataset.reading=scatter: rank 0 would read for all, and is a server, which reads nothing: set "
                "dataset.reading=each."
            )
        if recipe.train.compile:
            raise UsageError(
                "train.compile: a program is traced and tried before servers have dealt the parameters: use "
                "data_parallel or single, or train.compile=false."
            )
        preflight_check(recipe, self.layout(ranks), splits=True)
        if self.pulls == "rows":
            from paddle_dp.strategies.parameter_server.rows import row_layers

            self._check_rows(device if requested == "auto" else requested)
            if (model := built_without_memory(recipe.build_model)) is not None:
                row_layers(model)

    def _refuse_waiting(self, recipe: Recipe) -> None:
        """Raises UsageError for settings that let workers wait for one another, or need all of them."""
        refuse_shared_decisions(recipe, "parameter_server with mode=async")
        why = ""
        if recipe.guard.non_finite is not None:
            why = "guard.non_finite lets all ranks judge each update together: leave it out"
        elif any(entry.settings.get("async") for entry in recipe.callbacks if entry.name == "checkpoint"):
            why = "a checkpoint that is written in the background waits for the files of all ranks: leave async out"
        elif compared(recipe) == "ranks":
            why = "a loss across ranks lets workers wait for one another's samples: set loss.across=rank"
        if why:
            raise UsageError(f"strategy parameter_server with mode=async: {why}, or set strategy.mode=sync.")

    def _check_rows(self, device: str) -> None:
        if self.pulls == "rows" and device != "cpu":
            raise UsageError(
                "strategy.pulls=rows is for CPUs: in each embedding's forward an accelerator would wait for its host, "
                "and the host for a server. Set strategy.pulls=all, or train.device=cpu."
            )

    def _check_workers(self, ranks: int) -> None:
        if ranks <= self.servers:
            least = self.servers + 1
            raise UsageError(
                f"strategy.servers={self.servers} leaves no worker on {ranks} rank{'s' * (ranks > 1)}, and servers "
                f"read no samples: start {least} ranks or more (--ranks {least}), or set a smaller strategy.servers."
            )

    def build(self, mesh: Mesh) -> ParameterServer:
        """Assigns this rank its role. Raises UsageError without a worker, and for a server on an accelerator."""
        from paddle_dp.mesh.heartbeat import heartbeat

        self._check_workers(mesh.ranks)
        self._check_rows(mesh.device)
        if mesh.rank < self.servers and mesh.device != "cpu":
            raise UsageError(
                f"rank {mesh.rank} is a server, which computes on its host, and it has joined with {mesh.device}: call "
                f"paddle_dp.join(servers={self.servers}) before a model is made."
            )
        workers = range(self.servers, mesh.ranks)
        expendable = frozenset(workers if self.may_lose_ranks else ())
        mesh = replace(mesh, degrees=self.layout(mesh.ranks).degrees, expendable=expendable)
        heartbeat.call(mesh.axes.role(mesh.rank))
        return ParameterServer(self, mesh)


@dataclass(frozen=True)
class ParameterServer:
    """Places a model: whole on each worker, and each parameter on one server."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """Returns a learner for this worker or server. Collective. Under mode: async raises UsageError for a loss that
        compares the samples of all workers."""
        from paddle_dp.core.batch_norm import needs_ours, synchronize
        from paddle_dp.core.buffers import Buffers
        from paddle_dp.core.optimizer import check_by_parameter, check_ungrouped, leave_frozen_out, take_clips
        from paddle_dp.core.placement import Placements
        from paddle_dp.learner import prepare
        from paddle_dp.learner.learner_checks import NO_REMEDY, SYNC_BATCH_NORM, BatchNormCheck
        from paddle_dp.learner.task import make_optimizer
        from paddle_dp.model.initial_weights import check_lendable, draw, reads_weights
        from paddle_dp.model.recompute import recomputed
        from paddle_dp.strategies.parameter_server.async_worker import AsyncServerWeights, AsyncServerWorker
        from paddle_dp.strategies.parameter_server.rows import PushedRows, RowTables, RowWeights
        from paddle_dp.strategies.parameter_server.served import (
            HostGroup,
            SamplesOfWorkers,
            ServerNorm,
            ServerOwners,
            ServerParams,
            ServerStatistics,
            ServerWeights,
            server_exchange,
            take_drawn,
        )

        if self.config.mode == "async":  # again, for scripts: `refuse` sees only a recipe's loss
            refuse_across(task.loss.compares, self.mesh.dp_size)
        check_lendable(task.model, task.samples, task.lendable)
        synchronized = self.config.sync_batch_norm
        if (self.config.mode == "sync" if synchronized is None else synchronized) or needs_ours(task.model):
            synchronize(task.model, HostGroup(self.mesh))
        recomputed(task.model, self.config.recompute)
        if reads_weights(task.model, lambda: make_optimizer(task.optimizer, task, task.model)):
            draw(task.model)
        prepared = prepare(task, self.mesh)
        check_ungrouped(prepared.optimizer, "strategy.servers")
        leave_frozen_out(prepared.optimizer)
        known_differences = check_by_parameter(prepared.optimizer, servers=self.config.servers)
        placements, clips = Placements(), take_clips(prepared.optimizer)
        deal = ServerOwners(prepared.model, prepared.optimizer, self.mesh, placements)
        draw(task.model, deal.stored(prepared.model))
        deal.free_remote(prepared.model)
        placed = prepared.placed(placements=placements)
        buffers = Buffers(placed.named_buffers, self.mesh)
        asynchronous = self.config.mode == "async"
        if asynchronous:
            known_differences.append(
                "updates are made from shares as they come, with parameters that may be old"
            )
        params = ServerParams(self.mesh, deal.parameters, deal.owners)
        weights: Callable[..., ServerWeights] = partial(
            AsyncServerWeights if asynchronous else ServerWeights, params=params
        )
        if self.config.pulls == "rows":
            tables = RowTables(self.mesh, prepared.model, deal)
            exchange: GradientExchange = PushedRows(tables, deal, self.mesh)
            weights = partial(
                RowWeights, mesh=self.mesh, deal=deal, params=params, tables=tables, rate=prepared.rate
            )
        else:
            exchange = server_exchange(deal, self.mesh)
        learner = prepared.learner(
            placed,
            exchange=exchange,
            norm=None if asynchronous else ServerNorm(placed, clips),  # workers clip by their shares' norms
            weights=weights,
            statistics=ServerStatistics(placed, buffers),
            buffers=buffers,
            gathered=lambda placed: SamplesOfWorkers(placed.mesh),
            batch_norm_check=partial(
                BatchNormCheck, self.mesh, remedy=NO_REMEDY if asynchronous else SYNC_BATCH_NORM
            ),
            known_differences=known_differences,
        )
        if asynchronous:
            learner.worker = AsyncServerWorker(learner, deal, clips, self.config.staleness)
        if self.mesh.computes_on != "cpu":
            take_drawn(placed)
        learner.check("after the weights were placed")
        return learner
