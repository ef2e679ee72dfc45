"""Parameter server: servers own the parameters; workers push gradients to them and pull the parameters.

Li et al. 2014 (OSDI). `served` has the parts of a learner for synchronous updates: owners, exchange, norm, weights.
Also there: gradients copied from an accelerator to the host, and `HostGroup`, which exchanges tensors of the workers'
layers through server 0. `async_worker` computes shares without waiting for other workers, and `async_server` adds up
their gradients. With `pulls: rows`, `rows` exchanges the rows of embedding tables that a batch reads.

For Ψ bytes of parameters, a worker sends Ψ of gradients in a step and receives Ψ of parameters; each of s servers
receives and sends n·Ψ/s for n workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Blocks, Layout, RankMemory, Sent, distinct
from paddle_dp.plan.memory import StateBytes, inbound_bytes, owned_sizes, owners
from paddle_dp.strategies._alone import compared, refuse_across, refuse_shared_decisions
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.text import amount, duration
from paddle_dp.units import Positive

if TYPE_CHECKING:
    from paddle_dp.exchange.gradient_exchange import GradientExchange
    from paddle_dp.learner import Learner, Task
    from paddle_dp.learner.task import PreparedTask
    from paddle_dp.mesh import Mesh
    from paddle_dp.plan.bound import Wire
    from paddle_dp.recipe import Recipe
    from paddle_dp.strategies.parameter_server.served import ServerOwners, ServerWeights


class ServerLayout(Layout):
    """A worker holds the whole model and its gradients. A server holds its part of the trained weights with the
    gradients' sum and the optimizer states, a copy of the frozen weights, and the received gradients."""

    @property
    def unequal_ranks(self) -> range:
        return range(self.degrees.servers + 1)

    @property
    def transient_label(self) -> str:
        return "on their way from and to the workers" if self.asynchronous else "received gradients"

    def served(self, blocks: Blocks) -> list[int]:
        """The number of trained elements that each server owns."""
        sizes, servers = distinct(blocks, range(len(blocks)), 1, frozen=False), self.degrees.servers
        return owned_sizes(sizes, owners(sizes, servers), servers)

    def memory(self, blocks: Blocks, rank: int) -> RankMemory:
        widths, every, serves = self.widths, range(len(blocks)), not self.degrees.reads(rank)
        trained, frozen = (sum(distinct(blocks, every, 1, frozen=kind)) for kind in (False, True))
        elements = self.served(blocks)[rank] if serves else trained
        received = inbound_bytes(elements, widths.gradient, self.degrees.dp_size, not self.asynchronous)
        state = StateBytes(
            parameters=float((elements + frozen) * widths.parameter), gradients=float(elements * widths.gradient),
            optimizer=float(elements * widths.optimizer * serves),
        )  # fmt: skip
        return RankMemory(
            rank=rank, coords=self.degrees.coords(rank), stages=(tuple(every),), parameters=elements + frozen,
            trained=elements, state=state, transient=received * serves,
        )  # fmt: skip

    def transfers(self, blocks: Blocks, memory: RankMemory) -> list[Sent]:
        serves = not self.degrees.reads(memory.rank)
        elements = memory.trained * (self.degrees.dp_size if serves else 1)
        pushed, pulled = float(elements * self.widths.gradient), float(elements * self.widths.parameter)
        hides = serves or not self.asynchronous  # an asynchronous worker pushes after its backward
        return [
            Sent(
                axis="servers", payload="gradients", bytes=pushed * (not serves), received=pushed * serves,
                when="last backward", hides=hides,
            ),
            Sent(
                axis="servers", payload="parameters", bytes=pulled * serves, received=pulled * (not serves),
                when="first forward", hides=False,
            ),
        ]  # fmt: skip


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
        return ServerLayout(degrees=degrees, recompute=self.recompute, asynchronous=self.mode == "async")

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

    @property
    def with_fewer(self) -> str:
        return "each worker takes one"

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
        model = built_without_memory(recipe.build_model)
        preflight_check(recipe, self.layout(ranks), model, splits=True)
        if self.pulls == "rows":
            from paddle_dp.strategies.parameter_server.rows import row_layers

            self._check_rows(device if requested == "auto" else requested)
            if model is not None:
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

    def traffic(self, layout: Layout, blocks: Blocks, wire: Wire | None) -> list[str]:
        """Lines on the traffic of each server and of a worker in a step; over a wire also the shortest step."""
        from paddle_dp.plan.bound import Compute, bound
        from paddle_dp.plan.exchange import sent

        lines, by_rows, degrees = [], self.pulls == "rows", layout.degrees
        exchanges = {rank: sent(blocks, layout, rank, 1, None) for rank in layout.unequal_ranks}
        at_most = " at most" if by_rows else ""
        for rank, transfers in exchanges.items():
            sender = "each worker" if degrees.reads(rank) else degrees.role(rank)
            out, into = (
                " and ".join(
                    f"{amount(size)} of {each.payload}" for each in transfers if (size := size_of(each))
                )
                for size_of in (lambda each: each.bytes, lambda each: each.received_bytes)
            )
            lines.append(f"a step: {sender} sends{at_most} {out} and takes{at_most} {into}")
        if by_rows:
            lines.append(
                "of a table that is pulled by rows a step moves the rows that its samples read: less than these bytes"
            )
        elif wire is not None:
            compute, speed = wire.compute or Compute.from_seconds(0.0), wire.link.bytes_per_second
            slowest = max(bound(compute, transfers, speed) for transfers in exchanges.values())
            takes = f"that computes for {duration(compute.total)} lasts" if wire.compute else "takes"
            lines.append(
                f"over {wire.link} a step {takes} {duration(slowest)} at least, for the busiest link is a server's"
            )
        return lines

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
        from paddle_dp.core.buffers import Buffers
        from paddle_dp.core.optimizer import DISTRIBUTED, check_by_parameter, take_clips
        from paddle_dp.core.placement import Placements
        from paddle_dp.learner.learner_checks import NO_REMEDY, SYNC_BATCH_NORM, BatchNormCheck
        from paddle_dp.model.initial_weights import draw
        from paddle_dp.strategies.parameter_server.async_server import AsyncServer
        from paddle_dp.strategies.parameter_server.async_worker import AsyncWorker
        from paddle_dp.strategies.parameter_server.served import (
            SamplesOfWorkers,
            ServedPlacement,
            ServerNorm,
            ServerOwners,
            ServerStatistics,
            take_drawn,
        )

        prepared, asynchronous = self._prepared(task), self.config.mode == "async"
        known_differences = check_by_parameter(prepared.optimizer, servers=self.config.servers)
        if asynchronous:
            known_differences.append(
                "updates are made from shares as they come, with parameters that may be old"
            )
        placements = Placements(ServedPlacement())
        clips = take_clips(prepared.optimizer)  # before parameters are dealt: a clip is over all of them
        deal = ServerOwners(prepared.model, prepared.optimizer, self.mesh, placements)
        DISTRIBUTED.add(prepared.optimizer)
        # Only now it is known which weights this rank stores: no other gets memory, or keeps it.
        draw(task.model, deal.stored(prepared.model))
        deal.free_remote(prepared.model)
        placed = prepared.placed(placements=placements)
        buffers = Buffers(placed.named_buffers, self.mesh)
        exchange, weights = self._exchange_and_weights(prepared, deal)
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
            if self.mesh.reads:
                learner.async_rank = AsyncWorker(learner, deal, clips)
            else:
                learner.async_rank = AsyncServer(learner, deal, self.config.staleness)
        if self.mesh.computes_on != "cpu":
            take_drawn(placed)
        learner.check_placed()
        return learner

    def _prepared(self, task: Task) -> PreparedTask:
        """Prepares the task, of which each rank has the whole model still, and checks that its optimizer's list of
        trained parameters can be dealt."""
        from paddle_dp.core.batch_norm import needs_ours, synchronize
        from paddle_dp.core.optimizer import check_ungrouped, leave_frozen_out
        from paddle_dp.core.split_models import mark_split
        from paddle_dp.learner import prepare
        from paddle_dp.learner.task import make_optimizer
        from paddle_dp.model.initial_weights import check_lendable, draw, reads_weights
        from paddle_dp.model.recompute import recomputed
        from paddle_dp.strategies.parameter_server.served import HostGroup

        if self.config.mode == "async":  # again, for scripts: `refuse` sees only a recipe's loss
            refuse_across(task.loss.compares, self.mesh.dp_size)
        check_lendable(task.model, task.samples, task.lendable)
        if self.config.mode == "async" or self.config.servers > 1 or self.config.pulls == "rows":
            mark_split(task.model)  # else every rank has all weights after an update
        synchronized = self.config.sync_batch_norm
        if (self.config.mode == "sync" if synchronized is None else synchronized) or needs_ours(task.model):
            synchronize(task.model, HostGroup(self.mesh))
        recomputed(task.model, self.config.recompute)
        if reads_weights(task.model, lambda: make_optimizer(task.optimizer, task, task.model)):
            draw(task.model)  # before the optimizer is made of them
        prepared = prepare(task, self.mesh)
        check_ungrouped(prepared.optimizer, "strategy.servers")
        leave_frozen_out(prepared.optimizer)
        return prepared

    def _exchange_and_weights(
        self, prepared: PreparedTask, deal: ServerOwners
    ) -> tuple[GradientExchange, Callable[..., ServerWeights]]:
        """The ways of gradients to the servers that own their parameters, and of new parameters back."""
        from paddle_dp.strategies.parameter_server.async_worker import AsyncServerWeights
        from paddle_dp.strategies.parameter_server.rows import PushedRows, RowTables, RowWeights
        from paddle_dp.strategies.parameter_server.served import ServerParams, ServerWeights, server_exchange

        params = ServerParams(self.mesh, deal.parameters, deal.owners)
        if self.config.pulls == "all":
            kind = AsyncServerWeights if self.config.mode == "async" else ServerWeights
            return server_exchange(deal, self.mesh), partial(kind, params=params)
        tables = RowTables(self.mesh, prepared.model, deal)
        weights = partial(
            RowWeights, mesh=self.mesh, deal=deal, params=params, tables=tables, rate=prepared.rate
        )
        return PushedRows(tables, deal, self.mesh), weights
