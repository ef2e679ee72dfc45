"""A cluster in a box: a network namespace for each node, all on one switch, with links of a chosen speed. Needs root.

Each node has a veth pair to a bridge in a namespace of its own; `tc tbf` limits both of its ends, so a link carries the
chosen rate in each direction, as a network card does. Nothing of the machine's own network is touched, and all of it
is removed at the end, after an error and Ctrl-C, too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paddle_dp.errors import PaddleDPError
from paddle_dp.launch.silence import import_paddle
from paddle_dp.units import LinkSpeed
from tools.command_line import tell

# What a link sends at once after a pause: a larger one hides some of a short exchange.
BURST_BYTES = 256 * 1024
# BBR, which some machines have set, lets an exchange in thirty wait for 0.1 s after a pause; every kernel has reno.
CONGESTION = "reno"
NEEDS = "nodes are network namespaces here, which takes root, and iproute2's ip and tc"


def why_not() -> str | None:
    """Why there can be no cluster here, as one sentence; None where there can."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return f"{NEEDS}: run it as root on Linux."
    return None


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, timeout=10)


@dataclass(frozen=True)
class Cluster:
    """The nodes of a box: their namespaces, `interface` in each, and addresses. `first` is the number of node 0 on the
    switch."""

    name: str
    size: int
    first: int = 0

    def groups(self, size: int) -> list[Cluster]:
        """Its nodes as clusters of `size` nodes each."""
        return [Cluster(self.name, size, self.first + start) for start in range(0, self.size, size)]

    @property
    def spaces(self) -> list[str]:
        return [f"{self.name}-{self.first + node}" for node in range(self.size)]

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    @property
    def interface(self) -> str:
        return f"pdp{self.name.rpartition('-')[2]}"

    def address(self, node: int) -> str:
        return f"10.78.0.{self.first + node + 1}"

    def limit(self, speed: LinkSpeed) -> None:
        """From now on each link carries so much in each direction."""
        bits = round(8 * speed.bytes_per_second)
        for node, space in enumerate(self.spaces):
            for where, device in ((space, self.interface), (self.switch, f"port{self.first + node}")):
                shape = f"tbf rate {bits}bit burst {BURST_BYTES} latency 200ms"
                words = f"-n {where} qdisc replace dev {device} root {shape}"
                subprocess.run(["tc", *words.split()], check=True, timeout=10)

    def start_all(
        self, commands: Sequence[Sequence[str]], logs: Sequence[Path], variables: Mapping[str, str]
    ) -> list[subprocess.Popen[bytes]]:
        """A command on each of the first nodes; what it prints goes into its log."""
        environment, processes = {**os.environ, **variables}, []
        for space, command, log in zip(self.spaces[: len(commands)], commands, logs, strict=True):
            inside = ["ip", "netns", "exec", space, *command]
            with log.open("wb") as out:
                job = subprocess.Popen(
                    inside, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            processes.append(job)
        return processes

    def sent(self, process: subprocess.Popen[bytes], interface: str = "") -> int:
        """The bytes that have left the node on which a process runs; or what went through another `interface`."""
        for line in Path(f"/proc/{process.pid}/net/dev").read_text().splitlines():
            device, _, counts = line.partition(":")
            if device.strip() == (interface or self.interface):
                return int(counts.split()[8])
        return 0  # `ip` has not entered the namespace yet


@contextmanager
def cluster(size: int) -> Iterator[Cluster]:
    """A cluster of `size` nodes; raises OSError or CalledProcessError where the kernel has no veth, bridge or tbf."""
    box = Cluster(f"paddle-dp-{os.getpid()}", size)
    try:
        ip(f"netns add {box.switch}")
        ip(f"-n {box.switch} link add hub type bridge")
        ip(f"-n {box.switch} link set hub up")
        for node, space in enumerate(box.spaces):
            ip(f"netns add {space}")
            ip(f"-n {box.switch} link add port{node} type veth peer name {box.interface} netns {space}")
            ip(f"-n {box.switch} link set port{node} master hub up")
            ip(f"-n {space} address add {box.address(node)}/24 dev {box.interface}")
            ip(f"-n {space} link set {box.interface} up")
            ip(f"-n {space} link set lo up")
            ip(f"netns exec {space} sysctl -q -w net.ipv4.tcp_congestion_control={CONGESTION}")
        yield box
    finally:
        for space in (*box.spaces, box.switch):
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["ip", "netns", "del", space], timeout=10, stderr=subprocess.DEVNULL)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs, with all that it started: jobs end their ranks when they are asked to stop."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Raises RuntimeError with the last words of a node that failed."""
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            said = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{process.args!r}: status {process.returncode}\n{said}")


def end_on_sigterm() -> None:
    """SIGTERM ends this process through every `finally`. Paddle is imported first: it takes the signal for itself, and
    would end this process with the nodes still there."""
    import_paddle()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def going_on(name: str, failed: list[str]) -> Iterator[None]:
    """Behind a block that fails the others go on, for they are worth knowing: it adds the block's name to `failed`."""
    try:
        yield
    except (RuntimeError, TimeoutError, subprocess.SubprocessError, PaddleDPError) as error:
        failed.append(name)
        tell(f"{name} failed: {error}")


@contextmanager
def ended(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> Iterator[None]:
    """Behind the block nothing of them runs. Raises as `check` does, if the block did not."""
    try:
        yield
    finally:
        end(processes)
    check(processes, logs)


def events(
    metrics: Path, processes: Sequence[subprocess.Popen[bytes]], patience: float
) -> Iterator[dict[str, Any]]:
    """Each line of a job's metrics, as soon as it is there, until its processes have ended. Raises TimeoutError after
    `patience` seconds."""
    deadline, file = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        ended = [process.poll() for process in processes]
        file = file or (metrics.open() if metrics.exists() else None)
        yield from new_events(file) if file else ()
        if None not in ended or any(ended):
            return
        time.sleep(0.002)
    raise TimeoutError(f"{metrics}: a job took more than {patience:g} s")


def new_events(file: TextIO) -> Iterator[dict[str, Any]]:
    """The lines that a file of metrics has gained; not one that is still being written."""
    at = file.tell()
    while (line := file.readline()).endswith("\n"):
        at = file.tell()
        yield json.loads(line)
    file.seek(at)
