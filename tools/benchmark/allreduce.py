"""Measures the collectives on this machine by size: time, bandwidth, and what could not be faster.

    python tools/benchmark/allreduce.py --ranks 2,4
    python tools/benchmark/allreduce.py --ranks 2 --sizes 1KB,1MB --csv collectives.csv --png collectives.png

Each number of ranks is a job of its own (`paddle-dp launch`). One call is the mean of a row of them, as long as the
slowest rank takes; the median of three rows. "algorithm" is size / time; "bus" is what each rank's link carries, as
NVIDIA's nccl-tests count it: algorithm × 2(n−1)/n for an all_reduce, × (n−1)/n for reduce_scatter and all_gather, × 1
for a broadcast. Sizes are those of the whole: what all_reduce sums, reduce_scatter takes, and all_gather gives.
A KB is 1024 bytes, a GB/s 10⁹ a second.

Beside them, from the same run: one copy in memory, and one socket on loopback from one process to another, in one
direction, message after message: what a link between two processes carries if nothing is added up. Ranks that are more
than the machine's processors also wait for one another's turn.
On CPUs the collectives are gloo's, and where gloo has none, those that fleet's layouts use (paddle_dp/gloo).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.figures import new_figure
from paddle_dp.units import Bytes
from tools.command_line import environment, paddle_dp, parser_of
from tools.tables import table_head, table_row, write_csv

SIZES = "1KB,8KB,64KB,512KB,4MB,32MB,256MB"
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ROW = 0.25  # seconds that a row of calls takes at least
ROWS = 3
RESULT = "ALLREDUCE_RESULT"  # where rank 0 writes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One operation on `ranks` ranks, or a ceiling on 1 or 2 processes: `size` in bytes, `seconds` a call."""

    operation: str
    ranks: int
    size: int
    seconds: float

    @property
    def algorithm(self) -> float:
        """Bytes a second of the whole."""
        return self.size / self.seconds

    @property
    def bus(self) -> float:
        """Bytes a second that leave each rank."""
        return self.algorithm * share(self.operation, self.ranks)


def share(operation: str, ranks: int) -> float:
    """What leaves each rank at least, as a part of the size (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69);
    in a broadcast all of it leaves one."""
    parts = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "memory copy": 1.0, "socket": 1.0}
    return parts.get(operation, (ranks - 1) / ranks)


def main() -> int:
    given = arguments()
    sizes = [Bytes.parse(word).count for word in given.sizes.split(",")]
    if RESULT in os.environ:
        measure_here(sizes, given.operations.split(","))
        return 0
    rows = [*ceilings(sizes)]
    for ranks in map(int, given.ranks.split(",")):
        rows += in_a_job(ranks, given)
    print("\n".join(table(rows)))
    if given.csv:
        write_csv(rows, given.csv, "algorithm", "bus")
    if given.png:
        picture(rows, given.png)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", default="2", metavar="N,…", help="processes (default 2)")
    parser.add_argument("--sizes", default=SIZES, metavar="SIZE,…", help=f"of the whole (default {SIZES})")
    parser.add_argument("--operations", default=",".join(OPERATIONS), metavar="NAME,…")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    return parser.parse_args()


# The ranks


def in_a_job(ranks: int, given: argparse.Namespace) -> list[Measured]:
    """What a job of so many ranks measures."""
    with tempfile.TemporaryDirectory(prefix="allreduce-") as folder:
        result = Path(folder) / "result.json"
        script = [__file__, "--sizes", given.sizes, "--operations", given.operations]
        command = paddle_dp("launch", "--ranks", ranks, "--out", f"{folder}/logs", *script)
        variables = environment(OMP_NUM_THREADS="1", **{RESULT: str(result)})
        done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(done.returncode)
        return [Measured(**row) for row in json.loads(result.read_text())]


def measure_here(sizes: Sequence[int], operations: Sequence[str]) -> None:
    """In every rank; rank 0 writes what all of them took."""
    import paddle

    from paddle_dp import gloo, join

    mesh = join(seed=0)
    gloo.install(mesh.device)
    rows = []
    for operation in operations:
        for size in sizes:
            call = prepared(paddle, operation, size, mesh.ranks)
            taken = [of_row(call, mesh.sum) for _ in range(ROWS + 1)][1:]
            slowest = [max(of_ranks) for of_ranks in zip(*mesh.gather(taken), strict=True)]
            seconds = statistics.median(slowest)
            rows.append(Measured(operation=operation, ranks=mesh.ranks, size=size, seconds=seconds))
    if mesh.is_main:
        Path(os.environ[RESULT]).write_text(json.dumps([asdict(row) for row in rows]))
    mesh.wait("measured")


def prepared(paddle: Any, operation: str, size: int, ranks: int) -> Callable[[], Any]:
    """A call of the operation on float32 numbers of so many bytes in all."""
    dist = paddle.distributed
    part = max(1, size // 4 // ranks)
    whole, own = paddle.ones([part * ranks]), paddle.ones([part])
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(own, list(paddle.split(whole, ranks))),
        "all_gather": lambda: dist.all_gather([], own),
    }
    return calls[operation]


def of_row(call: Callable[[], Any], meet: Callable[[list[float]], Any]) -> float:
    """Seconds a call, in a row of as many on each rank."""
    began = time.perf_counter()
    call()
    once = meet([time.perf_counter() - began])[0]  # of all ranks together: the same number on each
    count = max(1, min(2000, round(ROW / max(once, 1e-6))))
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


# What could not be faster


def ceilings(sizes: Sequence[int]) -> Iterator[Measured]:
    import numpy as np

    for size in sizes:
        source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
        seconds = repeated(partial(np.copyto, target, source))
        yield Measured(operation="memory copy", ranks=1, size=size, seconds=seconds)
    for size in sizes:
        yield Measured(operation="socket", ranks=2, size=size, seconds=through_a_socket(size))


def repeated(call: Callable[[], Any]) -> float:
    """The median seconds of a call."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + ROW
    while time.perf_counter() < end or len(taken) < ROWS:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def through_a_socket(size: int) -> float:
    """Seconds for `size` bytes through one socket to another process, over TCP on loopback, in a row of them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            with socket.create_connection(listener.getsockname()) as peer:
                read_rows(peer, size)
            os._exit(0)
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        once = row_of(connection, size, 1)
        taken = [row_of(connection, size, max(1, min(20000, round(ROW / once)))) for _ in range(ROWS)]
    os.waitpid(child, 0)
    return statistics.median(taken)


def row_of(connection: socket.socket, size: int, count: int) -> float:
    """Seconds a message, of `count` messages until the other side has read all of them."""
    data = bytes(size)
    began = time.perf_counter()
    connection.sendall(struct.pack("<q", count))
    for _ in range(count):
        connection.sendall(data)
    connection.recv(1)
    return (time.perf_counter() - began) / count


def read_rows(peer: socket.socket, size: int) -> None:
    """The other side: reads rows, and answers one byte to each."""
    buffer = memoryview(bytearray(min(size, 1 << 20)))
    while head := peer.recv(8, socket.MSG_WAITALL):
        left = struct.unpack("<q", head)[0] * size
        while left:
            left -= peer.recv_into(buffer[: min(left, len(buffer))])
        peer.sendall(b"1")


# What is shown


def table(rows: Sequence[Measured]) -> Iterator[str]:
    names = ["operation", "ranks", "size", "time", "algorithm", "bus", "bus / algorithm", "of a socket"]
    yield from table_head(names).splitlines()
    sockets = {row.size: row.bus for row in rows if row.operation == "socket"}
    for row in rows:
        is_collective = row.operation in OPERATIONS
        of_socket = f"{row.bus / sockets[row.size]:.2f}" if is_collective and row.size in sockets else ""
        bound = f"{share(row.operation, row.ranks):.2f}" if is_collective else ""
        cells = [row.operation, row.ranks, spoken(row.size), lasting(row.seconds)]
        cells += [f"{row.algorithm / 1e9:.3f} GB/s", f"{row.bus / 1e9:.3f} GB/s", bound, of_socket]
        yield table_row(cells)


def spoken(size: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):  # as paddle_dp/units.py has them
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def lasting(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def picture(rows: Sequence[Measured], file: Path) -> None:
    """Time by size, and the bus bandwidth by size, each beside both ceilings."""
    figure = new_figure(12, 4.4, dpi=110)
    left, right = figure.subplots(1, 2)
    colors = dict(zip(OPERATIONS, ("#1f5fa8", "#c2551b", "#2f8a4b", "#8a3f9c"), strict=True))
    many = sorted({row.ranks for row in rows if row.operation in OPERATIONS})
    for operation, ranks in dict.fromkeys((row.operation, row.ranks) for row in rows):
        own = [row for row in rows if (row.operation, row.ranks) == (operation, ranks)]
        if operation in OPERATIONS:
            dashes = (1, 0) if ranks == many[0] else (4, 1 + many.index(ranks))
            look: dict[str, Any] = {
                "color": colors[operation],
                "marker": "o",
                "markersize": 3,
                "dashes": dashes,
            }
            label = f"{operation}, {ranks} ranks"
        else:
            look = {"color": "#888888", "dashes": (1, 1) if operation == "socket" else (6, 2)}
            label = f"one {operation}"
        left.plot([row.size for row in own], [row.seconds * 1e3 for row in own], label=label, **look)
        right.plot([row.size for row in own], [row.bus / 1e9 for row in own], label=label, **look)
    sizes = sorted({row.size for row in rows})
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(sizes, [spoken(size) for size in sizes])
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    left.set_title("time of a call, ms", loc="left", fontsize=10)
    right.set_title("bus bandwidth, GB/s", loc="left", fontsize=10)
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
