"""More nodes from one: seconds on n cards from those on 1 and 8, held against published series of Paddle.

    t(n) = t(1) + e(8) + exposed(n) + jitter · t(1) · log2(n / 8)                  n > 8, a fixed batch for each card
    t(n) = t(8) · 8/n · (1 + jitter · log2(n / 8)) + exposed(n)                    a fixed global batch

e(8) = t(8) − t(1) is the node's own loss. exposed(n): the gradients' ring over the nodes' network cards, less what runs
beside backward, if e(8) shows that the software overlaps at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any

from paddle_dp.plan.scaling import LINK_SHARE, OVERLAPS, ring_share, step_beyond

PARAMETERS = {
    "ResNet-50": 25.6e6, "BERT base": 110e6, "BERT base s128": 110e6, "BERT large": 336e6, "HRNet W18": 21.3e6,
    "Transformer big (tokens/s)": 213e6, "DeepLabV3+": 26.8e6,
}  # fmt: skip
NODE = 8


@dataclass(frozen=True, kw_only=True)
class Series:
    """One published series: `seconds` by number of cards, `size` bytes of gradients, `link` bytes/s of a node's cards.
    `strong`: the global batch is fixed."""

    owner: str
    name: str
    size: float
    link: float
    seconds: dict[int, float]
    strong: bool

    def forecast(self, cards: int) -> float:
        """Seconds of a step on so many cards, more than a node's, from those on 1 (weak scaling) and 8."""
        nodes, node_seconds = cards / NODE, self.seconds[NODE]
        ring = ring_share(nodes) * self.size / (LINK_SHARE * self.link)
        if self.strong:
            return step_beyond(node_seconds / nodes, 0.0, ring, log2(nodes), overlaps=True)
        single = self.seconds[1]
        loss = max(0.0, node_seconds - single)
        return step_beyond(single, loss, ring, log2(nodes), overlaps=loss < OVERLAPS * single)

    def points(self) -> Iterator[tuple[int, float, float]]:
        """(cards, measured efficiency, foretold efficiency) beyond one node, as shares of the first number of cards."""
        first = min(self.seconds)
        for cards, seconds in self.seconds.items():
            if cards > NODE:
                base = self.seconds[first] * (first / cards if self.strong else 1)
                yield cards, base / seconds, base / self.forecast(cards)


def series(rows: list[dict[str, Any]]) -> Iterator[Series]:
    """The published rows in samples a second, by source, model, precision and batch."""
    rows = [row for row in rows if "samples_per_s" in row and row["model"] in PARAMETERS]
    for (source, model, precision, length, local), group in itertools.groupby(
        rows,
        lambda row: (row["source"], row["model"], row["precision"], row.get("seq"), row.get("local_batch")),
    ):
        points = list(group)
        strong = "batch" in points[0]
        if not strong and local is None:
            continue
        owner = next(owner for owner in ("NVIDIA", "DLPerf", "Perf") if owner in source)
        seconds = {
            p["cards"]: (p["batch"] if strong else local * p["cards"]) / p["samples_per_s"] for p in points
        }
        batch = f"{length} tokens, batch {points[0]['batch']}" if strong else f"batch {local} a card"
        yield Series(
            owner=owner, name=f"{model} {precision}, {batch}", seconds=seconds, strong=strong,
            size=PARAMETERS[model] * (2 if "O2" in precision else 4), link=200e9 if strong else 12.5e9,
        )  # fmt: skip
