"""AutoAugment, RandAugment and TrivialAugment of images: operations of Pillow, drawn from Python's `random`, which the
loader seeds.

torchvision 0.20 has the same operations and ranges (`RandAugment`, `TrivialAugmentWide`, in 31 steps of strength;
`AutoAugment`'s ImageNet policy, in 10); an area that an operation moves into the image is black, and pixels are the
nearest ones by default.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

STRENGTHS = 31  # from 0 to 30
_UNSIGNED = ("identity", "posterize", "solarize", "autocontrast", "equalize", "invert")
Operation = Callable[["Image", float], "Image"]


def operations(interpolation: str = "nearest") -> Mapping[str, Operation]:
    """By name: a function of an image and the operation's amount, such as degrees, or 0.3 for 1.3 × the contrast.
    `interpolation`: of images that are turned, sheared or moved."""
    from PIL import Image, ImageEnhance, ImageOps

    resample = Image.Resampling[interpolation.upper()]

    def moved(*matrix: Callable[[float], float]) -> Operation:
        return lambda image, amount: image.transform(
            image.size, Image.Transform.AFFINE, [entry(amount) for entry in matrix], resample, fillcolor=0
        )

    def enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
        return lambda image, amount: kind(image).enhance(1.0 + amount)

    unit, zero = (lambda amount: 1.0), (lambda amount: 0.0)
    itself, back = (lambda amount: amount), (lambda amount: -amount)
    return {
        "identity": lambda image, amount: image,
        "shear_x": moved(unit, itself, zero, zero, unit, zero),
        "shear_y": moved(unit, zero, zero, itself, unit, zero),
        "translate_x": moved(unit, zero, back, zero, unit, zero),
        "translate_y": moved(unit, zero, zero, zero, unit, back),
        "rotate": lambda image, amount: image.rotate(amount, resample, fillcolor=0),
        "brightness": enhanced(ImageEnhance.Brightness),
        "color": enhanced(ImageEnhance.Color),
        "contrast": enhanced(ImageEnhance.Contrast),
        "sharpness": enhanced(ImageEnhance.Sharpness),
        "posterize": lambda image, amount: ImageOps.posterize(image, int(amount)),
        "solarize": lambda image, amount: ImageOps.solarize(image, int(amount)),
        "autocontrast": lambda image, amount: ImageOps.autocontrast(image),
        "equalize": lambda image, amount: ImageOps.equalize(image),
    }


def amount(name: str, strength: float, size: tuple[int, int], is_wide: bool = False) -> float:
    """The amount of an operation at a strength, without its sign; in pixels of an image of this width and height, in
    degrees, in bits or in shares. `is_wide`: in TrivialAugment's ranges."""
    share = strength / (STRENGTHS - 1)
    if name == "posterize":
        return 8 - round(share * (6 if is_wide else 4))
    if name == "solarize":
        return 255 * (1 - share)
    largest, widest = {
        "shear_x": (0.3, 0.99), "shear_y": (0.3, 0.99), "rotate": (30.0, 135.0),
        "translate_x": (150 / 331 * size[0], 32.0), "translate_y": (150 / 331 * size[1], 32.0),
    }.get(name, (0.9, 0.99))  # fmt: skip
    return (widest if is_wide else largest) * share


class RandAugment:
    """`count` operations, one after the other, each at the same strength (Cubuk et al. 2020, arXiv:1909.13719)."""

    def __init__(self, count: int, strength: int, interpolation: str = "nearest"):
        self._operations: Mapping[str, Operation] = operations(interpolation)
        self._count, self._strength = count, strength

    def __call__(self, image: Image) -> Image:
        for _ in range(self._count):
            name = random.choice(list(self._operations))
            image = self._applied(image, name, amount(name, self._strength, image.size))
        return image

    def _applied(self, image: Image, name: str, unsigned: float) -> Image:
        is_negative = name not in _UNSIGNED and random.random() < 0.5
        return self._operations[name](image, -unsigned if is_negative else unsigned)


class TrivialAugment(RandAugment):
    """One operation at a random strength (Müller and Hutter 2021, arXiv:2103.10158)."""

    def __init__(self, interpolation: str = "nearest") -> None:
        super().__init__(1, 0, interpolation)

    def __call__(self, image: Image) -> Image:
        name, strength = random.choice(list(self._operations)), random.randrange(STRENGTHS)
        return self._applied(image, name, amount(name, strength, image.size, is_wide=True))


# Sub-policies of two operations with their probability and strength, 0 to 9, learned on ImageNet.
POLICY = """
posterize 0.4 8 rotate 0.6 9       | solarize 0.6 5 autocontrast 0.6 0 | equalize 0.8 0 equalize 0.6 0
posterize 0.6 7 posterize 0.6 6    | equalize 0.4 0 solarize 0.2 4     | equalize 0.4 0 rotate 0.8 8
solarize 0.6 3 equalize 0.6 0      | posterize 0.8 5 equalize 1.0 0    | rotate 0.2 3 solarize 0.6 8
equalize 0.6 0 posterize 0.4 6     | rotate 0.8 8 color 0.4 0          | rotate 0.4 9 equalize 0.6 0
equalize 0.0 0 equalize 0.8 0      | invert 0.6 0 equalize 1.0 0       | color 0.6 4 contrast 1.0 8
rotate 0.8 8 color 1.0 2           | color 0.8 8 solarize 0.8 7        | sharpness 0.4 7 invert 0.6 0
shear_x 0.6 5 equalize 1.0 0       | color 0.4 0 equalize 0.6 0        | equalize 0.4 0 solarize 0.2 4
solarize 0.6 5 autocontrast 0.6 0  | invert 0.6 0 equalize 1.0 0       | color 0.6 4 contrast 1.0 8
equalize 0.8 0 equalize 0.6 0
"""


class AutoAugment(RandAugment):
    """A random one of 25 sub-policies (Cubuk et al. 2019, arXiv:1805.09501, table 9)."""

    def __init__(self, interpolation: str = "nearest") -> None:
        from PIL import ImageOps

        super().__init__(2, 0, interpolation)
        self._operations = {**self._operations, "invert": lambda image, amount: ImageOps.invert(image)}
        rows = [row.split() for line in POLICY.strip().splitlines() for row in line.split("|")]
        self._policy = [[(row[i], float(row[i + 1]), int(row[i + 2])) for i in (0, 3)] for row in rows]

    def __call__(self, image: Image) -> Image:
        for name, probability, level in random.choice(self._policy):
            if random.random() < probability:
                strength = level * (STRENGTHS - 1) / 9
                image = self._applied(image, name, amount(name, strength, image.size))
        return image
