"""Paddle's high-level API: paddle.Model.fit with a held-out set; shares, wrapping and gathering are Paddle's."""

import numpy as np
import paddle
from paddle.io import Dataset


class Points(Dataset):
    def __init__(self, count, seed):
        draw = np.random.RandomState(seed)
        self.x = draw.normal(size=(count, 8)).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int64")[:, None]

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


paddle.seed(3)
network = paddle.nn.Sequential(
    paddle.nn.Linear(8, 16), paddle.nn.BatchNorm1D(16), paddle.nn.ReLU(), paddle.nn.Linear(16, 2)
)
model = paddle.Model(network)
model.prepare(
    paddle.optimizer.Adam(0.01, parameters=model.parameters()),
    paddle.nn.CrossEntropyLoss(),
    paddle.metric.Accuracy(),
)
model.fit(Points(31, 0), Points(13, 1), batch_size=4, epochs=3, verbose=0)
print(model.evaluate(Points(13, 1), batch_size=4, verbose=0))
