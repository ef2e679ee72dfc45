"""A probe gives the rates that it was made with, and a file that is none is refused at the door."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.plan.probe import CollectiveTiming, KernelTiming, Probe, ProductTiming

PEAK, SIDE, LINK = 100e9, 32.0, 2e9


def product(m: int, n: int, k: int, busy: int = 2, transpose: str = "", slower: float = 1.0) -> ProductTiming:
    filled = m / (m + SIDE) * n / (n + SIDE) * k / (k + SIDE)
    seconds = slower * 2 * m * n * k / (PEAK * filled)
    return ProductTiming(
        m=m, n=n, k=k, busy=busy, transpose=transpose, seconds=seconds, low=0.9 * seconds, high=2 * seconds
    )


def kernel(operation: str, rate: float, busy: int = 2) -> KernelTiming:
    seconds = 1e6 / rate
    return KernelTiming(
        operation=operation, bytes=10**6, busy=busy, seconds=seconds, low=seconds, high=seconds
    )


def reduced(size: int, ranks: int = 2) -> CollectiveTiming:
    seconds = 4e-4 + 2 * (ranks - 1) / ranks * size / LINK
    return CollectiveTiming(
        operation="all_reduce", ranks=ranks, bytes=size, seconds=seconds, low=seconds, high=seconds
    )


def probe(kind: str = "cpu", dtype: str = "float32", node: int = 2, ranks: int = 2) -> Probe:
    sides = (64, 128, 256, 1024)
    products = [product(side, side, side, busy) for side in sides for busy in sorted({1, ranks})]
    tiny = [
        KernelTiming(operation="tiny", bytes=12, busy=b, seconds=2e-6, low=1e-6, high=9e-6)
        for b in {1, ranks}
    ]
    kernels = [kernel("copy", 4e9, b) for b in {1, ranks}] + [kernel("gelu", 1e9, ranks), *tiny]
    sizes = (1 << 16, 1 << 20, 1 << 26) if ranks > 1 else ()
    return Probe(
        kind=kind, dtype=dtype, ranks=ranks, node=node, threads=1, memory=8e9, library="gloo",
        machine={"processor": "EPYC", "processors": 2, "memory": 16e9, "cards": []}, versions={"paddle": "3.3.1"},
        products=tuple(products), kernels=tuple(kernels), collectives=tuple(map(reduced, sizes)),
    )  # fmt: skip


def test_device_and_rates_are_those_of_the_measurements() -> None:
    device, rates = probe().device(), probe().rates()
    assert device.peak16 == device.peak32 == pytest.approx(PEAK, rel=0.02)
    assert rates.side == pytest.approx(SIDE, rel=0.03)
    assert device.memory_rate == pytest.approx(4e9)
    assert rates.activation == pytest.approx(0.25) and rates.softmax == 1.0  # which was not measured
    assert device.card_link == pytest.approx(LINK, rel=0.02)
    assert (rates.gemm, rates.memory, rates.card_link, rates.hides) == (1.0, 1.0, 1.0, 0.0)
    assert not device.accelerator and device.family == ""


def test_calls_of_nothing_and_backward_shapes_do_not_make_the_peak() -> None:
    """A product of 8 numbers takes its call, and one of a transposed operand is another kernel."""
    base = probe()
    small = ProductTiming(m=2, n=2, k=2, busy=2, seconds=2e-6, low=2e-6, high=2e-6)
    slow = product(512, 512, 512, transpose="y", slower=5.0)
    more = Probe(**{**vars(base), "products": (*base.products, small, slow)})
    assert more.peak() == pytest.approx(base.peak()) and more.side() == base.side()


def test_collectives_are_foretold_between_their_sizes_and_beyond() -> None:
    first, middle, last = probe().collectives
    assert probe().collective_seconds("all_reduce", first.bytes) == first.seconds
    assert probe().collective_seconds("all_reduce", 1.0) == first.seconds  # it still has to start
    assert probe().collective_seconds("all_reduce", 10 * last.bytes) == pytest.approx(10 * last.seconds)
    between = probe().collective_seconds("all_reduce", (middle.bytes * last.bytes) ** 0.5)
    assert log(between) == pytest.approx((log(middle.seconds) + log(last.seconds)) / 2)
    with pytest.raises(KeyError):
        probe().collective_seconds("all_to_all", 1.0)


def test_crowding_is_the_ratio_of_all_ranks_to_one() -> None:
    crowded = tuple(product(256, 256, 256, busy, slower=1.5 if busy == 2 else 1.0) for busy in (1, 2))
    assert Probe(**{**vars(probe()), "products": crowded, "kernels": ()}).crowding() == pytest.approx(1.5)
    assert probe(ranks=1).crowding() == 1.0


def test_a_file_gives_the_probe_back(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    probe().write(file)
    assert Probe.read(file) == probe()
    assert "s, of one call" in json.loads(file.read_text())["units"]["seconds low high"]


@pytest.mark.parametrize("change", [None, "[]", "{}", "format", "products", "row"])
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, change: str | None) -> None:
    file, content = tmp_path / "probe.json", probe().as_fields()
    if change == "format":
        content["format"] = "paddle_dp probe 0"
    elif change == "products":
        content["products"] = []
    elif change == "row":
        content["products"] = [{"m": 1}]
    if change is not None:
        file.write_text(change if change in ("[]", "{}") else json.dumps(content))
    with pytest.raises(UsageError, match=r"(scale RECIPE --probe|measure again)"):
        Probe.read(file)
