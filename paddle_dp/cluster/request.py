"""A request to a cluster: a recipe on some nodes, and the equipment of each node."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.launch.batch_numbers import batch_numbers
from paddle_dp.launch.memory import refuse_memory
from paddle_dp.recipe import Recipe, read_recipe, shipped

MOST_NODES = 64
RESTARTS = 3  # of a node whose request says no number
EARLY = 60  # seconds by which Slurm may send a signal sooner than asked: `man sbatch` on --signal
_SHORTEST = 2 * EARLY
_CPUS_OF_GPU = 4  # few enough for nodes with 8 GPUs and 48 processors


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """A recipe on `nodes` machines, with `ranks` processes on each of them.

    `time` is the limit "[DAYS-]HH:MM:SS", `memory` a node's, such as "16Gi", or "" for the engine's default. `cpus` is
    a node's number of processors; by default four for each GPU, or one for each rank without GPUs. `folder`
    is the run's, on a disk that all nodes share; `claim` that disk's name for Kubernetes. `grace`: seconds from the
    request to stop until the end.
    """

    recipe: Path
    settings: tuple[str, ...] = ()
    name: str = ""
    nodes: int = 1
    ranks: int | None = None
    gpus: int = 0
    cpus: int | None = None
    memory: str = ""
    time: str = "04:00:00"
    folder: str = ""
    image: str = "REGISTRY/paddle-dp:latest"
    claim: str = "runs"
    restarts: int | None = None
    grace: int = 120

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise UsageError(f"--nodes {self.nodes}: give 1 to {MOST_NODES} machines.")
        for option, number, least in (
            ("--ranks", 1 if self.ranks is None else self.ranks, 1), ("--gpus", self.gpus, 0),
            ("--cpus", 1 if self.cpus is None else self.cpus, 1), ("--restarts", self.restarts or 0, 0),
        ):  # fmt: skip
            if number < least:
                raise UsageError(f"{option} {number}: give {least} or more.")
        for option, text, pattern, example in (
            ("--time", self.time, r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", "04:00:00"),
            ("--memory", self.memory, r"([1-9]\d*(Mi|Gi|Ti))?", "16Gi"),
            ("--name", self.name, r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "digits-mlp"),
            ("--image", self.image, r"[\w./:@-]+", "registry.example.org/paddle-dp:0.1.0"),
            ("--claim", self.claim, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "runs"),
        ):  # fmt: skip
            if not re.fullmatch(pattern, text, re.ASCII):
                raise UsageError(f"{option} {text}: give it such as {example}.")
        if self.seconds < _SHORTEST:
            raise UsageError(
                f"--time {self.time}: give {_SHORTEST} s or more, or no update is made before the limit."
            )
        for text in (str(self.recipe), self.folder, *self.settings):
            if control := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]", text):
                raise UsageError(
                    f"{text!r} has the control character {control[0]!r}, which a script cannot hold."
                )

    @property
    def ranks_of_node(self) -> int:
        return self.ranks or self.gpus or 1

    @property
    def cpus_of_node(self) -> int:
        return self.cpus or _CPUS_OF_GPU * self.gpus or self.ranks_of_node

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def command(self) -> str:
        """The shell's words of `paddle-dp train` with the recipe, its settings and the ranks."""
        tokens = ["paddle-dp", "train", str(self.recipe), *self.settings, "--ranks", str(self.ranks_of_node)]
        return shlex.join(tokens)


def checked(request: ClusterRequest, restarts: int = RESTARTS) -> Recipe:
    """Reads the recipe with its settings. Raises RecipeError for mistakes in it, and UsageError if the ranks of all
    nodes together would refuse it: the queue would tell it hours later. Packages may be missing here. `restarts`: by
    default, 0 for an engine that restarts no node."""
    kind = "gpu" if request.gpus else "cpu"
    numbers = batch_numbers(request.recipe, request.settings, request.ranks_of_node, request.nodes, kind)
    recipe = read_recipe(request.recipe, [*request.settings, *numbers.overrides])
    total = request.nodes * request.ranks_of_node
    ranks = recipe.strategy.config.layout(total).degrees.ranks
    if ranks != total:
        raise UsageError(
            f"strategy {recipe.strategy.name} is for {ranks} ranks, and {request.nodes} × {request.ranks_of_node} are "
            f"{total}: change --nodes or --ranks, or the strategy's degrees."
        )
    for part in (recipe.strategy, *recipe.callbacks):
        with suppress(InstallError, ModuleNotFoundError):
            part.refuse(recipe, total, kind)
    advice = (
        "Give --restarts 3, or leave it out." if restarts else "Leave it out: Slurm requeues the whole job."
    )
    refuse_memory(recipe, restarts if request.restarts is None else request.restarts, request.nodes, advice)
    return recipe


def path_in_image(recipe: Path) -> Path:
    """The recipe's path from the folder in which a container starts, which has the files of the current folder. Raises
    UsageError for a recipe outside of it, but for one that comes with the package."""
    if shipped.comes_with_package(recipe):
        return Path("configs", recipe.name)
    path, folder = Path(os.path.abspath(recipe)), Path.cwd()
    if not path.is_relative_to(folder):
        raise UsageError(
            f"{recipe} is outside of the current folder, and a container has other folders than this machine. Build "
            "the image with the recipe's project under /work (docker build -f .devcontainer/Containerfile …), and type "
            "this command in the project's folder."
        )
    return path.relative_to(folder)


def name_of(recipe: Recipe) -> str:
    """A name for the engine's job, from the recipe's: a label of DNS, at most 40 characters."""
    label = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"train-{label}".rstrip("-"))[:40].rstrip("-")
