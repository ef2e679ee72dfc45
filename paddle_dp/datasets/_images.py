"""Data sets of image files, with transforms for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import numpy as np
from annotated_types import Ge, Le

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.errors import DataError, InstallError
from paddle_dp.units import Count, Positive, Probability, Rate

if TYPE_CHECKING:
    from PIL.Image import Image

Strength = Annotated[int, Ge(0), Le(30)]
View = Callable[["Image"], Any]
Size = Positive | tuple[Positive, Positive]
"""Height and width, or one number for both, in pixels."""
# The allowed decoders of Pillow; some others run programs, or follow paths in the file.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Views:
    """Settings that turn images into arrays; a data set of image files adds its `path`."""

    size: Size = 224
    """Height and width of the model's input, in pixels; one number for both, or `[256, 192]`."""

    test_size: Size | None = None
    """Evaluation: height and width of the input, in pixels. null: `size`."""

    fit: Literal["crop", "stretch"] = "crop"
    """`crop`: training takes a random part of an image, evaluation the centre. `stretch`: the whole image is resized to
    the input, whatever its proportions."""

    resize: Positive | None = None
    """Evaluation, `crop`, with equal height and width: the shorter side is resized to this before the centre crop, in
    pixels. null: the image covers 8/7 of the input, as 256 is of 224."""

    crop: tuple[float, float] = (0.08, 1.0)
    """Training, `crop`: smallest and largest share of the area of the random crop."""

    pad: Count = 0
    """Training, `stretch`: largest random shift of an image, in pixels; the border is black."""

    flip: Probability = 0.5
    """Training: probability of a horizontal flip."""

    jitter: Rate = 0.0
    """Training: largest relative change of brightness, contrast and saturation."""

    augment: Literal["none", "rand", "trivial", "auto"] = "none"
    """Training: `rand` is RandAugment, `trivial` TrivialAugment (wide), `auto` AutoAugment's policy for ImageNet, with
    torchvision's operations and ranges."""

    augment_count: Positive = 2
    """Training, `rand`: operations for each image."""

    augment_strength: Strength = 9
    """Training, `rand`: strength of the operations, 0 to 30."""

    augment_interpolation: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """Training, `augment`: how an image is resampled when it is turned, sheared or moved; torchvision's is nearest."""

    erase: Annotated[float, Ge(0), Le(1)] = 0.0
    """Training: probability that a random rectangle of 2 to 33 % of the image is erased."""

    erase_fill: Literal["mean", "noise"] = "mean"
    """Training, `erase`: the rectangle gets the `mean`'s colour, or normal noise after normalisation."""

    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized, for training and evaluation."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted from each channel, whose values are 0..1."""

    std: tuple[float, float, float] = IMAGENET_STD
    """Divisor of each channel."""

    def __post_init__(self) -> None:
        height, width = _sides(self.test_size or self.size)
        if self.resize is not None and height != width:
            raise ValueError(
                f"resize: is of a square input, and this one has {height} x {width}: leave it out"
            )
        if self.resize is not None and self.resize < height:
            raise ValueError(
                f"resize: {self.resize} is less than the size {height}, which is cropped from it"
            )
        if self.fit == "stretch" and (self.resize is not None or self.crop != (0.08, 1.0)):
            raise ValueError(
                "fit: stretch takes whole images, so neither resize nor crop has an effect: leave them out"
            )
        if self.fit == "crop" and self.pad:
            raise ValueError("pad: of fit: stretch; a random crop shifts an image already")
        if not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(
                f"crop: {list(self.crop)} is not a range of shares of the area, such as [0.08, 1.0]"
            )
        if min(self.std) <= 0:
            raise ValueError("std: every channel is divided by it: give numbers above 0")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of a training sample, which a plan needs before the images are there."""
        return (3, *_sides(self.size))

    def images(self, split: str, files: Sequence[Path], labels: Array, classes: tuple[str, ...]) -> Images:
        """The data set of these files with the transforms of `split`."""
        return Images(files, labels, classes, self.view(split))

    def view(self, split: str) -> View:
        """The function that makes an image the array of a sample of `split`, float32 [3, height, width]."""
        is_train = checked_split(split) == "train"
        view = self._train_view() if is_train else self._test_view()
        erase = self._erasing() if is_train else None

        def array(image: Image) -> Array:
            pixels = self._normalised(view(image))
            pixels = pixels if erase is None else erase(pixels)
            return np.ascontiguousarray(pixels.transpose(2, 0, 1))

        return array

    def read_file(self, path: Path) -> list[tuple[Array, None]]:
        """The image as a held-out sample's input. Raises DataError with the path of a file that is no image."""
        samples = self.images("test", [path], np.zeros(1, np.int64), ())
        return [(samples[0][0], None)]

    def _train_view(self) -> View:
        from paddle.vision import transforms

        size = height, width = _sides(self.size)
        if self.fit == "stretch":
            resized = transforms.Resize(size, self.interpolation)
        else:
            ratio = (3 / 4 * width / height, 4 / 3 * width / height)
            resized = transforms.RandomResizedCrop(size, self.crop, ratio, self.interpolation)
        steps = [resized, transforms.RandomHorizontalFlip(self.flip)]
        if self.augment != "none":
            from paddle_dp.datasets._augment import AutoAugment, RandAugment, TrivialAugment

            how = self.augment_interpolation
            if self.augment == "rand":
                steps.append(RandAugment(self.augment_count, self.augment_strength, how))
            else:
                steps.append(AutoAugment(how) if self.augment == "auto" else TrivialAugment(how))
        if self.jitter:
            steps.append(transforms.ColorJitter(self.jitter, self.jitter, self.jitter))
        if self.pad:
            steps.append(transforms.RandomCrop(size, padding=self.pad))
        view: View = transforms.Compose(steps)
        return view

    def _test_view(self) -> View:
        from paddle.vision import transforms

        size = height, width = _sides(self.test_size or self.size)
        if self.fit == "stretch":
            view: View = transforms.Resize(size, self.interpolation)
        else:
            covering: View = self._covering
            if height == width:
                shorter = round(height * 8 / 7) if self.resize is None else self.resize
                covering = transforms.Resize(shorter, self.interpolation)
            view = transforms.Compose([covering, transforms.CenterCrop(size)])
        return view

    def _covering(self, image: Image) -> Any:
        """The image in its proportions, so large that it covers 8/7 of the input."""
        from paddle.vision.transforms import functional

        height, width = _sides(self.test_size or self.size)
        scale = max(8 / 7 * width / image.size[0], 8 / 7 * height / image.size[1])
        sides = (round(image.size[1] * scale), round(image.size[0] * scale))
        return functional.resize(image, sides, self.interpolation)

    def _erasing(self) -> Callable[[Array], Array] | None:
        """A function of a normalised image, for training; None without `erase`."""
        from paddle.vision import transforms

        if self.erase_fill == "mean" or not self.erase:
            return transforms.RandomErasing(self.erase) if self.erase else None
        erase = transforms.RandomErasing(self.erase, value="random")

        def with_noise(pixels: Array) -> Array:
            noise = erase(np.zeros_like(pixels))  # of standard deviation 255, as of unnormalised images
            return np.where(noise == 0, pixels, noise / 255)

        return with_noise

    def _normalised(self, image: Image) -> Array:
        """Normalises to float32 [height, width, 3] by NumPy: `transforms.ToTensor` makes a tensor in a worker."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        pixels: Array = (np.asarray(image, np.float32) - 255 * mean) / (255 * std)
        return pixels


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


class Images:
    """Image files and their labels; an image is decoded when it is read. Raises InstallError without Pillow."""

    def __init__(self, files: Sequence[Path], labels: Array, classes: tuple[str, ...], view: View):
        self.files, self.labels, self.classes, self._view = files, labels, classes, view
        try:
            from PIL import Image
        except ImportError:
            raise InstallError("reading images needs Pillow: pip install pillow") from None
        Image.init()
        self._image, self._formats = Image, [name for name in FORMATS if name in Image.OPEN]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Array, np.int64]:
        """Input float32 [3, height, width], target int64. Raises DataError with the path of a file that is no image."""
        source = self._source(index)
        try:
            with self._image.open(source, formats=self._formats) as file:  # reads the header only
                self._check_size(file)
                if file.mode[0] in "IF":
                    _check_pixels(np.asarray(file))
                image = file.convert("RGB")
        except Exception as error:  # Pillow's decoders may raise anything for a damaged file
            name = self.name_of(index)
            raise DataError(f"{name} cannot be read as an image: {type(error).__name__}: {error}") from error
        return self._view(image), self.labels[index]

    def _source(self, index: int) -> Path | BinaryIO:
        """The image's file, for Pillow."""
        return self.files[index]

    def _check_size(self, file: Image) -> None:
        """Raises ValueError, before decoding, for an image with more pixels than Pillow accepts without a warning."""
        width, height = file.size
        if (largest := self._image.MAX_IMAGE_PIXELS) and width * height > largest:
            raise ValueError(
                f"its {width}x{height} pixels are more than {largest:,}. Make it smaller; or, if it is meant, raise "
                "PIL.Image.MAX_IMAGE_PIXELS"
            )

    def name_of(self, index: int) -> str:
        return str(self.files[index])


def _check_pixels(pixels: Array) -> None:
    """Raises ValueError for numbers that conversion to 8 bits would make white or black: of 16 or 32 bits, or
    fractions."""
    low, high = pixels.min(), pixels.max()
    is_fraction = pixels.dtype.kind == "f" and 0 < high <= 1
    if is_fraction or not -1 < low <= high < 256:  # resampling rounds; NaN is refused, too
        raise ValueError(
            f"its pixels lie between {low:g} and {high:g}, and 8 bits hold 0 to 255, so it would become white or "
            "black. Write it with 8 bits, scaled as is meant"
        )
