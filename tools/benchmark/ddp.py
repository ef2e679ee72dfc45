"""The MLP of mlp_25mb.yaml under PyTorch's DistributedDataParallel over gloo; started by wire.py with --torch."""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    given = SimpleNamespace(**json.loads(sys.argv[1]))
    os.environ["GLOO_SOCKET_IFNAME"] = given.interface
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{given.master}", rank=given.rank, world_size=given.ranks
    )
    mlp = nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    model = nn.parallel.DistributedDataParallel(mlp)
    optimizer, loss_of = torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    inputs = torch.randn(10 * given.batch, 1024)
    targets = torch.randint(0, 10, (10 * given.batch,))
    began = time.perf_counter()
    for step in range(1, given.steps + 1):
        rows = torch.randperm(len(inputs))[: given.batch]
        loss = loss_of(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % given.every == 0:
            now, loss_value = time.perf_counter(), loss.item()
            seconds, began = (now - began) / given.every, now
            line = {"event": "step", "step": step, "seconds_per_step": seconds, "loss": loss_value}
            if given.rank == 0:
                with open(given.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
