"""The trainings of the record: a row each, as small as the case allows. `tools/golden.py` runs and compares them.

30 samples in batches of 8 leave a last batch of 6 at step 4, and checkpoints of steps 3 and 6 leave something to go on
from. A `{word}` of a command is replaced: `recipe`, `run`, `ranks`, `settings` (KEY=VALUE …) and `here` (this folder).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_TRAINING = """
schedule: {use: cosine, learning_rate: 1.0e-2, warmup: 2 steps}
train: {length: 6 steps, batch: 8, micro_batches: 2, seed: 3}
callbacks:
  - {use: console, every: 1 step}
  - {use: metrics, every: 1 step}
  - {use: evaluate, every: 1 epoch, confusion: false}
  - {use: checkpoint, every: 3 steps, keep: 2}
"""
_IMAGES = "dataset: {use: random_images, shape: [1, 8, 8], classes: 4, samples: 30, test_samples: 10}"
RECIPES = {
    "gpt": """
model: {use: gpt, vocab: 32, width: 16, depth: 4, heads: 4, length: 8}
dataset: {use: random_tokens, vocab: 32, length: 8, samples: 30, test_samples: 10}
loss: {use: cross_entropy}
optimizer: {use: adamw, clip: 0.5}
"""
    + _TRAINING,
    "mlp": f"""
model: {{use: mlp, inputs: 64, hidden: [16, 16], classes: 4, activation: gelu, dropout: 0.1}}
{_IMAGES}
loss: {{use: cross_entropy, label_smoothing: 0.1}}
optimizer: {{use: adamw, weight_decay: 0.05}}
"""
    + _TRAINING,
    "convnet": f"""
model: {{use: convnet, widths: [4, 8], classes: 4, norm: batch, activation: gelu, pool: mean}}
{_IMAGES}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum, weight_decay: 5.0e-4}}
"""
    + _TRAINING,
    "siamese": """
model: {use: siamese, inputs: 64, hidden: [16], embedding: 8, shared: true}
dataset: {use: digit_pairs, pairs: 30}
loss: {use: siamese, margin: 1.0}
optimizer: {use: adamw}
"""
    + _TRAINING,
}
TRAIN = "train {recipe} --ranks {ranks} --out {run} {settings}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`commands` of `paddle-dp`, one after the other; their run folder is read behind the last one.

    `free`: why no number of it is the same twice; its names, shapes, screen's form and exit statuses are compared.
    """

    name: str
    recipe: str = "gpt"
    ranks: int = 1
    settings: tuple[str, ...] = ()
    commands: tuple[str, ...] = (TRAIN,)
    free: str = ""


def _case(name: str, recipe: str, ranks: int, *settings: str, **more: object) -> Case:
    return Case(name=name, recipe=recipe, ranks=ranks, settings=settings, **more)  # type: ignore[arg-type]


def _hybrid(name: str, ranks: int, words: str, *settings: str, **more: object) -> Case:
    return _case(name, "gpt", ranks, f"strategy={{use: hybrid, {words}}}", *settings, **more)


def _data(name: str, recipe: str, words: str = "", *settings: str, **more: object) -> Case:
    return _case(
        name, recipe, 2, f"strategy={{use: data_parallel{', ' * bool(words)}{words}}}", *settings, **more
    )


def _resumed(ranks: int, settings: str = "{settings}") -> tuple[str, str]:
    """Trains, then goes on from step 3 on so many ranks."""
    return TRAIN, f"train {{recipe}} --ranks {ranks} --out {{run}} --resume 3 {settings}"


_SINGLE = "strategy.use=single"
_DROPOUT = "model.dropout=0.1"
_GUARD = "dataset.use=golden_images.Dataset"
_TIMING = "who comes first to an exchange that nobody waits for decides what is averaged with what"

CASES = (
    # One process, and what a training can have beside its layout.
    _case("single", "gpt", 1, _SINGLE),
    _case("single float64", "gpt", 1, _SINGLE, "train.precision=float64"),
    _case("single bfloat16", "gpt", 1, _SINGLE, "train.precision=bfloat16"),
    _case("single bfloat16 O2", "gpt", 1, _SINGLE, "train.precision={dtype: bfloat16, level: O2}"),
    # The first loss scale is too large for float16: updates are left out until it has adapted.
    _case("single float16", "gpt", 1, _SINGLE, "train.precision={dtype: float16, scale: 524288}"),
    _case("single recompute", "gpt", 1, _SINGLE, "strategy.recompute=full", _DROPOUT),
    _case("single recompute 2 blocks", "gpt", 1, _SINGLE, "strategy.recompute=every 2 blocks"),
    _case("single ema", "mlp", 1, _SINGLE, "ema={decay: 0.9, warmup: true}"),
    _case("single lora", "gpt", 1, _SINGLE, "adapter={use: lora, rank: 2, match: ['*.qkv', '*.up']}"),
    _case("single groups", "gpt", 1, _SINGLE, "optimizer.groups=[{match: blocks.0, frozen: true}, "
          "{match: '*.bias', lr_scale: 2, weight_decay: 0}, {match: '*', decay_by_depth: 0.8}]"),
    _case("single lamb", "mlp", 1, _SINGLE, "optimizer={use: lamb, clip_value: 0.01}"),
    _case("single guard skip", "convnet", 1, _SINGLE, _GUARD, "guard.non_finite=skip"),
    _case("single guard rewind", "convnet", 1, _SINGLE, _GUARD, "guard.non_finite=rewind"),
    _case("single guard stop", "convnet", 1, _SINGLE, _GUARD, "guard.non_finite=stop"),
    _case("single micro_batches", "mlp", 1, _SINGLE, "train.micro_batches=4", "train.drop_last=true",
          "callbacks.evaluate.confusion=true"),
    _case("replicas", "mlp", 1, "strategy={use: replicas, count: 2}"),
    # Every way of gradients, and what else the data axis has.
    _data("data pushed", "mlp"),
    _data("data bucketed", "mlp", "exchange: bucketed, comm_buffer_size: 1 KB, last_comm_buffer_size: 1 KB"),
    _data("data after", "mlp", "exchange: after"),
    _data("data per_parameter", "mlp", "exchange: per_parameter"),
    _data("data find_unused_parameters", "mlp", "find_unused_parameters: true, exchange: bucketed"),
    _data("data recompute", "gpt", "recompute: selective", _DROPOUT),
    _data("data init seed", "mlp", "init: seed"),
    _data("data compress bfloat16", "convnet", "compress: bfloat16"),
    _data("data compress float16", "convnet", "compress: float16"),
    _data("data power_sgd", "mlp", "compress: power_sgd rank 2 after 2 steps", commands=_resumed(2)),
    _data("data float64", "mlp", "", "train.precision=float64"),
    _data("data float16", "mlp", "", "train.precision={dtype: float16, scale: 524288}"),
    _data("data bfloat16", "gpt", "", "train.precision=bfloat16", _DROPOUT),
    _data("data own dropout", "mlp", "", "train.dropout=own"),
    _data("data batch norm", "convnet", ""),
    _data("data own batch norm", "convnet", "sync_batch_norm: false"),
    _data("data scatter", "mlp", "", "dataset.reading=scatter", "loader.num_workers=1"),
    _data("data ema groups", "mlp", "", "ema={decay: 0.9}", "optimizer.groups=[{match: '*.bias', lr_scale: 2}]"),
    _data("data lora", "gpt", "", "adapter={use: lora, rank: 2, match: ['*.qkv', '*.up']}"),
    _data("data guard skip", "convnet", "", _GUARD, "guard.non_finite=skip", commands=_resumed(1)),
    _data("data guard rewind", "convnet", "", _GUARD, "guard.non_finite=rewind"),
    _data("data guard recompute", "mlp", "", "guard.recompute=every 2 steps"),
    _data("data contrastive", "mlp", "", "loss={use: contrastive, across: ranks}", "train.micro_batches=1"),
    # Batches of 3, and of 2 at the end of an epoch, in two micro-batches each.
    _case("data ranks without samples", "mlp", 4, "strategy.use=data_parallel", "train.batch=3",
          "dataset.samples=8", "dataset.test_samples=3"),
    # Every axis of the model, then several at once.
    _hybrid("sharding 1", 2, "sharding: 2"),
    _hybrid("sharding 2", 2, "sharding: 2, sharding_stage: 2", "train.precision={dtype: float16, scale: 524288}"),
    _hybrid("sharding 3", 2, "sharding: 2, sharding_stage: 3", _DROPOUT,
            commands=_resumed(1, "strategy.use=single model.dropout=0.1")),
    _hybrid("sharding offload", 2, "sharding: 2, offload: true"),
    _hybrid("hybrid reduce_dtype", 2, "data: 2, reduce_dtype: bfloat16"),
    _hybrid("tensor", 2, "tensor: 2", _DROPOUT, commands=_resumed(1, "strategy.use=single model.dropout=0.1")),
    _hybrid("tensor sequence_parallel", 2, "tensor: 2, sequence_parallel: true", _DROPOUT),
    _hybrid("tensor bfloat16 recompute", 2, "tensor: 2, recompute: full", "train.precision=bfloat16"),
    _hybrid("pipeline", 2, "pipeline: 2", _DROPOUT),
    _hybrid("pipeline f_then_b", 2, "pipeline: 2, pipeline_schedule: f_then_b"),
    _hybrid("pipeline interleaved", 2, "pipeline: 2, pipeline_schedule: interleaved, virtual_stages: 2"),
    _hybrid("pipeline partition tied", 2, "pipeline: 2, partition: [2, 4]", "model.tied=true"),
    _hybrid("sequence", 2, "sequence: 2", _DROPOUT, "ema={decay: 0.9}"),
    _hybrid("data 2 tensor 2", 4, "data: 2, tensor: 2", _DROPOUT),
    _hybrid("pipeline 2 sharding 2", 4, "pipeline: 2, sharding: 2, sharding_stage: 2",
            commands=_resumed(2, "'strategy={{use: hybrid, tensor: 2}}'")),
    _hybrid("tensor 2 pipeline 2", 4, "tensor: 2, pipeline: 2, sequence_parallel: true"),
    _hybrid("sharding 2 sequence 2", 4, "sharding: 2, sharding_stage: 3, sequence: 2"),
    # Those who do not exchange each gradient, and those who have a server.
    _case("local_sgd", "mlp", 2, "strategy={use: local_sgd, every: 2 steps, warmup: 1 steps}", commands=_resumed(2)),
    _case("local_sgd averaged states", "mlp", 2,
          "strategy={use: local_sgd, every: 2 steps, optimizer_states: averaged, adaptive: true}"),
    _case("local_sgd outer", "mlp", 2, "strategy={use: local_sgd, every: 2 steps, outer: {}}", commands=_resumed(2)),
    _case("async_average", "mlp", 2, "strategy={use: async_average, every: 2 steps}", free=_TIMING),
    _case("server", "convnet", 3, "strategy={use: parameter_server, servers: 1}", commands=_resumed(3)),
    _case("server 2", "mlp", 4, "strategy={use: parameter_server, servers: 2}"),
    _case("server async", "mlp", 3, "strategy={use: parameter_server, servers: 1, mode: async}", free=_TIMING),
    _case("branches", "siamese", 2, "strategy={use: branches, over: 2}"),
    # What is done with a run, and with a script.
    _data("verbs of a run", "gpt", commands=(
        TRAIN, "evaluate {run} --ranks 1", "evaluate {run} --ranks 2 --checkpoint 3", "export {run}",
        "merge {run} --out {run}/whole.safetensors", "predict {run} {here}/tokens.npy --csv", "certificate {run}",
    )),
    _data("verify", "mlp", commands=("verify {recipe} --ranks {ranks} output_dir={run} {settings}", TRAIN)),
    _case("script", "gpt", 2, commands=("launch --ranks 2 --out {run}.launch {here}/script.py {run}",)),
    # What is refused, and what fails, with its message and exit status.
    _case("unknown key", "gpt", 1, "train.bach=8"),
    _case("mistakes", "gpt", 1, commands=("check --no-run {recipe} model.heads=3 train.batch=0 optimizer.use=adamm",)),
    _hybrid("too few ranks", 2, "tensor: 4"),
    _hybrid("uncuttable", 2, "tensor: 2", "model.heads=1"),
    _data("run folder in use", "mlp", commands=(
        TRAIN, TRAIN, "train {recipe} --out {run} --ranks 2 --resume 3 optimizer.weight_decay=0.1 {settings}",
    )),
    _case("a rank fails", "gpt", 2, commands=(
        "launch --ranks 2 --out {run}.launch {here}/script.py {run} fail",
    )),
)  # fmt: skip
