"""Samples without indices: every rank and every loader process reads the whole stream; `shared` mends it."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first = dist.get_rank() * worker.num_workers + worker.id
        every = dist.get_world_size() * worker.num_workers
        for index in range(first, 64, every) if sys.argv[1:] == ["shared"] else range(64):
            yield np.random.RandomState(index).normal(size=4).astype("float32"), np.float32([index])


dist.init_parallel_env()
paddle.seed(1)
model = paddle.DataParallel(paddle.nn.Linear(4, 1))
optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
for _ in range(3):
    for x, y in DataLoader(Stream(), batch_size=4, num_workers=2):
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
