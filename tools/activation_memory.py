"""What forward keeps for backward of one micro-batch, under each word of `recompute`, counted in a run; as markdown.

    python tools/activation_memory.py configs/gpt_single.yaml
    python -m paddle.distributed.launch --nproc_per_node 2 tools/activation_memory.py configs/gpt_single.yaml \\
        strategy.use=hybrid strategy.tensor=2 strategy.sequence_parallel=true

Weights are not counted, for they are there anyway. A pipeline's stages are not measured here.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # tools/ was there, and would hide packages that are named like its files
sys.path.append(str(Path(__file__).resolve().parent.parent))

WORDS = ("none", "selective", "every 2 blocks", "full")


def kept(learner: Any, micro_batch: Any) -> int:
    """Bytes that autograd holds between forward and backward, each once."""
    import paddle

    held: dict[int, int] = {}

    def keep(tensor: paddle.Tensor) -> paddle.Tensor:
        held[tensor.data_ptr()] = tensor.size * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(keep, lambda tensor: tensor), learner.mixed.context():
        learner.loss(learner.model(micro_batch.inputs), micro_batch.targets)
        for parameter in learner.model.parameters():
            held.pop(parameter.data_ptr(), None)
        return sum(held.values())


def main() -> None:
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train.assemble import Assembly
    from paddle_dp.train.build import setup, task
    from paddle_dp.units import Recompute

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe, given.overrides)
    assembly = Assembly(setup(recipe), join(seed=recipe.train.seed, device=recipe.train.device))
    strategy: Any = assembly.strategy
    micro_batch = next(iter(assembly.train_loader.read(0))).micro_batches[0]
    rows = []
    for word in WORDS:
        config = replace(strategy.config, recompute=Recompute.parse(word))
        learner = replace(strategy, config=config).place(task(recipe, 1, 1))
        rows.append((word, max(strategy.mesh.gather(kept(learner, micro_batch)))))
    if strategy.mesh.is_main:
        print("| recompute | kept by a rank for backward | |", "|---|---|---|", sep="\n")
        for word, count in rows:
            print(f"| `{word}` | {count / 2**20:.1f} MB | {count / rows[0][1]:.0%} |")


if __name__ == "__main__":
    main()
