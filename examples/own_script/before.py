"""A distributed training as many write it: it runs, its loss falls, and the audit finds faults in it."""

import paddle
import paddle.distributed as dist
from task import Classifier, Tumours

dist.init_parallel_env()
paddle.seed(0)
model = paddle.DataParallel(Classifier())
optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
train, test = Tumours("train"), Tumours("test")
loader = paddle.io.DataLoader(train, batch_size=32, shuffle=True)
held_out = paddle.io.DataLoader(test, batch_sampler=paddle.io.DistributedBatchSampler(test, batch_size=32))
for epoch in range(10):
    model.train()
    for inputs, labels in loader:
        loss = paddle.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()

    model.eval()
    right = total = 0
    for inputs, labels in held_out:
        right += int((model(inputs).argmax(axis=1) == labels).sum())
        total += len(labels)
    print(f"epoch {epoch + 1}: accuracy {right / total:.4f} of {total} held-out samples")
if dist.get_rank() == 0:
    paddle.save(model.state_dict(), "before.pdparams")
