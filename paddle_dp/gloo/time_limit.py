"""How long gloo waits for a late peer: as long as we say, where Paddle has 30 s and no way to change it.

Paddle (3.3.1) makes the gloo context of a group in C++, where no option of Python's arrives, and gloo takes its time
limit from that context at every collective: those of DataParallel's reducer, too, which no patch in Python reaches. The
context is reached through the library's own symbols, pointer by pointer (`WAY`), and every step is checked before the
next: nothing is written unless each object is of the class that it is taken for, all are of the same rank and number of
ranks, and what stands where the limit is written is what gloo's `getTimeout` says. Where any of it is otherwise
(another Paddle, another system), the 30 s stay, and the user is told why.

Nothing is searched for. A group has *two* gloo contexts (`ProcessGroupGloo` makes one more that no collective uses),
and a search among the words behind an object meets the second one whenever malloc puts them side by side.
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
MADE = "_ZGVZN3phi11distributed18CommContextManager11GetInstanceEvE8instance"
HAS = "_ZNK3phi11distributed18CommContextManager3HasERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GET = HAS.replace("3Has", "3Get")
GET_LIMIT = "_ZNK4gloo7Context10getTimeoutEv"
SET_LIMIT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
TOP = 1 << 47  # no address of a process lies above


@dataclass(frozen=True)
class _Class:
    """A C++ class: its name, the symbol of its virtual methods' table, and where in an object the next step is."""

    name: str
    table: str
    offset: int


# Offsets of Paddle 3.3.1, as its own code has them: GlooCommContext's constructor stores gloo_context_ at 0x10,
# gloo::Context::getPair reads transportContext_ at 0x28, connectFullMesh copies the limit to 0x50 of what it made.
# The transport counts by its copy where a collective has no limit of its own.
WAY = (
    _Class("phi::distributed::GlooCommContext", "_ZTVN3phi11distributed15GlooCommContextE", 0x10),
    _Class("gloo::rendezvous::Context", "_ZTVN4gloo10rendezvous7ContextE", 0x28),
    _Class("gloo::transport::tcp::Context", "_ZTVN4gloo9transport3tcp7ContextE", 0x50),
)


class _String(ctypes.Structure):
    """std::string of libstdc++ (its ABI since GCC 5), of up to 15 characters, which stand in the object itself."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t), ("text", ctypes.c_char * 16))


class _NotThereError(Exception):
    """What stands in the way of the limit; nothing has been written."""


def wait_for(group: int, seconds: float) -> None:
    """Lets every collective of the gloo group with this id wait `seconds` for a peer.

    Where that cannot be done the group keeps gloo's 30 s, and the screen says so and why: each reason once.
    """
    try:
        _Gloo().wait_for(str(group), int(seconds * 1000))
    except (OSError, AttributeError, ValueError, _NotThereError) as error:  # no such library, symbol or /proc
        _tell(str(error))


@cache
def _tell(reason: str) -> None:
    print(
        f"a rank that is 30 s late ends the job: gloo's time limit cannot be set in this Paddle ({reason})",
        flush=True,
    )


class _Gloo:
    """The library's symbols, and this process's memory as far as it can be read without harm."""

    def __init__(self) -> None:
        import paddle

        path = Path(paddle.__file__).parent / LIBRARY
        if not path.exists():
            raise OSError(f"no {path}")
        self.library = ctypes.CDLL(str(path))  # loaded already: this only counts one user more
        self.has = self._function(HAS, ctypes.c_bool, ctypes.POINTER(_String))
        self.get = self._function(GET, ctypes.c_void_p, ctypes.POINTER(_String))
        self.get_limit = self._function(GET_LIMIT, ctypes.c_int64)
        self.set_limit = self._function(SET_LIMIT, None, ctypes.c_int64)

    def wait_for(self, key: str, milliseconds: int) -> None:
        address, objects, ranks = self._registered(key), [], set()
        for step in WAY:
            objects.append(address)
            table, rank_and_ranks = self._words(address, 0, 2, step.name)
            if table != self._table(step):
                raise _NotThereError(f"no {step.name} where 3.3.1 has one")
            ranks.add(rank_and_ranks)
            (address,) = self._words(address, step.offset, 1, step.name)
        context, transport, copy = objects[1], objects[2], address
        if len(ranks) != 1:
            raise _NotThereError("its objects are of different groups")
        if (limit := self.get_limit(context)) != copy:
            raise _NotThereError(f"gloo's limit is {limit} ms, its transport's {copy}")
        self.set_limit(context, milliseconds)
        ctypes.c_int64.from_address(transport + WAY[-1].offset).value = milliseconds

    def _registered(self, key: str) -> int:
        """The address of Paddle's own object for the group with this id."""
        # A manager that nobody has asked for yet has not been constructed: it is only the room for one.
        if not ctypes.c_uint8.in_dll(self.library, MADE).value:
            raise _NotThereError("Paddle has no groups yet")
        manager, name = ctypes.c_void_p(self._address(MANAGER)), _String(size=len(key), text=key.encode())
        name.at = ctypes.addressof(name) + _String.text.offset
        if len(key) > 15 or not self.has(manager, ctypes.byref(name)):
            raise _NotThereError(f"Paddle has no group {key}")
        return int(self.get(manager, ctypes.byref(name)))

    def _function(self, symbol: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
        function = getattr(self.library, symbol)
        function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        return function

    def _address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))

    def _table(self, of: _Class) -> int:
        """What an object of this class begins with: its methods, behind the table's own offset and type."""
        return self._address(of.table) + 16

    def _words(self, address: int, offset: int, count: int, name: str) -> tuple[int, ...]:
        """`count` words of an object. Raises _NotThereError where no memory can be read there."""
        read = self._read(address + offset, 8 * count)
        if read is None or len(read) < 8 * count:
            raise _NotThereError(f"{name}: nothing can be read at {address + offset:#x}")
        return struct.unpack(f"<{count}Q", read)

    @staticmethod
    def _read(address: int, size: int) -> bytes | None:
        """Through the kernel, which answers with an error where a wild address would end the process."""
        if not 4096 < address < TOP or address % 8:
            return None
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            return os.pread(memory, size, address)
        except OSError:
            return None
        finally:
            os.close(memory)
