"""Evaluates 11 held-out samples in shares of 6 and 5, and averages the ranks' losses, by a collective
of `stream` if asked; `alone` forgets the others."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

dist.init_parallel_env()
paddle.seed(4)
x = np.random.RandomState(2).normal(size=(11, 8)).astype("float32")
held_out = TensorDataset([paddle.to_tensor(x), paddle.to_tensor((x.sum(1) > 0).astype("int64"))])
model = paddle.DataParallel(paddle.nn.Linear(8, 2))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())

mine = list(range(11))[dist.get_rank() :: dist.get_world_size()]
with paddle.no_grad():
    total = sum(
        float(F.cross_entropy(model(x), y, reduction="sum"))
        for x, y in DataLoader(held_out, batch_sampler=[mine])
    )
loss = paddle.to_tensor(total / len(mine))
if sys.argv[1:] != ["alone"]:
    (dist.stream if sys.argv[1:] else dist).all_reduce(loss)
    loss /= dist.get_world_size()
print(f"held-out loss {float(loss):.4f}")

train = TensorDataset([paddle.rand([16, 8]), paddle.randint(0, 2, [16])])
for x, y in DataLoader(train, batch_sampler=DistributedBatchSampler(train, batch_size=4)):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.clear_grad()
