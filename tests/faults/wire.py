"""A cable between two network namespaces that is carried by hand: it delays packets, or loses them, at either end.

Each end is a TUN device, whose packets a thread of this process reads and writes into the other one. So it needs no
queueing discipline of the kernel (netem is missing in many). Needs root.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.faults.namespaces import NODES, ip

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MTU = 9000


class Wire:
    """The cable's two ends, in `spaces`. `delay`: seconds of each packet; `dead`: ends whose packets are lost."""

    def __init__(self, spaces: list[str]):
        self.spaces, self.delay, self.dead = spaces, 0.0, set[int]()
        self._ends = [_end(space, number) for number, space in enumerate(spaces)]
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join(5.0)
        for end in (*self._ends, self._wake):
            os.close(end)

    def _carry(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []  # when, order, to which end, packet
        order = 0
        while True:
            pause = max(0.0, due[0][0] - time.monotonic()) if due else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], pause)
            if self._wake in ready:
                return
            now = time.monotonic()
            for number, end in enumerate(self._ends):
                if end in ready:
                    packet = os.read(end, 1 << 16)
                    if number not in self.dead:
                        order += 1
                        heapq.heappush(due, (now + self.delay, order, 1 - number, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, number, packet = heapq.heappop(due)
                with suppress(OSError):  # that end is gone
                    os.write(self._ends[number], packet)


def _end(space: str, number: int) -> int:
    name = f"pdw{os.getpid() % 100000}{'ab'[number]}"
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    ip(f"link set {name} netns {space}")
    ip(f"-n {space} address add {NODES[number]}/24 dev {name}")
    ip(f"-n {space} link set {name} mtu {_MTU} up")
    ip(f"-n {space} link set lo up")
    return device


@contextmanager
def wired() -> Iterator[Wire]:
    """Two namespaces, joined by a wire."""
    names = [f"paddle-dp-{os.getpid()}-{number}" for number in range(2)]
    wire = None
    try:
        for name in names:
            ip(f"netns add {name}")
        wire = Wire(names)
        yield wire
    finally:
        if wire is not None:
            wire.close()
        for name in names:
            ip(f"netns del {name}")
