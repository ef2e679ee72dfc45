"""The large classifier gives cosines or products, learns made-up identities, and knows them from new views."""

import numpy as np
import paddle

from models.large_classifier import Config
from paddle_dp.datasets.random_identities import Config as Identities
from paddle_dp.losses.margin_softmax import Config as Margin


def test_cosines_are_cosines():
    model = Config(inputs=6, hidden=(8,), width=4, classes=11).build()
    samples = paddle.randn([3, 6])
    embeddings, weights = model.embedding(samples).numpy(), model.head.weight.numpy()
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True) * np.linalg.norm(weights, axis=0)
    np.testing.assert_allclose(model(samples).numpy(), embeddings @ weights / lengths, atol=1e-6)


def test_products_have_a_bias():
    model = Config(inputs=6, hidden=(), width=4, classes=11, cosines=False).build()
    samples = paddle.randn([3, 6])
    wanted = model.embedding(samples) @ model.head.weight + model.head.bias
    np.testing.assert_allclose(model(samples).numpy(), wanted.numpy(), atol=1e-6)


def test_images_may_be_classified():
    model = Config(backbone="resnet18", classes=5).build()
    model.eval()
    assert model(paddle.randn([2, 3, 32, 32])).shape == [2, 5]


def test_it_learns_identities():
    paddle.seed(0)
    data = Identities(features=16, classes=400, seen=20, samples=640, test_samples=100, noise=0.3)
    model, loss = Config(inputs=16, hidden=(32,), width=16, classes=400).build(), Margin(scale=16).build()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    train, test = data.build("train"), data.build("test")
    for step in range(40):
        inputs, targets = map(paddle.to_tensor, train.take(np.arange(step * 16, step * 16 + 16)))
        total, count = loss(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.clear_grad()
    inputs, targets = map(paddle.to_tensor, test.take(np.arange(100)))
    assert loss.scores(model(inputs), targets)["acc1"].item() > 90
