"""How long gloo waits for a late peer: as long as we say, where Paddle has 30 s and no way to change it.

Paddle (3.3.1) makes the gloo context of a group in C++, where no option of Python's arrives, and gloo takes its time
limit from that context at every collective: those of DataParallel's reducer, too, which no patch in Python reaches. The
context is found through the library's own symbols, each step is checked before the next, and nothing is written unless
what stands there is what gloo's `getTimeout` says it is. Where any of it is otherwise (another Paddle, another system),
the 30 s stay, and the caller is told.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

LIBRARY = "libs/libphi_core.so"
MANAGER = "_ZZN3phi11distributed18CommContextManager11GetInstanceEvE8instance"
MADE = "_ZGVZN3phi11distributed18CommContextManager11GetInstanceEvE8instance"
HAS = "_ZNK3phi11distributed18CommContextManager3HasERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GET = HAS.replace("3Has", "3Get")
OF_PADDLE = "_ZTVN3phi11distributed15GlooCommContextE"
OF_GLOO = "_ZTVN4gloo10rendezvous7ContextE"
OF_TRANSPORT = "_ZTVN4gloo9transport3tcp7ContextE"
GET_LIMIT = "_ZNK4gloo7Context10getTimeoutEv"
SET_LIMIT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
WORDS = 32  # of an object, among which its members are looked for
TOP = 1 << 47  # no address of a process lies above


class _String(ctypes.Structure):
    """std::string of libstdc++ (its ABI since GCC 5), of up to 15 characters, which stand in the object itself."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t), ("text", ctypes.c_char * 16))


def wait_for(group: int, seconds: float) -> bool:
    """Lets every collective of the gloo group with this id wait `seconds` for a peer; False where it cannot be done."""
    try:
        return _Gloo().wait_for(str(group), int(seconds * 1000))
    except (OSError, AttributeError, ValueError):  # no such library, symbol or /proc
        return False


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

    def wait_for(self, key: str, milliseconds: int) -> bool:
        # A manager that nobody has asked for yet has not been constructed: it is only the room for one.
        if not ctypes.c_uint8.in_dll(self.library, MADE).value:
            return False
        manager, name = ctypes.c_void_p(self._address(MANAGER)), _String(size=len(key), text=key.encode())
        name.at = ctypes.addressof(name) + _String.text.offset
        if len(key) > 15 or not self.has(manager, ctypes.byref(name)):
            return False
        of_paddle = self.get(manager, ctypes.byref(name))
        if self._table(of_paddle) != self._table_of(OF_PADDLE):
            return False
        limits = []
        for context in self._members(of_paddle, OF_GLOO):
            before = self.get_limit(context)
            for transport in self._members(context, OF_TRANSPORT):
                # The transport has a copy of the limit, and counts by it where a collective has none of its own.
                limits += [
                    (context, transport + 8 * i) for i, word in self._words(transport) if word == before
                ]
        if len(limits) != 1:
            return False
        context, copy = limits[0]
        self.set_limit(context, milliseconds)
        ctypes.c_int64.from_address(copy).value = milliseconds
        return bool(self.get_limit(context) == milliseconds)

    def _function(self, symbol: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
        function = getattr(self.library, symbol)
        function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        return function

    def _address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))

    def _table_of(self, symbol: str) -> int:
        return (
            self._address(symbol) + 16
        )  # behind the offset and the type that a table of virtual methods begins with

    def _table(self, address: int) -> int | None:
        """What an object at `address` begins with, or None where nothing can be read."""
        read = self._read(address, 8)
        return None if read is None else int(struct.unpack("<Q", read)[0])

    def _members(self, address: int, symbol: str) -> list[int]:
        """The objects of one class that an object points at."""
        table = self._table_of(symbol)
        return list(dict.fromkeys(word for _, word in self._words(address) if self._table(word) == table))

    def _words(self, address: int) -> Iterator[tuple[int, int]]:
        read = self._read(address, 8 * WORDS) or b""
        yield from enumerate(struct.unpack(f"<{len(read) // 8}Q", read))

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
