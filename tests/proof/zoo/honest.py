"""Honest models: what a proof must pass, or name the difference that is real."""

from __future__ import annotations

from tests.proof.zoo.case import Honest, Setting, strategy

HERE = "tests.proof.zoo.models"
HONEST = tuple(
    Honest(name=f"plain {name}", says="The recipe of the faults, without one.", setting=setting)
    for name, setting in {
        "mlp": Setting("mlp"),
        "convnet": Setting("convnet"),
        "gpt, data 2": strategy("gpt", data=2),
        "gpt, tensor 2": strategy("gpt", tensor=2),
        "gpt, stretches": strategy("gpt", tensor=2, sequence_parallel=True),
        "gpt, sequence 2": strategy("gpt", sequence=2),
        "gpt, pipeline 2": strategy("gpt", pipeline=2),
        "gpt, tied": strategy("gpt", pipeline=2).with_("model.tied=true"),
        "gpt, sharding 2": strategy("gpt", sharding=2),
        "gpt, stage 3": strategy("gpt", sharding=2, stage=3),
    }.items()
)
