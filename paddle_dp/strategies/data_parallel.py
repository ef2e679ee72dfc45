"""Every rank holds the whole model and computes its share of each batch; gradients meet by `exchange`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import UsageError
from paddle_dp.plan.layout import Layout, Weight
from paddle_dp.plan.memory import factors, is_worthwhile
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.units import Bytes, Compress, Recompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddle import nn

    from paddle_dp.exchange.choose import ExchangeSettings
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


RESIDUAL_WIDTH = 4  # bytes of a residual's element, if weights have fewer
SENT_WIDTH = 2  # bytes of an element that is sent, without factors


@dataclass(frozen=True, kw_only=True)
class CompressedLayout(Layout):
    """Data ranks compress their gradients."""

    compress: Compress

    @property
    def extra_label(self) -> str:
        return "errors of compression"

    @property
    def sends_float32(self) -> bool:
        return False

    def gradient_share(self, weights: Sequence[Weight]) -> float:
        """Factors have the sums' dtype, at least float32."""
        width, columns = self.widths.gradient, self.compress.rank
        total = sum(weight.size * width for weight in weights)
        if not total:
            return 1.0
        if not columns:
            return min(SENT_WIDTH / width, 1.0)
        low = [weight for weight in weights if is_worthwhile(weight.shape, columns)]
        saved = sum(weight.size * width - factors(weight.shape, columns) * max(width, 4) for weight in low)
        return 1 - saved / total

    def exchange_state(self, weights: Sequence[Weight]) -> float:
        """Bytes of residuals (`plan.memory`)."""
        width, columns = max(self.widths.parameter, RESIDUAL_WIDTH), self.compress.rank
        low = [weight for weight in weights if not columns or is_worthwhile(weight.shape, columns)]
        each = 3 * width if columns else 2 * width + (2 * SENT_WIDTH if self.accelerator else 0)
        return float(each * sum(weight.size for weight in low))


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    exchange: Literal["auto", "pushed", "bucketed", "after", "per_parameter"] = "auto"
    """How ranks sum their gradients: `bucketed` all-reduces buckets that backward fills one after the other;
    `per_parameter` each gradient alone, when backward has it; `after` all at once after backward; `pushed` (CPUs only)
    sends segments of each to the ranks that add them up, while backward runs. `auto`: `pushed` on CPUs, else
    `bucketed`. On CPUs backward waits for an all-reduce; on accelerators they overlap."""

    comm_buffer_size: Bytes = Bytes.parse("25 MB")
    """Size of a bucket (exchange `bucketed`)."""

    last_comm_buffer_size: Bytes = Bytes.parse("1 MB")
    """Size of one smaller bucket. paddle.DataParallel sends it first, with the last layers' gradients; with `compress`,
    `recompute` or `find_unused_parameters` it is the last one, so that the last exchange is short."""

    compress: Compress = Compress.parse("none")
    """Compression of gradients in their exchange: `none`; `bfloat16` or `float16` numbers; or `power_sgd rank 4`, two
    factors of so many columns for each large matrix, after 10 updates with whole gradients (`power_sgd rank 4 after 100
    steps`: after 100). Each rank adds its compression error to its next gradients."""

    find_unused_parameters: bool = False
    """Whether a parameter may have no gradient on some ranks or in some steps, such as an expert that a gate chooses. A
    missing gradient counts as zeros."""

    sync_batch_norm: bool = True
    """BatchNorm over the samples of all ranks, as on one process. `false`: over each rank's own."""

    init: Literal["broadcast", "seed"] = "broadcast"
    """How initial weights become equal: `broadcast` sends rank 0's; `seed` draws them on each rank from one seed."""

    def __post_init__(self) -> None:
        if self.compress and self.exchange != "auto":
            raise ValueError(
                f"exchange: {self.exchange} is a way for whole gradients, and compressed ones (compress: "
                f"{self.compress}) have their own: leave it out"
            )

    @property
    def absent(self) -> bool:
        """Whether a rank may lack a gradient, or a backward runs forwards: Paddle's reducer supports neither."""
        return self.recompute != Recompute() or self.find_unused_parameters

    @property
    def takes_turns(self) -> bool:
        return not self.compress

    @property
    def exchange_settings(self) -> ExchangeSettings:
        """The settings by which `choose_exchange` chooses."""
        from paddle_dp.exchange.buckets import BucketSizes
        from paddle_dp.exchange.choose import ExchangeSettings

        sizes = BucketSizes(int(self.comm_buffer_size.count), int(self.last_comm_buffer_size.count))
        kind = "compressed" if self.compress else self.exchange
        return ExchangeSettings(kind=kind, sizes=sizes, compress=self.compress, absent=self.absent)

    def layout(self, ranks: int) -> Layout:
        layout = super().layout(ranks)
        if ranks == 1:
            return layout
        if self.compress:
            return CompressedLayout(
                degrees=layout.degrees, recompute=layout.recompute, compress=self.compress
            )
        ours = self.absent and self.exchange in ("auto", "bucketed")
        exchange, bucket = "" if ours else self.exchange, self.comm_buffer_size.count
        return replace(layout, exchange=exchange, bucket=bucket)

    def not_promised(self, recipe: Recipe) -> str:
        if not self.compress:
            return ""
        as_few = (
            "strategy={use: hybrid, reduce_dtype: bfloat16} sends as few bytes, and each step is compared. "
        )
        return (
            f"strategy.compress={self.compress} does not promise one process's result: {self.approximates}. It is "
            f"promised, and compared, with strategy.compress=none. {'' if self.compress.rank else as_few}Otherwise "
            "compare held-out numbers of whole trainings (docs/exchange.md)."
        )

    @property
    def approximates(self) -> str:
        """The effect of compression, as a part of a sentence."""
        return "ranks exchange an approximation of their gradients, and what it leaves out later"

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError for an exchange that the device lacks, and for recipes that no strategy can train."""
        if self.exchange == "pushed" and device != "cpu":
            raise UsageError(
                "strategy.exchange=pushed works on CPUs only, and these ranks' gradients lie on accelerators: leave it "
                "out (auto is bucketed there)."
            )
        super().refuse(recipe, ranks, device)

    def build(self, mesh: Mesh) -> DataParallel:
        return DataParallel(self, mesh)


@dataclass(frozen=True)
class DataParallel:
    """Places a model on all ranks of the mesh. On one rank the model stays plain, without a wrapper."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """Returns a learner with bit-equal weights on all ranks; raises DivergenceError if they differ. Collective."""
        from paddle_dp.core.batch_norm import needs_ours, synchronize
        from paddle_dp.core.consistency import DRAWN, check_equal
        from paddle_dp.core.turns import TurnsLoss
        from paddle_dp.exchange.choose import choose_exchange
        from paddle_dp.learner import full_model_learner, prepare
        from paddle_dp.model.recompute import recomputed

        recompute, is_distributed = self.config.recompute, self.mesh.ranks > 1
        if self.config.sync_batch_norm and (is_distributed or needs_ours(task.model)):
            synchronize(task.model, self.mesh)
        recomputed(task.model, recompute)
        if not is_distributed:
            return full_model_learner(task, self.mesh)
        if self.config.init == "seed":
            check_equal(
                task.model.named_parameters(), self.mesh, "after drawing the weights from one seed", DRAWN
            )
        prepared = prepare(task, self.mesh)
        known_differences = []
        if self.config.compress:
            known_differences.append(
                f"{self.config.approximates}: strategy.compress=none exchanges the gradients themselves"
            )
        settings = self.config.exchange_settings
        if isinstance(task.loss, TurnsLoss):  # other ranks' gradients are missing in a turn, too
            settings = replace(settings, absent=True)
        parallel_model = self._wrap(prepared.model, settings.by_reducer(self.mesh.device))
        placed = prepared.placed()
        learner = prepared.learner(
            placed,
            exchange=choose_exchange(settings, placed, parallel_model, prepared.counted_late),
            parallel_model=parallel_model,
            known_differences=known_differences,
        )
        learner.check("after the weights were made equal")
        return learner

    def _wrap(self, model: nn.Layer, by_reducer: bool) -> nn.Layer:
        """Returns the model with rank 0's weights and buffers; wrapped only if paddle.DataParallel exchanges gradients,
        because it holds memory for all of them from the first backward on, also under no_sync (3.3.1)."""
        import paddle
        from paddle.distributed.parallel import sync_params_buffers

        from paddle_dp.core.buffers import give_unusual

        give_unusual(model, self.mesh)
        if not by_reducer:
            sync_params_buffers(model, fuse_params=False)
            return model
        return paddle.DataParallel(
            model,
            comm_buffer_size=self.config.comm_buffer_size.megabytes,
            last_comm_buffer_size=self.config.last_comm_buffer_size.megabytes,
        )
