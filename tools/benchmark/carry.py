"""Sends bytes to the next of some addresses and takes as many from the one before: what a link does without a program.

python tools/benchmark/carry.py BYTES ADDRESS ADDRESS …      # on each of them; prints the seconds
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 9650


def main() -> None:
    size, addresses = int(sys.argv[1]), sys.argv[2:]
    door, here = opened(addresses)
    following = addresses[(here + 1) % len(addresses)]
    out = reached(following)
    taken, _ = door.accept()
    out.sendall(b"!")  # both of its ends are there
    taken.recv(1)
    begun = time.perf_counter()
    sender = threading.Thread(target=out.sendall, args=(bytes(size),))
    sender.start()
    left, memory = size, bytearray(1 << 20)
    while left:
        left -= taken.recv_into(memory, min(left, len(memory)))
    sender.join()
    print(time.perf_counter() - begun)


def opened(addresses: list[str]) -> tuple[socket.socket, int]:
    """A listening socket at the one address that is this node's, and its number."""
    for number, address in enumerate(addresses):
        try:
            return socket.create_server((address, PORT)), number
        except OSError:
            continue
    raise OSError(f"none of {addresses} is this node's")


def reached(address: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    main()
