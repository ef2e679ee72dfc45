"""Trains a recipe; the script for Paddle's own launcher.

    python -m paddle.distributed.launch --nproc_per_node 2 tools/train.py -c configs/digits_mlp.yaml -o train.batch=64
    python -m paddle.distributed.launch --gpus 0,1 tools/train.py -c configs/resnet50_flowers102.yaml
    python tools/train.py -c configs/digits_mlp.yaml                                  # one process

`paddle-dp train` does the same with a supervisor around it, which also ends all processes after a failure.
"""

import os
import sys
from pathlib import Path

sys.path[0] = os.getcwd()  # in place of tools/, whose files would hide packages of the same names
sys.path.append(str(Path(__file__).resolve().parent.parent))

from paddle_dp.launch.recipe_rank import main  # noqa: E402

if __name__ == "__main__":
    main("train")
