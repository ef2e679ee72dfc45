"""Hand-written exchange over shares of 13 and 12 samples: a mean of means. MODE mends it, or breaks it otherwise."""

import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset

mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
dist.init_parallel_env()
rank, ranks = dist.get_rank(), dist.get_world_size()
paddle.seed(5)
draw = np.random.RandomState(0)
x = draw.normal(size=(25, 8)).astype("float32")
data = TensorDataset([paddle.to_tensor(x), paddle.to_tensor((x**2).sum(1, keepdims=True))])
model = paddle.nn.Sequential(paddle.nn.Linear(8, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
mine = list(range(25))[rank::ranks]
for _ in range(2):
    for inputs, targets in DataLoader(data, batch_sampler=[mine]):
        if mode == "weighted":  # right: the gradients of all ranks add up to the one-process mean
            loss = F.mse_loss(model(inputs), targets, reduction="sum") / 25
        else:
            loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        for number, parameter in enumerate(model.parameters()):
            if mode == "forgets" and number == 2:
                continue
            if ranks > 1:
                dist.all_reduce(parameter.grad)
            if mode == "twice":
                paddle.assign(parameter.grad / ranks**2, parameter.grad)
            elif mode not in ("weighted", "summed"):
                paddle.assign(parameter.grad / ranks, parameter.grad)
        optimizer.step()
        optimizer.clear_grad()
    if os.environ.get("AUDIT_TEST_SLEEPS") and rank == 1:
        import time

        time.sleep(600)
