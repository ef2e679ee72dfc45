"""Sets how long gloo waits for a late peer, which is a fixed 30 s in Paddle.

Paddle (3.3.1) creates a group's gloo context in C++, and gloo reads the limit from it at every collective, also for
DataParallel's reducer, which no patch in Python reaches. The context is reached through the library's symbols, pointer
by pointer (`CHAIN`). Nothing is written unless each object has the expected class, all have the same rank and number of
ranks, and the value to be overwritten equals the result of gloo's `getTimeout`. If any check fails (another Paddle,
another system), the limit stays 30 s and the reason is printed.

The memory is not searched: a group has *two* gloo contexts (`ProcessGroupGloo` creates one that no collective uses),
and a search could find the wrong one.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIBRARY = "libs/libphi_core.so"
MANAGER = "_ZZN3phi11distributed18CommContextManager11GetInstanceEvE8instance"
CONSTRUCTED = "_ZGVZN3phi11distributed18CommContextManager11GetInstanceEvE8instance"  # its guard variable
HAS = "_ZNK3phi11distributed18CommContextManager3HasERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GET = HAS.replace("3Has", "3Get")
GET_LIMIT = "_ZNK4gloo7Context10getTimeoutEv"
SET_LIMIT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
TOP = 1 << 47  # all addresses of a process are below


@dataclass(frozen=True)
class _Class:
    """A C++ class: its name, the symbol of its vtable, and the offset of an object's pointer to the next object."""

    name: str
    vtable: str
    offset: int


# Offsets of Paddle 3.3.1, read from its machine code: GlooCommContext's constructor stores gloo_context_ at 0x10,
# gloo::Context::getPair reads transportContext_ at 0x28, connectFullMesh copies the limit to 0x50 of the transport.
# The transport uses its copy for collectives without a separate limit.
CHAIN = (
    _Class("phi::distributed::GlooCommContext", "_ZTVN3phi11distributed15GlooCommContextE", 0x10),
    _Class("gloo::rendezvous::Context", "_ZTVN4gloo10rendezvous7ContextE", 0x28),
    _Class("gloo::transport::tcp::Context", "_ZTVN4gloo9transport3tcp7ContextE", 0x50),
)


class _String(ctypes.Structure):
    """A std::string of libstdc++ (its ABI since GCC 5) of up to 15 characters, which the object itself stores."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t), ("text", ctypes.c_char * 16))


class _UnknownLayoutError(Exception):
    """The limit cannot be set, for this reason; nothing has been written."""


def set_time_limit(group: int, seconds: float) -> None:
    """Lets every collective of the gloo group with this id wait `seconds` for a peer.

    If that is not possible, the group keeps gloo's 30 s, and each reason is printed once.
    """
    try:
        _Gloo().set_time_limit(str(group), int(seconds * 1000))
    except (OSError, AttributeError, ValueError, _UnknownLayoutError) as error:  # no library, symbol, /proc
        _print_once(str(error))


@cache
def _print_once(reason: str) -> None:
    print(
        f"a rank that is 30 s late ends the job: gloo's time limit cannot be set in this Paddle ({reason})",
        flush=True,
    )


class _Gloo:
    """The library's symbols, and checked reads of this process's memory."""

    def __init__(self) -> None:
        import paddle

        path = Path(paddle.__file__).parent / LIBRARY
        if not path.exists():
            raise OSError(f"no {path}")
        self.library = ctypes.CDLL(str(path))  # loaded already: this only adds a reference
        self.has = self._function(HAS, ctypes.c_bool, ctypes.POINTER(_String))
        self.get = self._function(GET, ctypes.c_void_p, ctypes.POINTER(_String))
        self.get_limit = self._function(GET_LIMIT, ctypes.c_int64)
        self.set_limit = self._function(SET_LIMIT, None, ctypes.c_int64)

    def set_time_limit(self, key: str, milliseconds: int) -> None:
        address, objects, ranks = self._registered(key), [], set()
        for step in CHAIN:
            objects.append(address)
            vtable, rank_and_ranks = self._read_integers(address, 0, 2, step.name)
            if vtable != self._vtable(step):
                raise _UnknownLayoutError(f"no {step.name} where 3.3.1 has one")
            ranks.add(rank_and_ranks)
            (address,) = self._read_integers(address, step.offset, 1, step.name)
        context, transport, copy = objects[1], objects[2], address
        if len(ranks) != 1:
            raise _UnknownLayoutError("its objects are of different groups")
        if (limit := self.get_limit(context)) != copy:
            raise _UnknownLayoutError(f"gloo's limit is {limit} ms, its transport's {copy}")
        self.set_limit(context, milliseconds)
        ctypes.c_int64.from_address(transport + CHAIN[-1].offset).value = milliseconds

    def _registered(self, key: str) -> int:
        """Returns the address of Paddle's object for the group with this id."""
        # The manager is a static variable: before its first use it is uninitialized memory.
        if not ctypes.c_uint8.in_dll(self.library, CONSTRUCTED).value:
            raise _UnknownLayoutError("Paddle has no groups yet")
        manager, name = ctypes.c_void_p(self._address(MANAGER)), _String(size=len(key), text=key.encode())
        name.at = ctypes.addressof(name) + _String.text.offset
        if len(key) > 15 or not self.has(manager, ctypes.byref(name)):
            raise _UnknownLayoutError(f"Paddle has no group {key}")
        return int(self.get(manager, ctypes.byref(name)))

    def _function(self, symbol: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
        function = self.library[symbol]
        function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        return function

    def _address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))

    def _vtable(self, kind: _Class) -> int:
        """Returns the first word of an object of this class: the vtable's methods, after its offset and type."""
        return self._address(kind.vtable) + 16

    def _read_integers(self, address: int, offset: int, count: int, name: str) -> tuple[int, ...]:
        """Reads `count` words of an object. Raises _UnknownLayoutError if that memory cannot be read."""
        data = self._read(address + offset, 8 * count)
        if data is None or len(data) < 8 * count:
            raise _UnknownLayoutError(f"{name}: nothing can be read at {address + offset:#x}")
        return struct.unpack(f"<{count}Q", data)

    @staticmethod
    def _read(address: int, size: int) -> bytes | None:
        """Reads through the kernel: a bad pointer returns an error and does not crash the process."""
        if not 4096 < address < TOP or address % 8:
            return None
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            return os.pread(memory, size, address)
        except OSError:
            return None
        finally:
            os.close(memory)
