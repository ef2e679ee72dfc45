"""What both scripts and the recipe share: a data set and a model, plain Paddle and NumPy."""

import numpy as np
from paddle import nn
from sklearn.datasets import load_breast_cancer


class Tumours:
    """30 measurements [30] of a tumour, and whether it is benign: every fifth of scikit-learn's 569 is held out."""

    def __init__(self, split):
        inputs, labels = load_breast_cancer(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        rows = (np.arange(len(labels)) % 5 == 0) == (split == "test")
        self.inputs, self.labels = inputs[rows].astype("float32"), labels[rows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.inputs[i], self.labels[i]


class Classifier(nn.Sequential):
    """Scores [n, 2] for measurements [n, 30]."""

    def __init__(self, width=64):
        hidden = nn.Linear(30, width, bias_attr=False)  # BatchNorm subtracts a bias before it: leave that out
        super().__init__(hidden, nn.BatchNorm1D(width), nn.ReLU(), nn.Linear(width, 2))
