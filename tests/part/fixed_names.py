"""A model that fixes the name of a parameter, as a third of PaddleClas's do."""

import paddle
from paddle import nn


class FixedNames(nn.Layer):
    """Scores [n, 10] for samples [n, 64]; `twice` gives two parameters of one model the same name."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(64, 16, weight_attr=paddle.ParamAttr(name="fixed_weights"))
        self.head = nn.Linear(16, 10, weight_attr=paddle.ParamAttr(name="fixed_weights" if twice else None))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(paddle.nn.functional.gelu(self.body(samples)))
