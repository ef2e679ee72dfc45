"""Nothing is wrong here either: accumulation in no_sync, a GradScaler, groups of parameters, a loader process."""

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

EVERY = 4


class Points(Dataset):
    x = np.random.RandomState(0).normal(size=(64, 5)).astype("float32")

    def __getitem__(self, index):
        return {"x": self.x[index, :4], "y": self.x[index, 4:]}

    def __len__(self):
        return len(self.x)


dist.init_parallel_env()
paddle.seed(1)
net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 1))
model = paddle.DataParallel(net)
groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "learning_rate": 0.1}]
optimizer = paddle.optimizer.AdamW(0.01, parameters=groups)
scaler = paddle.amp.GradScaler(init_loss_scaling=128)
for epoch in range(3):
    sampler = DistributedBatchSampler(Points(), 4, shuffle=True)
    sampler.set_epoch(epoch)
    for number, batch in enumerate(DataLoader(Points(), batch_sampler=sampler, num_workers=1), start=1):
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean() / EVERY
        if number % EVERY:
            with model.no_sync():
                scaler.scale(loss).backward()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
