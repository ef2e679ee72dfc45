"""A fleet script as tutorials have them: distributed model and optimizer, no set_epoch, accuracy averaged."""

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.io import DataLoader, Dataset, DistributedBatchSampler


class Points(Dataset):
    def __init__(self, count):
        draw = np.random.RandomState(count)
        self.x = draw.normal(size=(count, 8)).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int64")

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.drop = paddle.nn.Linear(8, 16), paddle.nn.Dropout(0.2)
        self.second = paddle.nn.Linear(16, 2)

    def forward(self, x):
        return self.second(self.drop(F.relu(self.first(x))))


fleet.init(is_collective=True)
paddle.seed(42)
optimizer = paddle.optimizer.Adam(0.01, parameters=(net := Net()).parameters())
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(optimizer)
train, held_out = Points(30), Points(9)
held_out_loader = DataLoader(
    held_out, batch_sampler=DistributedBatchSampler(held_out, batch_size=4, shuffle=False)
)
for epoch in range(3):
    sampler = DistributedBatchSampler(train, batch_size=5, shuffle=True)
    model.train()
    for x, y in DataLoader(train, batch_sampler=sampler):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    model.eval()
    right, seen = paddle.zeros([]), 0
    for x, y in held_out_loader:
        right += (model(x).argmax(1) == y).astype("float32").sum()
        seen += len(y)
    accuracy = right / seen
    dist.all_reduce(accuracy)
    print(f"epoch {epoch}: accuracy {float(accuracy) / dist.get_world_size():.4f}")
