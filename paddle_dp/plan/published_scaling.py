"""Published scaling of trainings with Paddle to 256 cards: seconds of a step by number of cards.

The same rows as `tools/planner/published_runs.jsonl`, which has their addresses; a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

NODE = 8  # cards of a node in all of these


@dataclass(frozen=True, kw_only=True)
class PublishedSeries:
    """One training: `size` bytes of gradients, `link` bytes/s of a node's network, `seconds` of a step by number of
    cards. `strong`: the global batch is fixed."""

    owner: str
    name: str
    size: float
    link: float
    seconds: dict[int, float]
    strong: bool = False

    def efficiencies(self) -> dict[int, float]:
        """The share of its cards that each number of them puts to use, of the first number of cards."""
        first, begin = min(self.seconds.items())
        return {n: begin * (first / n if self.strong else 1) / t for n, t in self.seconds.items()}


OWNERS = {
    "Perf": "PaddlePaddle/Perf, Paddle 2, V100, 100 Gbit/s",
    "DLPerf": "Oneflow-Inc/DLPerf, Paddle 1.8, V100, 100 Gbit/s",
    "NVIDIA": "NVIDIA/DeepLearningExamples, Paddle, A100",
}
_SECONDS = {  # (training, bytes of gradients): seconds of a step by number of cards
    "Perf": {
        ("ResNet-50 fp32, batch 256 a card", 102.4e6): {1: 0.65047, 8: 0.67829, 32: 0.74578},
        ("ResNet-50 fp16 O2, batch 256 a card", 51.2e6): {1: 0.17796, 8: 0.18726, 32: 0.20494},
        ("BERT base s128 fp32, batch 96 a card", 440e6): {1: 0.58229, 8: 0.5814, 32: 0.63604},
        ("BERT base s128 amp, batch 96 a card", 440e6): {1: 0.14422, 8: 0.1434, 32: 0.15318},
        ("Transformer big fp32, batch 5120 a card", 852e6): {1: 0.58117, 8: 0.64569, 32: 0.84436},
        ("Transformer big fp16 O2, batch 5120 a card", 426e6): {1: 0.15477, 8: 0.18202, 32: 0.24154},
        ("HRNet W18 fp32, batch 8 a card", 85.2e6): {1: 0.41178, 8: 0.54605, 32: 0.59813},
        ("DeepLabV3+ fp32, batch 4 a card", 107.2e6): {1: 0.65253, 8: 0.72088, 32: 0.72727},
    },
    "DLPerf": {
        ("ResNet-50 fp32, batch 128 a card", 102.4e6):
            {1: 0.36289, 2: 0.39711, 4: 0.37685, 8: 0.39004, 16: 0.41836, 32: 0.43816},
        ("BERT base fp32, batch 32 a card", 440e6):
            {1: 0.24125, 2: 0.28055, 4: 0.31526, 8: 0.41618, 16: 0.45877, 32: 0.49383},
        ("BERT base fp32, batch 64 a card", 440e6):
            {1: 0.46623, 2: 0.50651, 4: 0.57953, 8: 0.6726, 16: 0.71783, 32: 0.74832},
        ("BERT base fp32, batch 96 a card", 440e6):
            {1: 0.70088, 2: 0.74209, 4: 0.78307, 8: 0.88418, 16: 0.94155, 32: 0.96979},
        ("BERT base fp16, batch 64 a card", 440e6): {1: 0.22128, 4: 0.32631, 8: 0.39416, 16: 0.51216, 32: 0.60123},
        ("BERT base fp16, batch 128 a card", 440e6): {1: 0.43109, 4: 0.5836, 8: 0.66569, 16: 0.75801, 32: 0.83215},
        ("BERT base fp16, batch 160 a card", 440e6): {1: 0.51666, 4: 0.69892, 8: 0.76806, 16: 0.862, 32: 0.93904},
    },
    "NVIDIA": {
        ("BERT large amp, 128 tokens, batch 65536", 1344e6):
            {8: 13.133, 16: 6.8402, 32: 3.4023, 64: 1.7464, 128: 0.92102, 256: 0.46124},
        ("BERT large tf32, 128 tokens, batch 65536", 1344e6):
            {8: 26.992, 16: 14.13, 32: 6.9387, 64: 3.5744, 128: 1.8447, 256: 0.94024},
        ("BERT large amp, 512 tokens, batch 32768", 1344e6):
            {8: 19.007, 16: 9.9147, 32: 5.0474, 64: 2.5433, 128: 1.2854, 256: 0.66457},
        ("BERT large tf32, 512 tokens, batch 32768", 1344e6):
            {8: 38.505, 16: 20.467, 32: 10.114, 64: 5.1774, 128: 2.6699, 256: 1.3627},
    },
}  # fmt: skip
PUBLISHED = tuple(
    PublishedSeries(
        owner=owner, name=name, size=size, link=200e9 if owner == "NVIDIA" else 12.5e9, seconds=seconds,
        strong=owner == "NVIDIA",
    )
    for owner, trainings in _SECONDS.items() for (name, size), seconds in trainings.items()
)  # fmt: skip
