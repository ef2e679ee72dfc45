"""The model, the data set and the log of recovery.py for paddle_dp; recovery_torch.py has the same for PyTorch.

A sample is 64 numbers and its index. The model logs the indices that a forward gets, and sleeps for each sample: that
stands for the time of an accelerator, and needs no core of a machine that others share.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_dp.train import Callback, Moment, Run
from tools.benchmark.recovery_table import append

# Of this process since the last update: its time and its samples.
_forwards: list[tuple[float, list[int]]] = []


class Samples:
    """`inputs` float32 [65], the last number is the sample's index, and `targets` int64, from an .npz file."""

    def __init__(self, split: str, path: str):
        arrays = np.load(path)
        self.inputs, self.targets = arrays["inputs"], arrays["targets"]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.inputs[index], int(self.targets[index])


class Perceptron(nn.Layer):
    """Scores [n, 10] for samples [n, 65]. `sample_ms`: milliseconds of sleep for each sample of a forward."""

    def __init__(self, width: int = 256, sample_ms: float = 0.0):
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.sample_ms = sample_ms

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        if self.training:
            _forwards.append((time.time(), samples[:, -1].astype("int64").tolist()))
            time.sleep(self.sample_ms * len(samples) / 1000)
        hidden = F.gelu(self.first(samples[:, :-1]))
        return self.head(F.gelu(self.second(hidden)))


class StepLog(Callback):
    """Writes recovery_table.py's lines, on every rank, and the weights at the end. Stands after
    `checkpoint` in the recipe: at a step the last one is called first, so that an update is in the log before it is in
    a checkpoint."""

    reads = False
    weights = False

    def __init__(self, run: Run, folder: str):
        self.rank = run.mesh.rank
        self.folder = Path(folder)

    def start(self, moment: Moment) -> None:
        _forwards.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        append(self.folder, self.rank, **{"from": moment.progress.step})

    def step(self, moment: Moment) -> None:
        samples = sorted({sample for _, indices in _forwards for sample in indices})
        began = min((time for time, _ in _forwards), default=time.time())
        _forwards.clear()
        append(self.folder, self.rank, began=began, step=moment.progress.step, samples=samples)

    def end(self, moment: Moment) -> None:
        if self.rank:
            return
        named = moment.trainer.learner.placed.named_parameters()
        np.savez(self.folder / "weights.npz", **{name: p.numpy() for name, p in named})
