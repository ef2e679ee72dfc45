"""Other names of settings, in other tools and in recipes from before 0.1.0, and where they are in a recipe."""

from __future__ import annotations

from difflib import get_close_matches

NAMES = {
    "schedule.learning_rate": ("lr", "base_lr", "max_lr"),
    "schedule.warmup": ("warmup_steps", "warmup_epochs"),
    "train.length": ("epochs", "num_epochs", "max_epochs", "max_steps", "num_train_epochs", "iters"),
    "train.batch": ("batch_size", "global_batch_size", "per_device_train_batch_size", "train_batch_size"),
    "train.micro_batches": (
        "accumulate_steps",
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
    ),
    "train.precision": ("amp", "dtype", "fp16", "bf16", "use_amp"),
    "train.seed": ("random_seed",),
    "train.drop_last": ("dataloader_drop_last",),
    "loader.num_workers": ("dataloader_num_workers",),
    "optimizer.clip": ("grad_clip", "max_grad_norm", "clip_norm", "gradient_clip_val"),
    "strategy.data": ("dp", "dp_degree", "data_parallel_degree"),
    "strategy.tensor": ("tp", "mp", "mp_degree", "tensor_parallel_degree"),
    "strategy.pipeline": ("pp", "pp_degree", "pipeline_parallel_degree"),
    "strategy.sharding": ("sharding_degree", "fsdp"),
    "strategy.sharding_stage": ("zero", "zero_stage"),
    "output_dir": ("save_dir", "log_dir"),
}
# Also each key's own name, for a key that is written in another group.
PLACES = {name: place for place, names in NAMES.items() for name in (place.rpartition(".")[2], *names)}
# Keys of recipes from before 0.1.0, and today's.
RENAMED = {
    "out": "output_dir",
    "schedule.peak": "schedule.learning_rate",
    "train.micros": "train.micro_batches",
    "train.last": "train.drop_last, true or false",
    "loader.workers": "loader.num_workers",
    "model.attends": "model.attention_methods",
    "strategy.bucket": "strategy.comm_buffer_size",
    "strategy.last_bucket": "strategy.last_comm_buffer_size",
    "strategy.find_unused": "strategy.find_unused_parameters",
    "strategy.stage": "strategy.sharding_stage",
    "strategy.schedule": "strategy.pipeline_schedule",
    "strategy.stages_each": "strategy.virtual_stages",
    "strategy.split": "strategy.partition",
}

# The same for values.
RENAMED_VALUES = {"columns": "colwise", "rows": "rowwise", "vocabulary": "vocab"}


def place_of(name: str, exactly: bool = False) -> str | None:
    """ "schedule.learning_rate" for 'lr', also if mistyped (unless `exactly`); None for an unknown word."""
    near = get_close_matches(name.lower(), PLACES, n=1, cutoff=1.0 if exactly else 0.8)
    return PLACES[near[0]] if near else None
