"""Model FLOPs utilisation: the share of the devices' peak that the model uses.

MFU = samples per second × FLOPs of one sample ÷ (ranks × peak), as in PaLM (arXiv:2204.02311, appendix B).

The FLOPs of a sample are counted on the model's traced program (`model.traced`), without running it: matrix products
and convolutions of forward and backward; a multiply and an add count as two. Recomputation and other operations do not
count; attention counts in full, causal or not. For a decoder this is the paper's 6N + 12LHQT per token, with N weights
in products. Gradients that nobody needs, of frozen weights and of the model's input, do not count.

The peaks are dense 16-bit products (bfloat16 or float16, float32 sums) by NVIDIA's data sheets (later ones print twice
as much, with sparsity): V100 (2020), T4 (2019), A100, A10, A30, A40 (2021), H100, L4, L40S (2023), H200 (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddle_dp.data.randomness import restoring_globals, seed_sample
from paddle_dp.data.sample import read_sample
from paddle_dp.train import Run

# The first entry with all its words in the device's name applies.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12, "H200": 989e12,
    "A100": 312e12, "A40": 149.7e12, "A30": 165e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "V100-PCIE": 112e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def peak_of(name: str) -> float | None:
    """The peak of the device with this name ("NVIDIA A100-SXM4-80GB"), or None if the table lacks it."""
    tokens = name.replace("-", " ").replace("_", " ").lower().split()
    known = (name for name in PEAKS if {*name.replace("-", " ").lower().split()} <= {*tokens})
    return PEAKS.get(next(known, ""))


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """`flops` of a sample's forward and backward, and the `peak` of one rank's devices together, per second."""

    flops: int
    peak: float

    def curves(self, numbers: Mapping[str, float], ranks: int) -> dict[str, float]:
        if "samples_per_second" not in numbers:
            return {}
        done = numbers["samples_per_second"] * self.flops
        return {"speed/model_flops_utilisation": done / (ranks * self.peak)}

    def __str__(self) -> str:
        return f"{self.flops / 1e9:.4g} GFLOP a sample, forward and backward; peak {self.peak / 1e12:g} TFLOP/s a rank"


def has_peak(run: Run, peak_flops: float | None) -> bool:
    """True if a peak is given, or the device may be in the table."""
    return run.recipe is not None and (peak_flops is not None or run.mesh.device.startswith("gpu"))


def count(run: Run, peak_flops: float | None) -> Utilisation | str:
    """The utilisation of this run's model, or the reason why it is unknown."""
    import paddle

    from paddle_dp.model.traced import traced_model

    peak = peak_flops or peak_of(paddle.device.get_device_name())
    if peak is None or run.recipe is None:
        return "the peak of this device is not known: set the dashboard's peak_flops"
    dataset = run.train_loader.dataset
    with restoring_globals():
        seed_sample(run.train_loader.sampler.seed, 0, 0)
        sample, _ = read_sample(dataset, 0)
    if isinstance(sample, (dict, tuple)):
        return "the model's FLOPs were not counted: it reads several inputs"
    try:
        flops = traced_model(run.recipe.build_model, [(sample.shape, str(sample.dtype))]).flops
    except Exception as error:  # noqa: BLE001 - tracing may fail in any way, for a model that trains well
        return f"the model's FLOPs were not counted: {type(error).__name__}: {error}"
    devices = 1 if run.mesh.computes_on == "cpu" else run.recipe.strategy.config.accelerators
    return Utilisation(flops=round(flops), peak=devices * peak)
