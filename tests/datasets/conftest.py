"""What tests of data sets share: folders of small real image files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def save_image():
    """Writes a picture of one colour under noise, and answers its path."""

    def save(path: Path, colour=(200, 100, 50), width=40, height=30) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0).integers(-5, 6, (height, width, 3))
        Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)
        return path

    return save
