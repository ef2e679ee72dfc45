"""A machine's measured rates (`paddle-dp scale --probe FILE`): products by shape, kernels that move bytes, collectives.

A `Probe` stands for the data sheets of `plan/devices.py` and the shares of `plan/kernel_time.py`, which are for
machines that are not here: a `Device` and its `Rates`, whose shares are 1, since they are measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, log, log2
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.errors import UsageError
from paddle_dp.files import replacing
from paddle_dp.plan.devices import Device
from paddle_dp.plan.kernel_time import HOST_OPERATORS, Rates, filled
from paddle_dp.text import plural

FORMAT = "paddle_dp probe 1"
UNITS = {
    "seconds low high": "s, of one call: the median of the rounds, the fastest and the slowest round",
    "m n k": "a product of [m, k] and [k, n]", "transpose": "the operand that is transposed: x, y or none",
    "busy": "ranks that computed at once", "bytes": "read and written by a kernel; of the whole tensor of a collective",
}  # fmt: skip
SIDES = np.exp(np.linspace(log(1.0), log(512.0), 120))  # candidates of `Rates.side`
# Bytes of a block's token and number (`kernel_time._elementwise`).
MOVED = {"copy": 28, "add": 11, "layer_norm": 11}
LEAST_GAPS = 10  # a product that takes fewer calls of nothing measures the call
# Bytes that leave each rank, as a share of the whole tensor's (Patarasuk and Yuan 2009); a message goes one way.
RING_SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: the median of some rounds, and the fastest and the slowest round."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ProductTiming(Timing):
    """A product of [m, k] and [k, n], while `busy` ranks compute such a product. `transpose`: "", "x" or "y"."""

    m: int
    n: int
    k: int
    busy: int
    transpose: str = ""

    @property
    def rate(self) -> float:
        """FLOP/s of one rank."""
        return 2 * self.m * self.n * self.k / self.seconds

    def log_peak(self, side: float) -> float:
        """The logarithm of the rate over the share that the sides leave of it."""
        return log(self.rate / filled(self.m, self.n, self.k, side))


@dataclass(frozen=True, kw_only=True)
class KernelTiming(Timing):
    """An operation that reads and writes `bytes` in all, while `busy` ranks do so. "tiny" is a call on one number."""

    operation: str
    bytes: int
    busy: int

    @property
    def rate(self) -> float:
        """Bytes/s of one rank."""
        return self.bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming(Timing):
    """A collective of `ranks` ranks on a tensor of `bytes` in all; "send": one message from a rank to another."""

    operation: str
    ranks: int
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes/s that leave each rank."""
        share = RING_SHARES.get(self.operation)
        return (1.0 if share is None else share * (self.ranks - 1) / self.ranks) * self.bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measurements on one machine, on one rank alone and on `ranks` of them at once.

    `kind`: of the device ("cpu", "gpu" …); `dtype`: of products and kernels; `threads` of a rank on a CPU; `memory`:
    bytes of a card, or of the machine's memory for a rank; `node`: ranks that the machine has a device or processors
    for; `machine` and `versions`: as `paddle-dp doctor --prove` writes them; `library`: of the collectives.
    """

    kind: str
    dtype: str
    ranks: int
    node: int
    threads: int
    memory: float
    library: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    products: tuple[ProductTiming, ...]
    kernels: tuple[KernelTiming, ...]
    collectives: tuple[CollectiveTiming, ...]

    @property
    def name(self) -> str:
        """The device as a person calls it."""
        cards = sorted({str(card.get("model")) for card in self.machine.get("cards", ())})
        name = ", ".join(cards) if cards and self.kind != "cpu" else self.machine.get("processor", "CPU")
        return f"{name} (measured)"

    def device(self) -> Device:
        """The device of the tables' type, by its rates while all ranks compute; its links are this machine's.

        `node_link` is as fast as all links of its ranks: another network has another `node_link`.
        """
        peak, link = self.peak(), self.link()
        return Device(
            name=self.name, family="", peak16=peak, peak32=peak, memory=self.memory, memory_rate=self.memory_rate(),
            card_link=link, node_link=link * self.node, node=self.node, bfloat16=self.dtype == "bfloat16",
            accelerator=self.kind != "cpu",
            source=f"measured on {self.ranks} ranks, Paddle {self.versions.get('paddle', '?')}",
        )  # fmt: skip

    def rates(self) -> Rates:
        """The constants of a forecast for `device()`: shares of 1, and the measured side, gap, launch and start."""
        tiny, memory = self.gap(), self.memory_rate()
        small = min(self._collectives("all_reduce"), key=_size, default=None)
        start = Rates().start if small is None else small.seconds / (2 * max(1.0, log2(small.ranks)))
        is_cpu = self.kind == "cpu"
        return Rates(
            gemm=1.0, side=self.side(), memory=1.0, activation=self.kernel_rate("gelu", memory) / memory,
            softmax=self.kernel_rate("softmax", memory) / memory, gap=tiny,
            host=0.0 if is_cpu else HOST_OPERATORS * tiny, card_link=1.0, start=start,
            hides=0.0 if is_cpu else Rates().hides, fixed=0.0,
        )  # fmt: skip

    def checked_rates(self, device: Device, dtype: str, ranks: int) -> Rates:
        """`rates()` for a plan in this number format on so many ranks of `device`, whose network may be another. Raises
        UsageError if the probe has another format, or has not measured the links that are needed."""
        if device.accelerator and self.dtype != dtype:
            raise UsageError(
                f"--measured: the probe has products of {self.dtype}, and this recipe computes in {dtype}: measure "
                f"with its recipe, or add train.precision={self.dtype}."
            )
        if ranks > 1 and not self.collectives:
            raise UsageError(
                f"--ranks {ranks}: the probe has 1 rank, and no collectives: measure with --ranks 2 or more."
            )
        node = min(self.node, device.node)
        if ranks > node and device.node_link == self.device().node_link:
            raise UsageError(
                f"--ranks {ranks}: the probe has the links of one machine with {plural(node, 'rank')}: add --link "
                "SPEED, the network of a machine, such as '10 Gbit/s'."
            )
        return self.rates()

    def peak(self) -> float:
        """FLOP/s that a large product approaches on each rank: the mean, in logarithms, of the measured rates over the
        share that their sides leave."""
        side = self.side()
        return exp(float(np.mean([each.log_peak(side) for each in self._plain()])))

    def side(self) -> float:
        """The side at which a product reaches half of its rate (`Rates.side`): the one that fits the measured ones
        best, in the ratio of seconds."""
        products = self._plain()

        def spread(side: float) -> float:
            return float(np.std([each.log_peak(side) for each in products]))

        return float(min(SIDES, key=spread))

    def memory_rate(self) -> float:
        """Bytes/s of one rank in the kernels between a block's products, by the bytes that each of them moves."""
        busiest = self._busiest(self.kernels)
        rates = {each.operation: each.rate for each in busiest if each.operation in MOVED}
        return sum(MOVED[name] for name in rates) / sum(MOVED[name] / rate for name, rate in rates.items())

    def kernel_rate(self, operation: str, default: float = 0.0) -> float:
        """Bytes/s of one rank in this operation; `default` if it was not measured."""
        busiest = self._busiest(self.kernels)
        return next((each.rate for each in busiest if each.operation == operation), default)

    def gap(self) -> float:
        """Seconds of a call that has nothing to do."""
        return next((each.seconds for each in self._busiest(self.kernels) if each.operation == "tiny"), 0.0)

    def link(self) -> float:
        """Bytes/s of a rank's link in a ring: of the largest all-reduce. 0 if none was measured."""
        largest = max(self._collectives("all_reduce"), key=_size, default=None)
        return 0.0 if largest is None else largest.rate

    def collective_seconds(self, operation: str, size: float) -> float:
        """Seconds of a collective of `ranks` ranks on `size` bytes: between two measured sizes by the line through
        their logarithms, outside them by the nearest one's. Raises KeyError for an operation that was not measured."""
        timings = sorted(self._collectives(operation), key=_size)
        if not timings:
            raise KeyError(operation)
        first, last = timings[0], timings[-1]
        if size <= first.bytes:
            return first.seconds
        if size >= last.bytes:
            return last.seconds * size / last.bytes
        sizes, seconds = [log(each.bytes) for each in timings], [log(each.seconds) for each in timings]
        return exp(float(np.interp(log(size), sizes, seconds)))

    def crowding(self) -> float:
        """The ratio of a rank's seconds while all ranks compute to its seconds alone, over products and kernels."""
        both: dict[tuple[Any, ...], dict[int, float]] = {}
        for product in self.products:
            shape = (product.m, product.n, product.k, product.transpose)
            both.setdefault(shape, {})[product.busy] = product.seconds
        for kernel in self.kernels:
            both.setdefault((kernel.operation,), {})[kernel.busy] = kernel.seconds
        ratios = [log(t[self.ranks] / t[1]) for t in both.values() if {1, self.ranks} <= t.keys()]
        return exp(float(np.median(ratios))) if ratios and self.ranks > 1 else 1.0

    def _plain(self) -> list[ProductTiming]:
        """The products of forwards that take longer than their call."""
        plain = [each for each in self._busiest(self.products) if not each.transpose]
        least = LEAST_GAPS * self.gap()
        return [each for each in plain if each.seconds > least] or [max(plain, key=lambda each: each.seconds)]

    def _collectives(self, operation: str) -> list[CollectiveTiming]:
        return [each for each in self.collectives if each.operation == operation]

    def _busiest(self, timings: Sequence[Any]) -> list[Any]:
        most = max(each.busy for each in timings)
        return [each for each in timings if each.busy == most]

    def as_fields(self) -> dict[str, Any]:
        return {"format": FORMAT, "units": UNITS, **asdict(self)}

    def write(self, file: Path) -> None:
        """Writes the probe as JSON, whole or not at all."""
        with replacing(file) as partial:
            partial.write_text(json.dumps(self.as_fields(), indent=1, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def read(cls, file: Path) -> Probe:
        """The probe in the file. Raises UsageError for a file that is none."""
        try:
            content = json.loads(file.read_text("utf-8"))
            if content["format"] != FORMAT:
                raise UsageError(
                    f"{file}: it is of the format {content['format']}, and {FORMAT} is read: measure again."
                )
            read = {each.name: content[each.name] for each in fields(cls)}
            kinds = {"products": ProductTiming, "kernels": KernelTiming, "collectives": CollectiveTiming}
            for name, kind in kinds.items():
                read[name] = tuple(kind(**row) for row in read[name])
            probe = cls(**read)
        except OSError as error:
            raise UsageError(
                f"{file}: {error.strerror}. Measure this machine: paddle-dp scale RECIPE --probe {file}"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"{file} is no probe: paddle-dp scale RECIPE --probe {file} writes one."
            raise UsageError(message) from None
        if not probe.products or not probe.kernels:
            raise UsageError(f"{file} has no products or no kernels: measure again.")
        return probe


def _size(timing: CollectiveTiming) -> int:
    return timing.bytes
