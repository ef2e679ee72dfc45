"""Peak FLOP/s of devices by name: dense 16-bit products (bfloat16 or float16, float32 sums).

From NVIDIA's data sheets (the later ones print twice as much, with sparsity): V100 (2020), T4 (2019), A100, A10, A30,
A40 (2021), H100, L4, L40S (2023), H200 (2024).
"""

from __future__ import annotations

# The first entry whose words are all in the device's name applies.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_of(name: str) -> float | None:
    """The peak of the device of this name ("NVIDIA A100-SXM4-80GB"), or None if it is not in the table."""
    words = name.replace("-", " ").replace("_", " ").lower().split()
    for known, peak in PEAKS:
        if all(word in words for word in known.replace("-", " ").lower().split()):
            return peak
    return None
