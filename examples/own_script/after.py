"""The same training with `Trainer.of`: on any number of ranks it learns what one process learns."""

import paddle
from task import Classifier, Tumours

from paddle_dp import Trainer, join

join(seed=0)  # in place of init_parallel_env and paddle.seed
model = Classifier()
trainer = Trainer.of(
    model=model,
    loss=paddle.nn.CrossEntropyLoss(reduction="none"),  # one number per sample, no mean
    optimizer=paddle.optimizer.Adam(1e-3, parameters=model.parameters()),
    train=Tumours("train"),
    test=Tumours("test"),
    batch=64,  # of all ranks together
    folder="runs/after",
)
trainer.fit("10 epochs")
