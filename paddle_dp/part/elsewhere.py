"""What other tools call a setting, and where it stands in a recipe: for those who look for it in the wrong place."""

from __future__ import annotations

from difflib import get_close_matches

NAMES = {
    "schedule.peak": ("lr", "learning_rate", "base_lr", "max_lr"),
    "schedule.warmup": ("warmup_steps", "warmup_epochs"),
    "train.length": ("epochs", "num_epochs", "max_epochs", "max_steps", "num_train_epochs", "iters"),
    "train.batch": ("batch_size", "global_batch_size", "per_device_train_batch_size", "train_batch_size"),
    "train.micros": (
        "accumulate_steps",
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
        "micro_batches",
    ),
    "train.precision": ("amp", "dtype", "fp16", "bf16", "use_amp"),
    "train.seed": ("random_seed",),
    "loader.workers": ("num_workers", "dataloader_num_workers"),
    "optimizer.clip": ("grad_clip", "max_grad_norm", "clip_norm", "gradient_clip_val"),
    "strategy.data": ("dp", "dp_degree", "data_parallel_degree"),
    "strategy.tensor": ("tp", "mp", "mp_degree", "tensor_parallel_degree"),
    "strategy.pipeline": ("pp", "pp_degree", "pipeline_parallel_degree"),
    "strategy.sharding": ("sharding_degree", "fsdp", "zero"),
    "out": ("output_dir", "save_dir", "log_dir"),
}
PLACES = {name: place for place, names in NAMES.items() for name in names}


def elsewhere(name: str) -> str:
    """« In a recipe that is schedule.peak.» for 'lr', also mistyped; '' for a word that no tool is known to have."""
    near = get_close_matches(name.lower(), PLACES, n=1, cutoff=0.8)
    return f" In a recipe that is {PLACES[near[0]]}." if near else ""
