"""Takes a snapshot of a training for a checkpoint, and restores one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from paddle_dp.checkpoint import Checkpoint, Snapshot, TensorShard, content_of
from paddle_dp.checkpoint.digest import digests_of, shard_sum, tensor_sums
from paddle_dp.checkpoint.json_codec import mapping, natural
from paddle_dp.checkpoint.merge import averages_in
from paddle_dp.checkpoint.optimizer import (
    MASTER,
    count_kinds,
    load_optimizer,
    optimizer_name,
    optimizer_tensors,
)
from paddle_dp.checkpoint.rng import load_rng_state, rng_state
from paddle_dp.checkpoint.shards import Box, ShardInfo
from paddle_dp.checkpoint.tensors import FLOATS, HostMemory, Room, check_shape, converted, fill, tensor_shard
from paddle_dp.core.placed_model import Placed
from paddle_dp.core.placement import Placement
from paddle_dp.data import Loader
from paddle_dp.errors import CheckpointError
from paddle_dp.identity.facts import RunSignature
from paddle_dp.identity.same_run import load_schedule
from paddle_dp.learner import Learner
from paddle_dp.learner.ema import Averages
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.mesh import seed_ranks
from paddle_dp.tensors import dtype_of, nbytes
from paddle_dp.text import and_more
from paddle_dp.train.callback import Progress
from paddle_dp.train.run import Run
from paddle_dp.version import __version__

FORMAT = 1  # of a snapshot's state; raise it for content that another version would not restore
_EMA, _MODEL, _EXTRA, _SHARED = "ema/", "model/", "strategy/", "shared"


def snapshot(  # noqa: PLR0913 - the parts of a checkpoint
    learner: Learner,
    progress: Progress,
    run: Run,
    loader: Loader,
    *,
    guard: dict[str, Any] | None = None,
    averages: Averages | None = None,
    base: dict[str, Any] | None = None,
    memory: HostMemory | None = None,
) -> Snapshot:
    """This rank's part of a checkpoint: its main replicas. Call `learner.statistics.sync()` before. `guard`: the state
    of the judge of updates. `base`: the `base_state` of an adapter. `memory`: where to copy the tensors; it must not
    hold a snapshot that is needed."""
    tensors = _extra_shards(learner, memory)
    state = _state(learner, progress, run, loader) | ({"guard": guard} if guard else {}) | (base or {})
    with learner.weights.means(states=True):
        tensors |= model_shards(learner, memory) | optimizer_shards(learner, memory)
    if averages is not None:
        tensors |= _copied([(_EMA + name, *where) for name, *where in averages.shards()], "ema", memory)
    return Snapshot(tensors=tensors, state=state, rank_state={"rng": rng_state()})


def _extra_shards(learner: Learner, memory: HostMemory | None) -> dict[str, TensorShard]:
    """The strategy's extra state: the shared part from the main rank, local parts under the rank's number."""
    extra, rank = learner.extra_state(), learner.mesh.rank
    named = {f"{_EXTRA}{rank}/{name}": tensor for name, tensor in extra.local.items()}
    if learner.mesh.is_main:
        named |= {f"{_EXTRA}{_SHARED}/{name}": tensor for name, tensor in extra.shared.items()}
    return _copied([(name, tensor, Placement()) for name, tensor in named.items()], "strategy", memory)


class _SavedExtraState:
    """A strategy's extra state in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, mesh: Mesh):
        self._checkpoint = checkpoint
        self._all = frozenset(name for name in checkpoint.names if name.startswith(_EXTRA))
        self._rank_prefix = f"{_EXTRA}{mesh.rank}/" if checkpoint.ranks == mesh.ranks else None
        self.shared = self._under(f"{_EXTRA}{_SHARED}/")
        self.local = self._under(self._rank_prefix) if self._rank_prefix else frozenset()
        self._read: set[str] = set()  # names that the strategy has loaded, of any rank

    def _under(self, prefix: str) -> frozenset[str]:
        return frozenset(n.removeprefix(prefix) for n in self._all if n.startswith(prefix))

    def shared_into(self, name: str, tensor: Any) -> None:
        self._fill(tensor, f"{_EXTRA}{_SHARED}/{name}")

    def local_into(self, name: str, tensor: Any) -> None:
        self._fill(tensor, f"{self._rank_prefix}{name}")

    def sum_into(self, name: str, tensor: Any) -> bool:
        names = [f"{_EXTRA}{rank}/{name}" for rank in range(self._checkpoint.ranks)]
        there = [each for each in names if each in self._all]
        total = tensor.clone()
        for number, each in enumerate(there):
            self._fill(total, each)
            tensor.set_value(tensor + total if number else total)
        return bool(there)

    def left_out(self) -> str:
        """A sentence on the entries that this strategy has not loaded; "" if it has loaded all of them."""
        without = sorted({name.split("/")[2] for name in self._all} - self._read)
        if not without:
            return ""
        return (
            f"{self._checkpoint.folder} has extra state of another strategy, or of another number of ranks "
            f"({', '.join(without)}): it is left out."
        )

    def _fill(self, tensor: Any, name: str) -> None:
        self._read.add(name.split("/")[2])
        fill(tensor, self._checkpoint, name, tuple(tensor.shape), (0,) * len(tensor.shape))


def base_state(learner: Learner) -> dict[str, Any]:
    """An adapter's base weights in a checkpoint: `base`, the digest of their numbers in `base_dtype`, O2's 16 bits, and
    `base_rounded`, the names of those that lie in them, as on accelerators. Collective."""
    placed, precision = learner.placed, learner.mixed.precision
    dtype = precision.dtype if learner.mixed.low and precision.level == "O2" else ""
    rounded = [name for name, tensor, _ in placed.base_shards() if dtype_of(tensor) == dtype]
    digest, names = placed_digest(placed.base_shards(), learner.mesh, dtype), learner.mesh.gather(rounded)
    return {"base": digest, "base_dtype": dtype, "base_rounded": sorted(set().union(*names))}


def placed_digest(tensors: Iterable[Placed], mesh: Mesh, dtype: str = "") -> str:
    """The digest of a model's tensors over all ranks, the same in any layout; with `dtype`, of floats rounded to it.
    Collective."""
    # One copy at a time: a model may fill half of the memory.
    shards = (placed_shard(_MODEL + name, *where) for name, *where in tensors)
    if dtype:
        shards = (
            replace(s, array=converted(s.array, s.dtype, dtype)[0], dtype=dtype) if s.dtype in FLOATS else s
            for s in shards
        )
    local_rows = [
        [s.name, s.dtype, s.global_shape, s.offset, s.array.shape, str(shard_sum(s))] for s in shards
    ]
    all_rows = (row for rows in mesh.gather(local_rows) for row in rows)
    infos = (
        ShardInfo(
            mesh.rank, name, name, dtype, tuple(shape), Box(tuple(offset), tuple(size)), int(tensor_sum)
        )
        for name, dtype, shape, offset, size, tensor_sum in all_rows
    )
    return digests_of(tensor_sums(infos)).get("model", "")


def optimizer_states(learner: Learner) -> list[Placed]:
    """The optimizer's tensors on this rank.

    Call it, and use the tensors, within `learner.weights.optimizer_states_on_device()`.
    """
    named = dict(learner.placed.named_parameters())
    tensors = optimizer_tensors(learner.optimizer, named.items())
    states = [(name.rpartition("/")[2], each, named[_parameter(name)]) for name, each in tensors.items()]
    placements = learner.placed.placements.state_placements(states, partial(count_kinds, learner.optimizer))
    return [*zip(tensors, tensors.values(), placements, strict=True)]


def model_shards(learner: Learner, memory: HostMemory | None = None) -> dict[str, TensorShard]:
    """The main replicas of weights and buffers on this rank, under whole-model names."""
    return _copied([(_MODEL + name, *where) for name, *where in learner.placed.shards()], "model", memory)


def optimizer_shards(learner: Learner, memory: HostMemory | None = None) -> dict[str, TensorShard]:
    """The main replicas of optimizer states on this rank."""
    with learner.weights.optimizer_states_on_device():
        return _copied(list(learner.placed.main_replicas(optimizer_states(learner))), "optimizer", memory)


def _copied(
    placed: list[tuple[str, Any, Placement]], kind: str, memory: HostMemory | None
) -> dict[str, TensorShard]:
    """Host copies by name, in `memory` if it is given."""
    size = sum(nbytes(tensor) for _, tensor, _ in placed)
    room = None if memory is None else memory.room(kind, size, len(placed))
    return {name: placed_shard(name, tensor, placement, room) for name, tensor, placement in placed}


def placed_shard(name: str, tensor: Any, placement: Placement, room: Room | None = None) -> TensorShard:
    """A host copy of a tensor, with its offset in the whole tensor."""
    shape = tensor.shape
    return tensor_shard(name, tensor, placement.global_shape(shape), placement.offset(shape), room)


def _parameter(name: str) -> str:
    """ "optimizer/blocks.0.weight/moment1" → "blocks.0.weight"."""
    return name.removeprefix("optimizer/").rpartition("/")[0]


def _state(learner: Learner, progress: Progress, run: Run, loader: Loader) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "progress": progress.state(),
        "schedule": learner.rate.schedule.state_dict() if learner.rate.schedule else None,
        "loss_scale": learner.mixed.scale.state() if learner.mixed.scale else None,
        "data": {
            "samples": loader.sampler.samples,
            "batch": loader.sampler.batch,
            "seed": loader.sampler.seed,
            "ramp": loader.sampler.ramp and str(loader.sampler.ramp),
        },
        "ranks": learner.mesh.ranks,
        "axes": learner.mesh.axes.as_dict(),
        "recipe": run.recipe.model_dump(mode="json") if run.recipe else None,
        "identity": run.identity.state() if run.identity else None,
    }


def restore(
    checkpoint: Checkpoint,
    learner: Learner,
    averages: Averages | None = None,
    identity: RunSignature | None = None,
) -> Progress:
    """Loads a checkpoint into a learner and its averages, and returns its progress. Averages that the checkpoint lacks
    begin with its weights. `identity`: the run's, with the changes that it has accepted.

    In the layout that saved it, every rank gets its RNG state back and the run continues bit by bit; in another layout
    the ranks are seeded anew. Neither the order of samples nor exact dropout depends on that state.
    Raises CheckpointError when the checkpoint does not fit the model.
    """
    with content_of(checkpoint.folder):
        progress = _restore(checkpoint, learner, identity)
        if averages is not None:
            _load_averages(checkpoint, averages)
        return progress


def _restore(checkpoint: Checkpoint, learner: Learner, identity: RunSignature | None) -> Progress:
    progress = progress_of(checkpoint)
    load_model(checkpoint, learner)
    _load_optimizer(checkpoint, learner)
    extra = _SavedExtraState(checkpoint, learner.mesh)
    learner.load_extra_state(extra)
    left_out = extra.left_out()
    if left_out and learner.mesh.is_main:
        print(left_out, file=sys.stderr, flush=True)
    learner.rate.steps = progress.step
    state = checkpoint.state
    if learner.rate.schedule is not None:
        load_schedule(learner.rate.schedule, state, identity)
        learner.rate.apply()
    if learner.mixed.scale is not None and state["loss_scale"] is not None:
        learner.mixed.scale.load(state["loss_scale"])
    same_layout = Degrees(**state["axes"]) == learner.mesh.axes
    rank_state = checkpoint.rank_state(learner.mesh.rank) if same_layout else None
    if rank_state:  # empty for a rank that was lost when the checkpoint was saved
        load_rng_state(rank_state["rng"])
    else:
        seed_ranks(state["data"]["seed"] + progress.step, learner.mesh)
    return progress


def progress_of(checkpoint: Checkpoint) -> Progress:
    """The progress of a checkpoint's training. Call it before anything else of the state is read.

    Raises CheckpointError for the state of another version's format, which this one would restore in part, and for a
    damaged one.
    """
    state = checkpoint.state
    with content_of(checkpoint.folder):
        identity = mapping(state.get("identity") or {}, "identity")
        if (number := natural(state["format"], "format")) != FORMAT:
            by = mapping(identity.get("facts", {}), "facts").get("package paddle_dp", "of unknown version")
            raise CheckpointError(
                f"{checkpoint.folder} was saved by paddle_dp {by} in format {number}. This version, {__version__}, "
                f"reads format {FORMAT}: install that version to resume it. Commands that need the weights alone "
                "(evaluate, generate, export, merge) take it as it is."
            )
        for name, count in mapping(state["progress"], "progress").items():
            natural(count, f"progress.{name}")
        for name in ("axes", "recipe", "schedule"):
            mapping(state[name] or {}, name)
        return Progress.restored(state["progress"])


def _load_averages(checkpoint: Checkpoint, averages: Averages) -> None:
    import paddle

    saved = set(checkpoint.names)
    averages.begin()
    with paddle.no_grad():
        for name, parameter, average in averages.named():
            if (saved_name := _EMA + name) in saved:
                placement, shape = averages.learner.placed.placements.placement_of(parameter), average.shape
                fill(average, checkpoint, saved_name, placement.global_shape(shape), placement.offset(shape))


def load_model(checkpoint: Checkpoint, learner: Learner, *, ema: bool = False) -> None:
    """Loads a checkpoint's weights and buffers into the model; with `ema`, the averages in place of weights.

    Raises CheckpointError with the name of the first tensor that is missing, left over or of another shape, and if
    there are no averages.
    """
    import paddle

    tensors = learner.placed.state()
    saved = {name.removeprefix(_MODEL) for name in checkpoint.names if name.startswith(_MODEL)}
    averaged = averages_in(checkpoint) if ema else frozenset()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in learner.placed.base}
    _check_base(checkpoint, learner)
    everywhere = set().union(*learner.mesh.gather(sorted(tensors)))
    for missing, text in (
        (everywhere - saved, "lacks"),
        (saved - everywhere, "has, and this model has not,"),
    ):
        if missing:
            raise CheckpointError(
                f"{checkpoint.folder} {text} '{min(missing)}'{and_more(missing)}: it is another model's."
            )
    with paddle.no_grad():
        for name, tensor in tensors.items():
            placement, shape = learner.placed.placements.placement_of(tensor), tensor.shape
            saved_name = _EMA + name if name in averaged else _MODEL + name
            fill(tensor, checkpoint, saved_name, placement.global_shape(shape), placement.offset(shape))


def _check_base(checkpoint: Checkpoint, learner: Learner) -> None:
    """Rounds the base weights to the 16 bits that they had in the training of an adapter's checkpoint. Raises
    CheckpointError if they are others. Collective."""
    saved_digest = checkpoint.state.get("base")
    if saved_digest is None:
        return
    if not learner.placed.base:
        raise CheckpointError(
            f"{checkpoint.folder} holds an adapter without its base weights: give the recipe's adapter, "
            "or merge them first: paddle-dp merge RUN -o FILE."
        )
    dtype, tensors = checkpoint.state.get("base_dtype", ""), learner.placed.state()
    for tensor in (tensors[name] for name in checkpoint.state.get("base_rounded", ()) if name in tensors):
        if dtype_of(tensor) != dtype:
            tensor.set_value(tensor.astype(dtype).astype(tensor.dtype))
    if placed_digest(learner.placed.base_shards(), learner.mesh, dtype) != saved_digest:
        raise CheckpointError(
            f"{checkpoint.folder} holds an adapter that was trained on other weights than these: load.path must give "
            "the same ones; without it, train.seed and the model must be the same."
        )


def _load_masters(checkpoint: Checkpoint, learner: Learner) -> set[str]:
    """Loads the masters of O2's weights, which are exact, into every copy of a weight that is no 16-bit one here.
    Returns their names."""
    saved, masters = set(checkpoint.names), set()
    for parameter, weight in learner.placed.state().items():
        name = optimizer_name(parameter, MASTER)
        if name in saved and dtype_of(weight) in ("float32", "float64"):
            placement, shape = learner.placed.placements.placement_of(weight), weight.shape
            fill(weight, checkpoint, name, placement.global_shape(shape), placement.offset(shape))
            masters.add(name)
    return masters


def _load_optimizer(checkpoint: Checkpoint, learner: Learner) -> None:
    """Loads the optimizer states of the parameters that this rank updates. A parameter that was frozen when the model
    was placed gets none, also if it was trained until the checkpoint."""
    named = {name: p for name, p in learner.placed.named_parameters() if learner.placed.is_updated(p)}
    # Cached at the first read: by then `load_optimizer` has created the states.
    placements = cache(lambda: {name: placement for name, _, placement in optimizer_states(learner)})
    trained = {
        id(p) for p in learner.placed.trainable
    }  # one that a callback has frozen since keeps its moments

    def read(name: str, tensor: Any) -> Any:
        shape, parameter = tensor.shape, _parameter(name)
        placement = placements()[name]
        if name == optimizer_name(parameter, MASTER) and name not in local_names:
            name = _MODEL + parameter  # of a run on CPUs: its weights are float32 themselves
        check_shape(checkpoint, name, placement.global_shape(shape))
        return checkpoint.read(name, placement.offset(shape), shape)

    masters = _load_masters(checkpoint, learner)
    local_names = [
        n
        for n in checkpoint.names
        if n.startswith("optimizer/") and id(named.get(_parameter(n))) in trained and n not in masters
    ]
    with learner.weights.optimizer_states_on_device():
        load_optimizer(learner.optimizer, named.items(), read, local_names)
