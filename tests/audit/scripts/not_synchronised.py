"""Forgets everything: no DataParallel, no all_reduce, no seed. It runs on two ranks without a word."""

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

dist.init_parallel_env()
draw = np.random.RandomState(0)
x = draw.normal(size=(16, 8)).astype("float32")
data = TensorDataset([paddle.to_tensor(x), paddle.to_tensor(x.sum(1, keepdims=True))])
model = paddle.nn.Sequential(paddle.nn.Linear(8, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for _ in range(2):
    for inputs, targets in DataLoader(data, batch_sampler=DistributedBatchSampler(data, batch_size=4)):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
