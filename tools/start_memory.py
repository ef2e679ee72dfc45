"""Starts a recipe's ranks, with a limit on their memory if wanted, and prints what each took until its model was there.

    python -m paddle.distributed.launch --nproc_per_node 2 tools/start_memory.py configs/llama_7b.yaml --random \\
        --limit 4.6 strategy.tensor=2 strategy.sharding=1 strategy.sharding_stage=1 model.depth=6 train.device=cpu

What a rank took is its largest resident set (VmHWM): before the model is built, and when it is placed. `--random` reads
random tokens instead of the recipe's data. Beyond `--limit` (RLIMIT_DATA, in GB) an allocation fails.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

sys.path[0] = os.getcwd()  # in place of tools/, whose files would hide packages of the same names
sys.path.append(str(Path(__file__).resolve().parent.parent))

GB = 1e9
HEAD = "| rank | its part | before | largest | part + block + before | start |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--limit", type=float, metavar="GB", help="of each rank's data")
    parser.add_argument("--random", action="store_true", help="random tokens instead of the recipe's data")
    return parser.parse_intermixed_args()


def peak() -> float:
    """The largest resident set of this process so far, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start(given: argparse.Namespace) -> None:
    """In each rank: the real assembly, up to the placed model."""
    from paddle_dp.assembly.build import learner_of
    from paddle_dp.axes.meta_init import units
    from paddle_dp.mesh import join
    from paddle_dp.part import lazily, read_part
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(given.recipe, given.overrides)
    if given.random:
        model = recipe.model.config
        tokens = {"use": "random_tokens", "vocab": model.vocab, "length": 16, "samples": 8, "test_samples": 2}
        recipe = recipe.model_copy(update={"dataset": read_part("datasets", tokens)})
    if given.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(given.limit * GB), resource.RLIM_INFINITY))
    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    with lazily():
        whole = recipe.build_model()
        total = sum(int(p.size) for p in whole.parameters()) * 4
        block = max(sum(int(p.size) for p in unit.parameters()) for unit in units(whole)) * 4
    del whole
    before, began = peak(), time.perf_counter()
    learner = learner_of(recipe, mesh)
    seconds, after = time.perf_counter() - began, peak()
    part = sum(p.size * p.element_size() for _, p in learner.placed.named_parameters() if p._is_initialized())
    rows = mesh.gather([part, before, after, seconds])
    if mesh.is_main:
        limit = f"; limit of each rank's data {given.limit:g} GB" if given.limit else ""
        print(f"the whole model {total / GB:.2f} GB, its largest block {block / GB:.2f} GB{limit}")
        print(HEAD, "|---" * 6 + "|", sep="\n")
        for rank, (own, first, most, took) in enumerate(rows):
            sizes = " | ".join(f"{size / GB:.2f} GB" for size in (own, first, most, own + block + first))
            print(f"| {rank} | {sizes} | {took:.0f} s |", flush=True)


if __name__ == "__main__":
    start(arguments())
