"""The training of recovery.py in PyTorch, a rank of it: under torchrun with a checkpoint, or under torchft.

Started by recovery.py. The order of samples, the batch, the model and the sleep are those of recovery_parts.py; samples
are a function of the step, so that a rank that goes on from a step reads what it would have read.

torchrun: DDP over gloo; rank 0 saves every so many steps with torch.save.
torchft: each rank is a replica group; the position in the data is the manager's step, which a replica that returns gets
with the weights of the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tools.benchmark.recovery_table import append

Tensors = tuple[torch.Tensor, torch.Tensor]


class Perceptron(nn.Module):
    def __init__(self, width: int, sample_ms: float):
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.sample_ms = sample_ms

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sample_ms * len(samples) / 1000)
        hidden = F.gelu(self.first(samples[:, :-1]))
        scores: torch.Tensor = self.head(F.gelu(self.second(hidden)))
        return scores


class Data:
    """The samples, and those of each step that belong to a rank."""

    def __init__(self, path: str, batch: int, rank: int, ranks: int):
        arrays = np.load(path)
        self.inputs = torch.from_numpy(arrays["inputs"])
        self.targets = torch.from_numpy(arrays["targets"])
        self.batch, self.rank, self.ranks = batch, rank, ranks

    def of_step(self, step: int) -> Tensors:
        """The inputs and targets of this rank in update `step`, from 1."""
        epoch, position = divmod(step - 1, len(self.inputs) // self.batch)
        order = np.random.default_rng([0, epoch]).permutation(len(self.inputs))
        share = order[position * self.batch :][: self.batch][self.rank :: self.ranks]
        return self.inputs[share], self.targets[share]


def main() -> None:
    settings = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Perceptron(settings.width, settings.sample_ms)
    learned = fault_tolerant(model, settings) if settings.torchft else checkpointed(model, settings)
    if learned:
        weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
        np.savez(Path(settings.folder) / "weights.npz", **weights)


def checkpointed(model: Perceptron, settings: SimpleNamespace) -> bool:
    """Under torchrun; true on rank 0.

    Each attempt has keys of its own in the agent's store: by `init_process_group("gloo")` alone the ranks of a restart
    find the addresses of the attempt before (torch 2.13), and restart several times more, or wait without an end.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    data = Data(settings.data, settings.batch, rank, ranks)
    log = partial(append, Path(settings.folder), rank)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    path, done = Path(settings.folder) / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    log(**{"from": done})
    for step in range(done + 1, settings.steps + 1):
        began, (inputs, targets) = time.time(), data.of_step(step)
        F.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        log(began=began, step=step, samples=inputs[:, -1].long().tolist())
        if rank == 0 and step % settings.save_every == 0:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    dist.barrier()
    return rank == 0


def fault_tolerant(model: Perceptron, settings: SimpleNamespace) -> bool:
    """Under torchft; true on replica 0.

    Gradients are exchanged by Manager.allreduce: in torchft 0.2.0 DistributedDataParallel over gloo ends a replica with
    an AssertionError when its peer is killed. A replica's checkpoint is read where all replicas were lost; else the
    state of a living one replaces it.
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank, ranks = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    data = Data(settings.data, settings.batch, rank, ranks)
    log = partial(append, Path(settings.folder), rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    path, logs = Path(settings.folder) / f"checkpoint-{rank}.pt", False

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=state_dict, replica_id=f"recovery_{rank}", timeout=timedelta(seconds=30), init_sync=False,
    )  # fmt: skip
    if path.exists():
        state = torch.load(path)
        load(state)
        manager.load_state_dict(state["manager"])
    managed = Optimizer(manager, optimizer)
    wait_for_all(Path(settings.folder), rank, ranks)
    while (step := manager.current_step() + 1) <= settings.steps:
        began, (inputs, targets) = time.time(), data.of_step(step)
        managed.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        gradients = nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
        manager.allreduce(gradients).wait()
        at = 0
        for parameter in model.parameters():
            parameter.grad = gradients[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        managed.step()
        if manager.current_step() != step:  # not committed, or the state of another replica was taken
            continue
        if not logs:
            log(**{"time": began, "from": step - 1})
        logs = True
        log(began=began, step=step, samples=inputs[:, -1].long().tolist())
        if step % settings.save_every == 0:
            save({**state_dict(), "manager": manager.state_dict()}, path)
    manager.shutdown(wait=False)
    return rank == 0


def save(state: dict[str, Any], path: Path) -> None:
    """Saves under another name until it is complete."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def wait_for_all(folder: Path, rank: int, ranks: int) -> None:
    """Waits until all replicas have come this far once: the first one would train alone while the others import."""
    (folder / f"ready-{rank}").touch()
    while not all((folder / f"ready-{each}").exists() for each in range(ranks)):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
