"""A training described in Python, for the record: `script.py RUN [fail]`; with `fail`, rank 1 raises at step 2."""

from __future__ import annotations

import sys

import numpy as np
import paddle
from paddle import nn

from paddle_dp import Callback, Trainer

draw = np.random.RandomState(0)
inputs = draw.randn(30, 6).astype("float32")
samples = [(x, y) for x, y in zip(inputs, inputs[:, :4].argmax(1), strict=True)]


class Failure(Callback):
    def step(self, moment) -> None:
        if sys.argv[2:] == ["fail"] and moment.progress.step == 2 and paddle.distributed.get_rank() == 1:
            raise ValueError("the data ran out of colours")


paddle.seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
trainer = Trainer.of(
    model=model, loss=nn.CrossEntropyLoss(reduction="none"),
    optimizer=paddle.optimizer.AdamW(1e-2, parameters=model.parameters()), train=samples, test=samples[:10],
    batch=8, micro_batches=2, folder=sys.argv[1], callbacks=[
        {"use": "console", "every": "1 step"}, {"use": "metrics", "every": "1 step"},
        {"use": "checkpoint", "every": "3 steps"}, Failure(),
    ],
)  # fmt: skip
trainer.fit("6 steps")
print("held out:", dict(trainer.evaluate().numbers))
