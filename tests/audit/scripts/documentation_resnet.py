"""As the documentation's collective example has it: a ResNet in DataParallel over a plain shuffling DataLoader."""

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, Dataset
from paddle.vision.models import resnet18

epochs, batches, batch_size, classes = 3, 5, 4, 10


class RandomDataset(Dataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __getitem__(self, idx):
        image = np.random.random([3, 32, 32]).astype("float32")
        label = np.random.randint(0, classes - 1, (1,)).astype("int64")
        return image, label

    def __len__(self):
        return self.num_samples


def train():
    dist.init_parallel_env()
    model = paddle.DataParallel(resnet18(num_classes=classes))
    optimizer = paddle.optimizer.Momentum(
        learning_rate=0.01, weight_decay=paddle.regularizer.L2Decay(1e-4), parameters=model.parameters()
    )
    loader = DataLoader(
        RandomDataset(batches * batch_size), batch_size=batch_size, shuffle=True, drop_last=True,
        num_workers=0,
    )  # fmt: skip
    for epoch in range(epochs):
        model.train()
        for batch_id, (image, label) in enumerate(loader()):
            label.stop_gradient = True
            loss = paddle.nn.functional.cross_entropy(model(image), label).mean()
            loss.backward()
            optimizer.step()
            model.clear_gradients()
            print(f"epoch {epoch} batch {batch_id} loss {float(loss):.4f}")


if __name__ == "__main__":
    train()
