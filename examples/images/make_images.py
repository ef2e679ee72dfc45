"""Writes scikit-learn's 1797 handwritten digits as PNG files: digits/train/CLASS/*.png and digits/val/CLASS/*.png."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

digits = load_digits()
for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("digits", "val" if number % 5 == 0 else "train", NAMES[label])
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.uint8(pixels * 15.9))  # 8 × 8 pixels, of 0 to 16
    image.resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{number:04}.png")
for split in ("train", "val"):
    print(
        f"digits/{split}: {len(list(Path('digits', split).glob('*/*.png')))} images of {len(NAMES)} classes"
    )
