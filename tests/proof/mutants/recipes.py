"""The recipes of the exam: small, with what trainings have and configs/gpt_tiny.yaml has not."""

from __future__ import annotations

from tests.proof.zoo.case import Setting, strategy

HERE = "tests.proof.mutants.models"
FLOAT16 = "train.precision={dtype: float16, scale: 1024}"


def _dropping(setting: Setting, settings: str = "", *overrides: str) -> Setting:
    """The zoo's GPT with dropout everywhere, also of attention weights."""
    return setting.with_(f"model={{use: {HERE}.Dropping{', ' * bool(settings)}{settings}}}", *overrides)


RECIPES: dict[str, Setting] = {
    # BatchNorm over both ranks, dropout, a loss whose count is only known after forward.
    "data": Setting("convnet", 2, (
        "model.dropout=0.2", "train.batch=10", "train.micro_batches=2", f"loss={{use: {HERE}.Uncertain}}",
    )),
    # One sample on two ranks: the other one has a dummy.
    "dummies": Setting("convnet", 2, ("model.dropout=0.2", "train.batch=3", "train.micro_batches=3")),
    # Frozen weights, and masks of more than 2¹⁶ numbers on each rank.
    "masks": Setting("mlp", 2, (
        f"model={{use: {HERE}.Wide}}", "strategy={use: hybrid}", "train.batch=48",
    )),
    "sharding 1": _dropping(strategy("gpt", sharding=2, sharding_stage=1), "", FLOAT16),
    "sharding 2": _dropping(
        strategy("gpt", sharding=2, sharding_stage=2), "frozen: 2", f"loss={{use: {HERE}.Uncertain}}"
    ),
    "sharding 3": _dropping(strategy("gpt", sharding=2, sharding_stage=3), "depth: 3, frozen: 1"),
    "tensor": _dropping(strategy("gpt", 4, data=2, tensor=2)),
    "stretches": _dropping(
        strategy("gpt", tensor=2, sequence_parallel=True), "", "train.precision={dtype: bfloat16}"
    ),
    "pipeline": _dropping(strategy("gpt", 4, data=2, pipeline=2), "", "train.batch=5", "train.micro_batches=4"),
    "sequence": _dropping(strategy("gpt", sequence=2), "", "train.micro_batches=1"),
}  # fmt: skip
