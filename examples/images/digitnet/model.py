"""The model: plain Paddle, without a word about ranks. The arguments of the class are settings of the recipe."""

from itertools import pairwise

from paddle import nn


def halved(before: int, after: int) -> nn.Sequential:
    """Returns a convolution with stride 2, its BatchNorm, which has the bias for both, and a GELU."""
    conv = nn.Conv2D(before, after, 3, stride=2, padding=1, bias_attr=False)
    return nn.Sequential(conv, nn.BatchNorm2D(after), nn.GELU())


class DigitNet(nn.Layer):
    """Scores [n, classes] for images [n, 3, height, width]: three convolutions, each halves height and width."""

    def __init__(self, width: int = 16, classes: int = 10, dropout: float = 0.1):
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)
        self.stages = nn.Sequential(*(halved(before, after) for before, after in pairwise(channels)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images):
        return self.head(self.dropout(self.stages(images).mean(axis=[2, 3])))
