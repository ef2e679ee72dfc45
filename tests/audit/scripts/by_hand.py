"""No DataLoader: slices of an array, and the rank is forgotten. `hangs`: one rank has a step more than the other."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
paddle.seed(1)
x = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
model = paddle.DataParallel(paddle.nn.Linear(4, 1))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for step in range(4 + (sys.argv[1:] == ["hangs"] and dist.get_rank() == 0)):
    batch = paddle.to_tensor(x[step * 8 : step * 8 + 8])
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()
