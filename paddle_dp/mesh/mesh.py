"""The mesh: one object for the joined ranks, used by all other packages."""

from __future__ import annotations

import itertools
import json
import socket
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import UsageError
from paddle_dp.mesh import late_ranks
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.device import choose
from paddle_dp.mesh.doors import Connections, listen_to_this_machine_only, send_at_once
from paddle_dp.mesh.environment import Environment, check_port, wait_for_port
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import Messages
from paddle_dp.mesh.secret import job_store
from paddle_dp.mesh.transport import Patience

if TYPE_CHECKING:
    import paddle

MAIN_RANK = 0  # writes the logs, the dashboard and the screen, and keeps the ledger of asynchronous ranks
POLL, MAX_POLL = 0.001, 0.02  # seconds between two looks at a count of the store, doubled each time


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a job and this process's rank.

    With several ranks every exchange is *collective*: all ranks call it, in the same order. A mesh of one rank needs no
    process group, and its exchanges cost nothing.

    `expendable` ranks may die during a training; they are then in `lost`, on all others after the same exchange, and
    exchanges omit them. `workers_device` is the first worker's device if there are servers.
    """

    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    workers_device: str = ""
    host: str = field(default_factory=socket.gethostname)
    degrees: Degrees | None = None
    expendable: frozenset[int] = frozenset()
    lost: set[int] = field(default_factory=set, compare=False)
    _waits: Any = field(default_factory=itertools.count, repr=False, compare=False)

    @classmethod
    def alone(cls) -> Mesh:
        """Returns a mesh of one CPU rank, without joining a job: for tests and tools that start no ranks."""
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this is the `MAIN_RANK`."""
        return self.rank == MAIN_RANK

    @property
    def computes_on(self) -> str:
        """The kind of device of ranks that read samples, "cpu" or "gpu", even if this rank is a server."""
        return (self.workers_device or self.device).partition(":")[0]

    @property
    def displayed_device(self) -> str:
        """The device to show: `computes_on` on a server, else `device`."""
        return self.device if self.reads else self.computes_on

    @cached_property
    def axes(self) -> Degrees:
        """The sizes of the axes: all ranks are on data, unless a strategy set `degrees`."""
        return self.degrees or Degrees(data=self.ranks)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return self.axes.coords(self.rank)

    @property
    def dp_rank(self) -> int:
        """The index of this rank's share of the data; −1: none. Ranks with equal `dp_rank` read the same samples."""
        return self.axes.dp_rank(self.rank)

    @property
    def reads(self) -> bool:
        """True if this rank reads samples and computes, which a server does not."""
        return self.axes.reads(self.rank)

    @cached_property
    def all_read(self) -> bool:
        return self.axes.all_read

    @cached_property
    def hub(self) -> int | None:
        """The rank through which all ranks exchange if some read nothing: process groups would connect the others with
        each other. None: there are process groups."""
        return None if self.all_read else 0

    @cached_property
    def dp_size(self) -> int:
        return self.axes.dp_size

    @property
    def readers(self) -> list[int]:
        """The ranks that read samples and are not lost."""
        return [rank for rank in range(self.axes.servers, self.ranks) if rank not in self.lost]

    @cached_property
    def is_loss_rank(self) -> bool:
        """True if this rank's losses and scores count: on one rank of each reader, on the last pipeline stage."""
        coords = self.coords
        if not self.reads:
            return False
        return coords["pipeline"] == self.axes.pipeline - 1 and not (coords["tensor"] or coords["sequence"])

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self.hub is not None:
            first, *following = self.gather_tensor(tensor)
            tensor.set_value(sum(following, first))
        elif self.ranks > 1:
            import paddle.distributed as dist

            with self.waiting("an exchange between all ranks"):
                dist.all_reduce(tensor)
        return tensor

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of `values` over the ranks, on every rank; exchanged between hosts, as in `gather`."""
        if self.ranks == 1:
            return [float(value) for value in values]
        return [sum(column) for column in zip(*self.gather(list(map(float, values))), strict=True)]

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns every rank's `tensor` (equal shapes and dtypes), in rank order."""
        if self.ranks == 1:
            return [tensor]
        if self.hub is not None:
            return tensors_of(self.gather_bytes(copied_bytes(tensor)), tensor)
        import paddle.distributed as dist

        gathered: list[paddle.Tensor] = []
        with self.waiting("an exchange between all ranks"):
            dist.all_gather(gathered, tensor)
        return gathered

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's `value` (any JSON), in rank order. No rank waits for its device."""
        if self.ranks == 1:
            return [value]
        return [json.loads(row) for row in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Returns every rank's bytes, in rank order, without lost ranks'. No rank waits for its device."""
        if self.ranks == 1:
            return [content]
        return self._messages.gather(content, "an exchange between all ranks")

    def broadcast(self, tensor: paddle.Tensor, source: int = 0) -> paddle.Tensor:
        """Copies `source`'s `tensor` to all ranks, in place, and returns it."""
        if self.hub is not None:
            local_bytes = copied_bytes(tensor) if self.rank == source else b""
            rows = self.gather_bytes(local_bytes)
            if source not in self.lost:
                index = source - sum(rank < source for rank in self.lost)
                tensor.set_value(*tensors_of(rows[index : index + 1], tensor))
        elif self.ranks > 1:
            import paddle.distributed as dist

            dist.broadcast(tensor, source)
        return tensor

    def wait(self, name: str) -> None:
        """Waits for all ranks without a time limit, while one rank writes a checkpoint or builds a cache."""
        if self.ranks == 1:
            return
        if self.expendable:  # the store would not report a lost rank
            self._messages.gather(b"", f"'{name}'")
            return
        key = f"paddle_dp/wait/{next(self._waits)}/{name}"
        with self.waiting(f"'{name}'"):
            arrived, pause = self._store.add(key, 1), POLL
            while arrived < self.ranks:
                time.sleep(pause)
                arrived, pause = self._store.add(key, 0), min(2 * pause, MAX_POLL)

    def waiting(self, activity: str, computes: bool = False) -> AbstractContextManager[None]:
        """Wraps an exchange `activity` of all ranks: if it takes long, each waiting rank prints the late ranks.

        `computes`: the ranks also compute within it.
        """
        return late_ranks.waiting("all", range(self.ranks), activity, computes)

    @cached_property
    def _messages(self) -> Messages:
        return Messages(range(self.ranks), self.rank, "all", self.hub, self.expendable, self.lost)

    @cached_property
    def _store(self) -> Any:
        return job_store()


def new_group(ranks: Iterable[int]) -> Any:
    """Creates a process group of these ranks; raises JobError if a connection leads to another user. Collective."""
    import paddle.distributed as dist

    connections = Connections()
    with connections.blamed():
        group = dist.new_group(list(ranks))
    connections.check()
    return group


def copied_bytes(tensor: paddle.Tensor) -> bytes:
    """Copies a tensor's numbers from any device; bfloat16 as its bits."""
    return bytes(tensor.detach().numpy().tobytes())


def tensors_of(rows: Iterable[bytes | bytearray], like: paddle.Tensor) -> list[paddle.Tensor]:
    """Returns the tensors with these bytes, with the shape, dtype and place of `like`."""
    import numpy as np
    import paddle

    dtype = like.detach().numpy().dtype
    arrays = (np.frombuffer(row, dtype).reshape(like.shape) for row in rows)
    return [paddle.to_tensor(array.copy(), dtype=like.dtype, place=like.place) for array in arrays]


_joined: dict[str, Mesh] = {}


def join(
    seed: int | None = None, device: str = "auto", patience: float | None = None, servers: int = 0
) -> Mesh:
    """Joins this process to its job and returns the mesh; call it before you make a model or a loader. Collective.

    A process started by `paddle.distributed.launch` (or `paddle-dp train`) connects to its peers; any other is a mesh
    of one rank. A second call returns the same mesh. `seed` sets Paddle's generator, equally on every rank. `patience`:
    seconds that every exchange on CPUs waits for a late rank (default 600; Paddle alone has a fixed 30).

    The first `servers` ranks compute on the CPU, independent of `device`. There are then no process groups: workers
    exchange only with servers, from host to host.

    Raises UsageError if there is no `device` ("auto", "cpu", "gpu", "xpu" or the type of a custom device), and after
    `paddle.distributed.init_parallel_env()`.
    """
    import paddle

    if "mesh" not in _joined:
        here = Environment.read()
        if here.ranks > 1 and paddle.distributed.is_initialized():
            raise UsageError(
                "the parallel environment was made before, by paddle.distributed.init_parallel_env(), fleet.init() or "
                "paddle.Model(): leave that call out. join(), and every Trainer, makes it."
            )
        servers = servers if servers < here.ranks else 0
        degrees = Degrees(data=here.ranks - servers, servers=servers)
        device_name = choose(device if degrees.reads(here.rank) else "cpu")
        mesh = Mesh(rank=here.rank, ranks=here.ranks, device=device_name, degrees=degrees)
        connections = Connections(int(here.master.rpartition(":")[2]) if here.master else 0)
        if here.ranks > 1:
            if here.master:
                with heartbeat.waiting("rank 0's store") if here.rank else nullcontext():
                    (wait_for_port if here.rank else check_port)(here.master)
            with heartbeat.waiting("the meeting of all ranks"), connections.blamed():
                paddle.base.core.create_or_get_global_tcp_store()
                send_at_once()
                if mesh.hub is None:
                    paddle.distributed.init_parallel_env()
            listen_to_this_machine_only(here.master or "")
            seconds = _set_patience(patience, device_name if mesh.hub is None else "")
            if here.master:
                late_ranks.start(here.rank, here.master, seconds)
        # gloo lets a rank continue while a peer is still connecting to it. If the rank failed now, the peer would
        # report a lost connection and hide the rank's error: so all wait for each other first.
        mesh.sum_tensor(paddle.ones([1])).tolist()
        if here.ranks > 1:
            connections.close_port()
        if mesh.hub is not None:
            mesh = replace(mesh, workers_device=mesh.gather(device_name)[servers])
        _joined["mesh"] = mesh
    if seed is not None:
        paddle.seed(seed)
    return _joined["mesh"]


def _set_patience(patience: float | None, device: str) -> float:
    """Sets how many seconds exchanges wait for a late rank, and returns it; None keeps the bridge's value, or 600.

    On the device "cpu" it also sets gloo's limit for the default group, and for those that a script makes later.
    """
    from paddle_dp.gloo import process_groups
    from paddle_dp.gloo.time_limit import set_time_limit

    Patience.seconds = Patience.seconds if patience is None else patience
    if device == "cpu":
        set_time_limit(0, Patience.seconds)
        process_groups.install()
    return Patience.seconds


def stream_seed(seed: int, name: int | str) -> int:
    """Returns a seed for the random stream `name`, a pure function of both; similar names give unrelated seeds."""
    return zlib.crc32(f"{seed}/{name}".encode())


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Seeds every rank's random streams; call it after the draws that must be equal everywhere (initial weights).

    Paddle's default stream is the same on all ranks of a tensor axis, which hold the same activations and must drop the
    same elements; it differs between readers, stages and sequence shards. Tensor-parallel layers draw from fleet's
    tracker (get_rng_state_tracker), with a different stream on every rank.
    """
    import paddle

    tensor = mesh.axes.tensor
    if tensor > 1:
        from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG
        from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

        # Like fleet's model_parallel_random_seed, but that has equal seeds for all readers and all sequence shards.
        tracker = get_rng_state_tracker()
        tracker.reset()
        tracker.add(MODEL_PARALLEL_RNG, stream_seed(seed, f"rank {mesh.rank}"))
    paddle.seed(stream_seed(seed, mesh.rank // tensor))
