"""ViT: scores of images, from patches in their places."""

import paddle
import pytest

from models.vit import Config

SMALL = {"image": 8, "patch": 2, "channels": 1, "classes": 10, "width": 16, "depth": 2, "heads": 4}


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_scores_of_images(pool, every_parameter_learns):
    model = Config(**SMALL, pool=pool).build()
    images = paddle.randn([3, 1, 8, 8])
    assert model(images).shape == [3, 10]
    assert model.blocks[0](images).shape == [3, 16 + (pool == "class"), 16]
    every_parameter_learns(model, images)
    hidden = images
    for block in model.blocks:
        hidden = block(hidden)
    assert (hidden == model(images)).all()


def test_a_patch_is_a_square_of_the_image():
    patches = Config(**SMALL).build().blocks[0]
    image = paddle.zeros([1, 1, 8, 8])
    image[:, :, 2:4, 6:8] = 1.0  # second row of patches, last column
    lit = (patches(image) != patches(paddle.zeros([1, 1, 8, 8]))).any(-1)[0].numpy()
    assert lit.nonzero()[0].tolist() == [1 * 4 + 3]


def test_places_matter():
    paddle.seed(0)
    model = Config(**SMALL).build()
    image = paddle.randn([1, 1, 8, 8])
    assert float((model(image) - model(image.flip(-2))).abs().max()) > 1e-6


def test_what_can_be_cut_is_there():
    block = Config(**SMALL).build().blocks[1]
    assert {name: list(getattr(block, name).weight.shape) for name in block.cuts} == {
        "qkv": [16, 48], "out": [16, 16], "up": [16, 64], "down": [64, 16],
    }  # fmt: skip
