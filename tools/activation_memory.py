"""Measures the activations that forward keeps of one micro-batch, for each value of `recompute`; prints markdown.

    python tools/activation_memory.py configs/gpt_single.yaml
    python -m paddle.distributed.launch --nproc_per_node 2 tools/activation_memory.py configs/gpt_single.yaml \\
        strategy.use=hybrid strategy.tensor=2 strategy.sequence_parallel=true

Weights are not counted. It does not measure the stages of a pipeline.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # in place of tools/, whose files would hide packages of the same names
sys.path.append(str(Path(__file__).resolve().parent.parent))

WORDS = ("none", "selective", "every 2 blocks", "full")


def saved_bytes(learner: Any, micro_batch: Any) -> int:
    """Bytes of the tensors that autograd saves for backward, each counted once."""
    import paddle

    sizes: dict[int, int] = {}

    def count(tensor: paddle.Tensor) -> paddle.Tensor:
        sizes[tensor.data_ptr()] = tensor.size * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(count, lambda tensor: tensor), learner.mixed.context():
        learner.loss(learner.model(micro_batch.inputs), micro_batch.targets)
        for parameter in learner.model.parameters():
            sizes.pop(parameter.data_ptr(), None)
        return sum(sizes.values())


def main() -> None:
    from paddle_dp.assembly.assemble import TrainerBuilder
    from paddle_dp.assembly.build import setup, task
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.units import Recompute

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe, given.overrides)
    assembly = TrainerBuilder(setup(recipe), join(seed=recipe.train.seed, device=recipe.train.device))
    strategy: Any = assembly.strategy
    micro_batch = next(iter(assembly.train_loader.read(0))).micro_batches[0]
    rows = []
    for word in WORDS:
        config = replace(strategy.config, recompute=Recompute.parse(word))
        learner = replace(strategy, config=config).place(task(recipe, 1, 1))
        rows.append((word, max(strategy.mesh.gather(saved_bytes(learner, micro_batch)))))
    if strategy.mesh.is_main:
        print("| recompute | kept by a rank for backward | |", "|---|---|---|", sep="\n")
        for word, count in rows:
            print(f"| `{word}` | {count / 2**20:.1f} MB | {count / rows[0][1]:.0%} |")


if __name__ == "__main__":
    main()
