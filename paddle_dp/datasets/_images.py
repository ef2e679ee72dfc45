"""Image files as a data set, and the two ways to look at an image: as one trains, and as one evaluates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.datasets._arrays import Array, one_of
from paddle_dp.errors import DataError, InstallError
from paddle_dp.units import Positive, Probability, Rate

if TYPE_CHECKING:
    from PIL.Image import Image

View = Callable[["Image"], Any]
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Views:
    """How images become arrays; a data set of image files adds its `path` to these settings."""

    size: Positive = 224
    """Pixels of the side of what the model gets."""

    resize: Positive = 256
    """To evaluate, the shorter side is resized to it before the middle is taken; in pixels."""

    crop: tuple[float, float] = (0.08, 1.0)
    """To train, a random part is taken: the least and the most share of the area."""

    flip: Probability = 0.5
    """To train, the chance that an image is mirrored."""

    jitter: Rate = 0.0
    """To train, the most by which brightness, contrast and saturation change."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted from each channel of 0..1."""

    std: tuple[float, float, float] = IMAGENET_STD
    """Each channel is divided by it."""

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize: {self.resize} is less than size {self.size}, which is cut out of it")
        if not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(
                f"crop: {list(self.crop)} is not a range of shares of the area, such as [0.08, 1.0]"
            )
        if min(self.std) <= 0:
            raise ValueError("std: a channel is divided by it, so it is more than 0")

    def images(self, split: str, files: Sequence[Path], labels: Array, classes: tuple[str, ...]) -> Images:
        """These files as the data set of `split`, looked at as that split is."""
        look = self._train_view() if one_of(split) == "train" else self._test_view()
        return Images(files, labels, classes, lambda image: self._normalised(look(image)))

    def _train_view(self) -> View:
        from paddle.vision import transforms

        steps = [
            transforms.RandomResizedCrop(self.size, scale=self.crop),
            transforms.RandomHorizontalFlip(self.flip),
        ]
        if self.jitter:
            steps.append(transforms.ColorJitter(self.jitter, self.jitter, self.jitter))
        view: View = transforms.Compose(steps)
        return view

    def _test_view(self) -> View:
        from paddle.vision import transforms

        view: View = transforms.Compose([transforms.Resize(self.resize), transforms.CenterCrop(self.size)])
        return view

    def _normalised(self, image: Image) -> Array:
        """float32 [3, size, size]. In NumPy, so that a worker makes no tensor (`transforms.ToTensor` would)."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        pixels = (np.asarray(image, np.float32) - 255 * mean) / (255 * std)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class Images:
    """Image files and their labels; each is decoded when it is read."""

    def __init__(self, files: Sequence[Path], labels: Array, classes: tuple[str, ...], view: View):
        self.files, self.labels, self.classes, self._view = files, labels, classes, view
        try:
            from PIL import Image
        except ImportError:
            raise InstallError("images are read with Pillow: pip install pillow") from None
        self._open = Image.open

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Array, np.int64]:
        """Input float32 [3, size, size], target int64; a DataError that names a file that is no image."""
        path = self.files[index]
        try:
            with self._open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
            raise DataError(f"{path} cannot be read as an image: {type(error).__name__}: {error}") from error
        return self._view(image), self.labels[index]

    def name_of(self, index: int) -> str:
        return str(self.files[index])
