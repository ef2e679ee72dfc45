"""Honest models: what a proof must pass, or of which it must name the difference that is real."""

from __future__ import annotations

from tests.proof.zoo.case import Exam, Honest, Setting, strategy

ADAMW = ("optimizer={use: adamw}", "schedule.learning_rate=1e-3")
HERE = "tests.proof.zoo.models"

AUGMENTED = (
    "dataset={use: tests.proof.zoo.pictures.Pictures, augment: rand, erase: 0.5}", "model.channels=3",
    "mix={mixup: 0.5, cutmix: 1.0}", "train.micro_batches=2",
)  # fmt: skip
EXAMS: tuple[Exam, ...] = ("verify", "rehearsal")

LAYOUTS = {
    "data 2": strategy("gpt", data=2),
    "tensor 2": strategy("gpt", tensor=2),
    "tensor 2 with stretches": strategy("gpt", tensor=2, sequence_parallel=True),
    "sequence 2": strategy("gpt", sequence=2),
    "pipeline 2": strategy("gpt", pipeline=2),
    "pipeline 2, interleaved": strategy("gpt", pipeline=2, pipeline_schedule="interleaved"),
    "pipeline 2, tied": strategy("gpt", pipeline=2).with_("model.tied=true"),
    "sharding 2": strategy("gpt", sharding=2),
    "sharding 2, stage 3": strategy("gpt", sharding=2, sharding_stage=3),
    "tensor 2 × pipeline 2": strategy("gpt", 4, tensor=2, pipeline=2),
    "recompute": strategy("gpt", data=2, recompute="full"),
}
VISION = {  # name: smallest side of a picture that the model takes, or 64
    "alexnet": 224, "densenet121": 64, "googlenet": 224, "inception_v3": 96, "mobilenet_v1": 64, "mobilenet_v2": 64,
    "mobilenet_v3_large": 64, "mobilenet_v3_small": 64, "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64,
    "shufflenet_v2_x0_25": 64, "squeezenet1_0": 64, "squeezenet1_1": 64, "vgg11": 64, "wide_resnet50_2": 64,
}  # fmt: skip
GENTLE = ("googlenet", "vgg11")  # at the rate of the others their numbers are not finite after 3 steps
HEAVY = ("alexnet", "googlenet", "vgg11", "wide_resnet50_2")
DIGITS = {  # model of tests/proof/zoo/models.py, its settings: why it might be blamed
    "Frozen": ("", "A frozen layer far larger than what learns."),
    "ThreeTimes": ("", "One matrix used three times, behind gates that begin at zero (ReZero)."),
    "Dead": ("", "Half of the units never fire: rows without any gradient."),
    "Experts": ("", "A router that sends each sample to one of two experts."),
    "Shifted": ("", "A constant buffer."),
    "LogitScale": ("", "CLIP's logit scale, a parameter of no dims."),
    "DropPath": ("", "Whole samples' branches are dropped by paddle.rand, at a rate that grows."),
    "Logged": ("", "A mean of its samples that a layer notes, and that nothing reads."),
}
NORMS = {
    "spectral": "Spectral norm, whose power iteration updates buffers in forward.",
    "weight": "Weight norm, two parameters for one matrix.",
    "group": "GroupNorm behind biases without a true gradient of their mean.",
    "layer": "LayerNorm without weights of its own.",
    "instance": "InstanceNorm behind biases without a true gradient.",
    "batch": "BatchNorm behind biases without a true gradient, under AdamW.",
    "legacy": "paddle.nn.BatchNorm, the class of its own that every densenet uses.",
}
TOKENS = {
    "Encoder": ("", "nn.TransformerEncoder with its default dropout and key biases without a true gradient."),
    "Recurrent": ("kind: LSTM", "Two LSTM layers, and an embedding with a padding row."),
    "Recurrent, GRU": ("kind: GRU, dropout: 0.2", "Two GRU layers with dropout between them."),
    "Recurrent, SimpleRNN": ("kind: SimpleRNN", "Two layers of a simple recurrent network."),
    "Tied": ("", "One embedding used for tokens, positions and scores."),
}


def _use(name: str, settings: str = "") -> str:
    return f"model={{use: {HERE}.{name.partition(',')[0]}{', ' * bool(settings)}{settings}}}"


HONEST = (
    *(Honest(name=f"gpt, {name}", says="A GPT in this layout.", setting=s) for name, s in LAYOUTS.items()),
    *(
        Honest(name=f"rehearsal, {name}", says="Interrupted and resumed.", setting=s, exam="rehearsal")
        for name, s in {"mlp": Setting("mlp"), "convnet": Setting("convnet"), **LAYOUTS}.items()
    ),
    Honest(name="perceptron", says="GELU, momentum, clip, two micro-batches.", setting=Setting("mlp")),
    Honest(name="convnet", says="Synchronized BatchNorm, unequal shares.", setting=Setting("convnet")),
    *(
        Honest(
            name=f"augmented and mixed{', rehearsed' * (exam == 'rehearsal')}",
            says="RandAugment, random erasing, Mixup and CutMix, in two micro-batches.",
            setting=Setting("convnet", 2, AUGMENTED),
            exam=exam,
        )
        for exam in EXAMS
    ),
    Honest(
        name="dropout",
        says="A perceptron with dropout 0.3.",
        setting=Setting("mlp", 2, ("model.dropout=0.3",)),
    ),
    Honest(
        name="accumulation",
        says="Seven micro-batches of unequal sizes, some of them empty on a rank.",
        setting=Setting("mlp", 2, ("train.micro_batches=7", "train.batch=10")),
    ),
    Honest(
        name="bfloat16",
        says="Products rounded to 8 bits.",
        setting=Setting("mlp", 2, ("train.precision={dtype: bfloat16}",)),
    ),
    Honest(
        name="float16",
        says="Products rounded to 11 bits, under a loss scale.",
        setting=Setting("mlp", 2, ("train.precision={dtype: float16, scale: 1024}",)),
    ),
    Honest(
        name="float16, overflow",
        says="A loss scale so large that every step overflows on both sides and is left out.",
        setting=Setting("mlp", 2, ("train.precision={dtype: float16, scale: 1e9}",)),
        told="PROVES NOTHING",
    ),
    *(
        Honest(name=name, says=says, setting=Setting("mlp", 2, (_use(name, settings),)))
        for name, (settings, says) in DIGITS.items()
    ),
    *(
        Honest(
            name=f"{norm} norm",
            says=says,
            setting=Setting("convnet", 2, (_use("Normed", f"norm: {norm}"), *ADAMW)),
        )
        for norm, says in NORMS.items()
    ),
    *(
        Honest(name=name, says=says, setting=Setting("tokens", 2, (_use(name, settings),)))
        for name, (settings, says) in TOKENS.items()
    ),
    *(
        Honest(
            name=name,
            says=f"paddle.vision.models.{name}, {side} pixels a side.",
            setting=Setting(
                "images",
                2,
                (
                    _use("Vision", f"name: {name}"), f"dataset.shape=[3, {side}, {side}]",
                    *(("schedule.learning_rate=1e-3",) if name in GENTLE else ()),
                ),
            ),
            heavy=name in HEAVY,
        )
        for name, side in VISION.items()
    ),
)  # fmt: skip
