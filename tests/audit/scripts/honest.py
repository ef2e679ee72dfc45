"""Nothing is wrong here: seeds, a sampler that shares, DataParallel, totals and counts, each held-out sample once."""

import argparse

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def points(count, seed):
    draw = np.random.RandomState(seed)
    x = draw.normal(size=(count, 8)).astype("float32")
    return TensorDataset([paddle.to_tensor(x), paddle.to_tensor((x.sum(1) > 0).astype("int64"))])


def evaluate(model, data):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = list(range(rank, len(data), ranks))
    model.eval()
    sums = paddle.zeros([2])
    with paddle.no_grad():
        for x, y in DataLoader(data, batch_sampler=[mine[at : at + 4] for at in range(0, len(mine), 4)]):
            sums += paddle.to_tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])
    if ranks > 1:
        dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


dist.init_parallel_env()
paddle.seed(7)
model = paddle.DataParallel(
    paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 2))
)
clip = paddle.nn.ClipGradByGlobalNorm(1.0)
optimizer = paddle.optimizer.AdamW(args.lr, parameters=model.parameters(), grad_clip=clip)
train, held_out = points(48, 0), points(13, 1)
sampler = DistributedBatchSampler(train, batch_size=4, shuffle=True)
loader = DataLoader(train, batch_sampler=sampler)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    print(f"epoch {epoch}: accuracy {evaluate(model, held_out):.4f}")
