"""Whether a file gives a model its weights, under whatever names it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint.other_names import names_of, translated
from paddle_dp.checkpoint.source import source


def assert_read(file: Path, model: Any, whose: str = "Hugging Face's") -> None:
    """The file, or folder, has every tensor of the model, under names that are told to be `whose`."""
    weights, convention = translated(source(file), names_of(model), {})
    assert convention == whose
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(weights.read(name), tensor.numpy(), err_msg=f"{file}: {name}")
