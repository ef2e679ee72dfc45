"""Published ResNet-50 trainings of Paddle, one card and eight, beside forecasts from the operators of the model.

The published runs in 16 bits fuse a BatchNorm with the addition and the ReLU behind it, which this package does not:
their forecasts leave these kernels out. Those in float32 fuse nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.model.traced import traced_model
from paddle_dp.part import find
from paddle_dp.plan.candidates import Candidate, Numerics
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.kernel_time import SHEET
from paddle_dp.plan.memory import Widths
from paddle_dp.plan.traced_model import TracedModel, traced_step_time

DEVICE_NAMES = {"V100-32GB": "v100-32", "V100-16GB": "v100-16", "DGX A100-80GB": "a100-80"}
UNSAID_BATCH = 256  # NVIDIA's tables do not have it; their scripts do


@dataclass(frozen=True, kw_only=True)
class ConvolutionalRun:
    """One published run: seconds of a step, `measured` and `foretold`."""

    name: str
    measured: float
    foretold: float

    @property
    def ratio(self) -> float:
        return self.measured / self.foretold


def convolutional_runs(rows: list[dict[str, Any]]) -> Iterator[ConvolutionalRun]:
    """The runs on one node, in the order of the rows."""
    plain = resnet50()
    for row in rows:
        if row.get("model") != "ResNet-50" or row["cards"] > 8:
            continue
        low = row["precision"] in ("amp", "fp16 O2")
        batch = row.get("local_batch") or UNSAID_BATCH
        numerics = Numerics(
            low=low, widths=Widths.for_states(1, low=row["precision"] == "fp16 O2"), flash=False
        )
        choice = Candidate(degrees=Degrees(data=row["cards"]), micro=batch, micro_batches=1)
        device = DEVICES[DEVICE_NAMES[row["device"].partition(",")[0]]]
        step = traced_step_time(fused(plain) if low else plain, [choice], device, numerics, SHEET)
        name = f"{row['source'].split()[0]}, {device.name}, {row['precision']}, {row['cards']}"
        yield ConvolutionalRun(
            name=name, measured=batch * row["cards"] / row["samples_per_s"], foretold=float(step.seconds[0])
        )


@cache
def resnet50() -> TracedModel:
    return traced_model(find("models", "resnet")(depth=50).build, [((3, 224, 224), "float32")])


def fused(model: TracedModel) -> TracedModel:
    """The model where a ReLU moves nothing, and an addition reads only the numbers that it adds."""
    costs = {"relu": 0.0, "add": 0.5}
    operators = tuple(
        replace(each, read=costs[each.name] * each.read, written=0.0) if each.name in costs else each
        for each in model.operators
    )
    return replace(model, operators=operators)
