"""The slowest operations of Paddle on a CPU, each in as few words as show it, beside the same numbers by other words.

    python tools/benchmark/slow_ops.py

Each line is an operation of a transformer of width 256 (8 samples of 128 tokens) or of ResNet-18, forward and backward
in one thread, in ms of CPU time, and what the package does instead where it does something. The environment is what
`paddle-dp train` gives a rank on this machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.compute import start_with, variables
from tools.tables import table_head, table_row


def main() -> None:
    import paddle
    import paddle.nn.functional as F

    def new(*shape: int) -> Any:
        tensor = paddle.randn(shape)
        tensor.stop_gradient = False
        return tensor

    x, wide, heads = new(1024, 256), new(1024, 1024), new(8, 128, 8, 32)
    weight, bias, factor = new(256, 1024), new(1024), new(256)
    ones = paddle.ones([1024, 1])
    rows = [
        ("x @ weight", lambda: x @ weight, ""),
        ("x @ weight + bias", lambda: x @ weight + bias, ""),
        ("x @ weight + ones @ bias", lambda: x @ weight + ones @ bias.unsqueeze(0), "any nn.Linear"),
        ("x * factor", lambda: x * factor, ""),
        ("x * (ones @ factor)", lambda: x * (ones @ factor.unsqueeze(0)), "RMSNorm of models/llama.py"),
        ("transpose(heads) + 0", lambda: heads.transpose([0, 2, 1, 3]) + 0, ""),
        (
            "channel_shuffle(heads)",
            lambda: F.channel_shuffle(heads.reshape([8, 1024, 1, 32]), 128) + 0,
            "models/_attention.py",
        ),
        (
            "scaled_dot_product_attention(is_causal)",
            lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
            "heads are moved and masked once: models/_attention.py",
        ),
        ("layer_norm", lambda: F.layer_norm(x, [256], factor, bias[:256]), "nothing: other words are slower"),
        ("gelu", lambda: F.gelu(wide), "nothing"),
        ("gelu(approximate)", lambda: F.gelu(wide, approximate=True), "nothing"),
        ("softmax", lambda: F.softmax(wide), "nothing"),
    ]  # fmt: skip
    for channels, side in ((64, 16), (128, 8), (256, 4), (512, 2)):
        image, kernel = new(16, channels, side, side), new(channels, channels, 3, 3)
        done = "one product: any nn.Conv2D" if side <= 4 else "nothing"
        rows.append(
            (
                f"conv2d, {channels} channels, {side}×{side} pixels",
                lambda image=image, kernel=kernel: F.conv2d(image, kernel, padding=1),  # type: ignore[misc]
                done,
            )
        )
    print(table_head(["forward and backward of", "ms", "instead"]))
    for name, function, instead in rows:
        print(table_row([name, f"{1000 * seconds(function):.2f}", instead]), flush=True)


def seconds(function: Callable[[], Any], times: int = 15) -> float:
    """The median CPU time of the function and its backward."""
    import paddle

    taken, gradient = [], paddle.ones_like(function())
    for _ in range(times):
        began = time.process_time()
        paddle.autograd.backward([function()], [gradient])
        taken.append(time.process_time() - began)
    return statistics.median(taken[3:])


if __name__ == "__main__":
    start_with({**variables(), "GLOG_minloglevel": "2"}, "-W", "ignore")
    main()
