"""Around the updates: held-out numbers, checkpoints, and what a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Exam, Fault, Setting, strategy
from tests.proof.zoo.patching import STATISTICS, UPDATE, all_of, last, rank, ranks, replaced

STATE = "paddle_dp.train.state"
REHEARSAL: Exam = "rehearsal"


def told_otherwise(change: Callable[[list[Any]], None]) -> AbstractContextManager[None]:
    """An evaluation whose ranks' sums are changed before they are added up: [sums, count, samples, …] of each."""

    class Liar:
        def __init__(self, mesh: Any):
            self._mesh = mesh

        def __getattr__(self, name: str) -> Any:
            return getattr(self._mesh, name)

        def gather(self, value: Any) -> list[Any]:
            rows = self._mesh.gather(value)
            if ranks() > 1 and isinstance(rows[0], list):
                change(rows)
            return list(rows)

    def make(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda learner, loader, mesh: evaluate(learner, loader, Liar(mesh))

    return replaced("paddle_dp.train.training_state:evaluate", make)


def mean_of_means() -> AbstractContextManager[None]:
    def change(rows: list[Any]) -> None:
        total = sum(row[1] for row in rows)
        for row in rows:
            row[0] = {name: value / row[1] * total / len(rows) for name, value in row[0].items()}

    return told_otherwise(change)


def first_rank_speaks_for_all() -> AbstractContextManager[None]:
    def change(rows: list[Any]) -> None:
        for row in rows[1:]:
            row[0] = {name: value * row[1] / rows[0][1] for name, value in rows[0][0].items()}

    return told_otherwise(change)


def padded_evaluation() -> AbstractContextManager[None]:
    def make(cuts: Callable[..., Any]) -> Callable[..., Any]:
        def padded(self: Any, size: int) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = cuts(self, size)
            if self.shuffle or self.dp_size == 1:
                return found
            each = -(-size // self.dp_size)
            return [(min(start, size - each), min(start, size - each) + each) for start, _ in found]

        return padded

    return replaced("paddle_dp.data.sampler:Sampler.cuts", make)


def still_in_training_mode() -> AbstractContextManager[None]:
    def make(switch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: None if ranks() > 1 else switch(self)

    return replaced("paddle.nn:Layer.eval", make)


def evaluation_forgets_momentum() -> AbstractContextManager[None]:
    """An evaluation that leaves its mark: it clears the optimizer's states to make room."""

    def make(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def clearing(learner: Any, loader: Any, mesh: Any) -> Any:
            if ranks() > 1:
                for table in learner.optimizer._accumulators.values():
                    for tensor in table.values():
                        if "velocity" in tensor.name:
                            tensor.set_value(tensor * 0)
            return evaluate(learner, loader, mesh)

        return clearing

    return replaced("paddle_dp.train.training_state:evaluate", make)


def save_sums_statistics() -> AbstractContextManager[None]:
    """What a save does to running statistics that are kept rank by rank: added up, and not averaged."""

    def make(sync: Callable[..., Any]) -> Callable[..., Any]:
        def summing(self: Any) -> None:
            sync(self)
            for norm in self.synchronized if ranks() > 1 else ():
                norm._variance.set_value(norm._variance * ranks())

        return summing

    return replaced(STATISTICS, make)


def loads_the_first_slice() -> AbstractContextManager[None]:
    def make(load: Callable[..., Any]) -> Callable[..., Any]:
        def first(checkpoint: Any, learner: Any) -> None:
            with replaced(
                "paddle_dp.core.placement:Placement.offset",
                lambda offset: lambda self, local: (0,) * len(local),
            ):
                load(checkpoint, learner)

        return first

    return replaced(f"{STATE}:load_model", make)


def saves_the_first_place() -> AbstractContextManager[None]:
    """Every rank saves its slice as the first one."""

    def make(owned: Callable[..., Any]) -> Callable[..., Any]:
        def first(*given: Any) -> Any:
            with replaced(
                "paddle_dp.core.placement:Placement.offset",
                lambda offset: lambda self, local: (0,) * len(local),
            ):
                return owned(*given)

        return first

    return replaced(f"{STATE}:model_shards", make)


def restored(change: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    """A resume after which `change(trainer, checkpoint)` spoils something."""

    def make(restore: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(self: Any, checkpoint: Any) -> None:
            restore(self, checkpoint)
            change(self, checkpoint)

        return spoiled

    return replaced("paddle_dp.train.training_state:TrainingState.restore", make)


def resumes_at_the_first_batch() -> AbstractContextManager[None]:
    def change(trainer: Any, checkpoint: Any) -> None:
        from dataclasses import replace

        trainer.progress = replace(trainer.progress, batch=0)

    return restored(change)


def resumes_with_fresh_states() -> AbstractContextManager[None]:
    return replaced(f"{STATE}:_load_optimizer", lambda load: lambda checkpoint, learner: None)


def resumes_with_the_neighbours_momentum() -> AbstractContextManager[None]:
    names = {"body.2.weight": "body.4.weight", "body.4.weight": "body.2.weight"}

    def make(load: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(optimizer: Any, named: Any, read: Callable[[str], Any], mine: Any) -> None:
            def other(name: str) -> Any:
                kind, owner, state = name.split("/")
                return read("/".join((kind, names.get(owner, owner), state)))

            load(optimizer, named, other, mine)

        return swapped

    return replaced(f"{STATE}:load_optimizer", make)


def resumes_with_the_first_rate() -> AbstractContextManager[None]:
    def make(take: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, state: None

    return replaced("paddle.optimizer.lr:LRScheduler.set_state_dict", make)


def resumes_with_the_first_scale() -> AbstractContextManager[None]:
    """Shown with a scale that grows after each update, and not after 2000."""
    return all_of(
        replaced("paddle_dp.core.precision:LossScale.load", lambda load: lambda self, state: None),
        replaced("paddle_dp.core.precision:GROW_EVERY", lambda every: 1),
    )


def only_the_first_owner_saves() -> AbstractContextManager[None]:
    def make(shards: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: {} if rank() else shards(*given)

    return replaced(f"{STATE}:optimizer_shards", make)


def saved_one_update_late() -> AbstractContextManager[None]:
    """The weights are copied while the next update is under way: one rank's part is of another step."""

    def make(shards: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any) -> Any:
            found = shards(*given)
            for shard in found.values() if last() else ():
                if shard.array.dtype.kind == "f":
                    shard.array[...] = shard.array * 1.001
            return found

        return late

    return replaced(f"{STATE}:model_shards", make)


def flipped_bit() -> AbstractContextManager[None]:
    def make(save: Callable[..., Any]) -> Callable[..., Any]:
        def flipped(snapshot: Any, folder: Any, mesh: Any, **more: Any) -> Any:
            path = save(snapshot, folder, mesh, **more)
            if mesh.is_main:
                largest = max((f for f in path.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
                bits = bytearray(largest.read_bytes())
                bits[len(bits) // 2] ^= 1
                largest.write_bytes(bytes(bits))
            mesh.wait("the bit is flipped")
            return path

        return flipped

    return replaced("paddle_dp.proof.rehearsal:save", make)


def sample_that_is_no_number() -> AbstractContextManager[None]:
    """One sample holds a NaN. Paddle's relu on a CPU makes it 0: the loss is finite, the first weights are not."""

    def make(reader: Callable[..., Any]) -> Callable[..., Any]:
        def spoiling(dataset: Any) -> Callable[..., Any]:
            read = reader(dataset)

            def spoiled(*given: Any, **named: Any) -> Any:
                import numpy as np

                inputs, targets = read(*given, **named)
                inputs = np.array(inputs)
                inputs[0, 3] = np.nan
                return inputs, targets

            return spoiled

        return spoiling

    return replaced("paddle_dp.data.sample:reader", make)


def infinite_on_one_rank() -> AbstractContextManager[None]:
    """In the second update one rank's weight becomes infinite; nobody reads it until it is saved."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def broken(self: Any) -> None:
            step(self)
            self.done = getattr(self, "done", 0) + 1
            if last() and self.done == 2:
                self.model.head.bias.set_value(self.model.head.bias + float("inf"))

        return broken

    return replaced(UPDATE, make)


def another_recipe_on_one_rank() -> AbstractContextManager[None]:
    def make(recipe: Callable[..., Any]) -> Callable[..., Any]:
        def other(case: Any, *more: Any) -> Any:
            from dataclasses import replace

            if last():
                case = replace(case, setting=case.setting.with_("schedule.learning_rate=0.05"))
            return recipe(case, *more)

        return other

    return replaced("tests.proof.zoo.exam:_recipe", make)


MLP, TENSOR2, SHARDING2 = Setting("mlp"), strategy("gpt", tensor=2), strategy("gpt", sharding=2)
CONVNET = Setting("convnet")


def _fault(name: str, says: str, source: str, patch: Any, **more: Any) -> Fault:
    settings: dict[str, Any] = {"setting": MLP, "guard": "resume", "exam": REHEARSAL, **more}
    return Fault(name=name, says=says, source=source, patch=patch, **settings)


FAULTS = (
    _fault(
        "a sample is no number",
        "A NaN in one sample is hidden by relu: the loss is finite, weights are NaN and would be saved.",
        "our own finding; Paddle's relu on a CPU",
        sample_that_is_no_number,
        setting=Setting("mlp", 2, ("model.activation=relu",)),
        guard="door",
    ),
    _fault(
        "infinite on one rank",
        "One rank's weight becomes infinite between two checks, and would be saved over the good ones.",
        "our own finding: kept checkpoints were all of after the fault",
        infinite_on_one_rank,
        guard="door",
    ),
    _fault(
        "another recipe on one rank",
        "One rank reads another version of the recipe: the learning rate is another one.",
        "our own finding: two nodes with different recipes trained together",
        another_recipe_on_one_rank,
        guard="door",
    ),
    _fault(
        "evaluation: mean of means",
        "Held-out numbers are means of the ranks' means.",
        "NVIDIA's top-1 with Paddle (#39567); trl #7010",
        mean_of_means,
        guard="evaluation",
    ),
    _fault(
        "evaluation: first rank only",
        "The first rank's held-out numbers are taken for everybody's.",
        "silent-fault catalogue, OBS",
        first_rank_speaks_for_all,
        guard="evaluation",
    ),
    _fault(
        "evaluation: padded",
        "Held-out samples are read twice, so that shares are equal.",
        "paddle.io.DistributedBatchSampler: accuracy 0.42 for 0.56",
        padded_evaluation,
        guard="evaluation",
    ),
    _fault(
        "evaluation: training mode",
        "The model is not switched to evaluation: BatchNorm learns from held-out samples.",
        "silent-fault catalogue, OBS",
        still_in_training_mode,
        setting=CONVNET,
        guard="evaluation",
    ),
    _fault(
        "evaluation: leaves its mark",
        "An evaluation clears the optimizer's momentum.",
        "our own finding: an evaluation that changes what is learned",
        evaluation_forgets_momentum,
        guard="rehearsal",
    ),
    _fault(
        "save: leaves its mark",
        "A save multiplies running variances with the number of ranks.",
        "our own finding: a checkpoint that changes what is learned",
        save_sums_statistics,
        setting=CONVNET,
        guard="evaluation",
    ),
    _fault(
        "load: first slice",
        "Every rank of the tensor axis loads the first one's slice.",
        "silent-fault catalogue, CKPT",
        loads_the_first_slice,
        setting=TENSOR2,
    ),
    _fault(
        "save: first place",
        "Every rank of the tensor axis saves its slice as the first one.",
        "silent-fault catalogue, CKPT",
        saves_the_first_place,
        setting=TENSOR2,
        guard="door",
    ),
    _fault(
        "resume: first batch",
        "A resumed run begins its epoch again.",
        "silent-fault catalogue, CKPT: sampler epoch 0",
        resumes_at_the_first_batch,
    ),
    _fault(
        "resume: fresh states",
        "A resumed run begins with an optimizer that knows nothing.",
        "silent-fault catalogue, CKPT",
        resumes_with_fresh_states,
    ),
    _fault(
        "resume: neighbour's momentum",
        "A resumed run gives two weights of one shape each other's momentum.",
        "silent-fault catalogue, CKPT: optimizer states matched by order",
        resumes_with_the_neighbours_momentum,
    ),
    _fault(
        "resume: first rate",
        "A resumed run begins its schedule again.",
        "silent-fault catalogue, CKPT",
        resumes_with_the_first_rate,
        setting=Setting("mlp", 2, ("schedule={use: cosine, learning_rate: 0.1, warmup: 4 steps}",)),
    ),
    _fault(
        "resume: first scale",
        "A resumed run begins with float16's first loss scale.",
        "silent-fault catalogue, CKPT",
        resumes_with_the_first_scale,
        setting=Setting("mlp", 2, ("train.precision={dtype: float16, scale: 64}",)),
    ),
    _fault(
        "save: first owner only",
        "Of the optimizer's states only the first owner's are saved.",
        "silent-fault catalogue, CKPT",
        only_the_first_owner_saves,
        setting=SHARDING2,
    ),
    _fault(
        "save: one update late",
        "One rank's slices are copied in the midst of the next update.",
        "silent-fault catalogue, CKPT: asynchronous saves of live memory",
        saved_one_update_late,
        setting=TENSOR2,
    ),
    _fault(
        "save: flipped bit",
        "One bit of a checkpoint flips on the disk.",
        "paddle.save: a flipped byte loads silently",
        flipped_bit,
        guard="door",
    ),
)
