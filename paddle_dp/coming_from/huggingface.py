"""Hugging Face's TrainingArguments (transformers 4 and 5), as JSON, YAML or a command's options, as recipes.

The arguments' meanings are from `transformers/training_args.py`, `trainer.py` and `optimization.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section
from paddle_dp.coming_from.conversations import reads_conversations
from paddle_dp.coming_from.model_folder import PublishedModel, layers_of, published_model, texts_section
from paddle_dp.coming_from.trainer_arguments import (
    HUGGING_FACE_ALONE,
    batch_section,
    callbacks_section,
    choice,
    count,
    evaluation_section,
    length_of,
    loader_section,
    number,
    optimizer_section,
    reject_tasks,
    schedule_section,
    settle,
    switch,
)  # fmt: skip

# ruff: noqa: E501 - a row of a table is a line
NAME = "Hugging Face Trainer"
_TYPICAL = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "adam_beta1", "max_grad_norm",
    "num_train_epochs", "warmup_ratio", "label_smoothing_factor", "dataloader_drop_last", "eval_strategy",
    "learning_rate", "save_total_limit", "weight_decay", "max_steps", "warmup_steps", "load_best_model_at_end",
}  # fmt: skip
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "adamw_apex_fused",
          "adamw_torch_npu_fused", "paged_adamw", "paged_adamw_32bit")  # fmt: skip
_OPTIMIZERS = dict.fromkeys(_ADAMW, "adamw") | {
    "sgd": "sgd", "lion_32bit": "lion", "lion": "lion", "adafactor": "adafactor",
}  # fmt: skip
_UNUSED = """
output_dir logging_dir overwrite_output_dir | the run's folder is runs/NAME, or --output-dir
run_name project trackio_space_id trackio_bucket_id trackio_static_space_id | the run is named after the recipe
do_train do_eval do_predict | verbs: paddle-dp train, evaluate, predict
resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint | paddle-dp train RECIPE --resume
per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps eval_do_concat_batches batch_eval_metrics | evaluation has the batch
eval_use_gather_object include_for_metrics include_inputs_for_metrics prediction_loss_only past_index | every held-out sample counts once
eval_on_start eval_delay evaluate_during_training | every held-out sample counts, at each interval
bf16_full_eval fp16_full_eval | evaluations compute as the training does
fp16_opt_level half_precision_backend fp16_backend | train.precision decides
tf32 | FLAGS_use_tf32 of Paddle
report_to | metrics.jsonl of the run has the numbers
plot_loss log_level log_level_replica log_on_each_node disable_tqdm logging_first_step skip_memory_metrics | the console prints a line at each interval
logging_nan_inf_filter | a loss that is not finite ends the training: guard
include_num_input_tokens_seen include_tokens_per_second | the console prints samples and tokens a second
save_safetensors save_on_each_node save_only_model save_optimizer save_scheduler enable_jit_checkpoint | a checkpoint is whole
greater_is_better | known by the name of the score
dispatch_batches even_batches full_determinism use_seedable_sampler | the order of samples depends on train.seed alone
average_tokens_across_devices | the loss is the mean over all targets of the global batch
no_cuda use_cpu use_mps_device local_rank ddp_backend xpu_backend device _n_gpu tpu_num_cores ray_scope | train.device is auto, and --ranks starts the ranks
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout ddp_timeout_delta | of the exchange of gradients
dataloader_pin_memory dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order | workers last for the whole training
remove_unused_columns label_names length_column_name | a data set gives inputs and targets
auto_find_batch_size | more train.micro_batches need less memory, and the update stays the same
torch_compile torch_compile_backend torch_compile_mode jit_mode_eval torchdynamo use_ipex | train.compile, for the data axis alone
flash_attn use_v1_kernels enable_liger_kernel disable_gradient_checkpointing use_liger_kernel liger_kernel_config torch_empty_cache_steps use_cache attn_implementation use_flash_attention_2 | of the kernels, not of the numbers
gradient_checkpointing_kwargs activation_checkpointing_kwargs | of the recomputation
push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token tags language | nothing is uploaded
debug skip_prepare_dataset mp_parameters tpu_metrics_debug use_legacy_prediction_loop logging_strategy | of other programs
accelerator_config fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap sharded_ddp | strategy places the model
deepspeed.bf16 deepspeed.fp16 | train.precision is of the arguments bf16 and fp16
deepspeed.zero_optimization deepspeed.activation_checkpointing deepspeed.steps_per_print deepspeed.wall_clock_breakdown | of memory and speed
deepspeed.train_batch_size deepspeed.train_micro_batch_size_per_gpu deepspeed.zero_allow_untested_optimizer deepspeed.comms_logger | the arguments decide
train_batch_size eval_batch_size per_gpu_train_batch_size | the size per device decides
cache_dir overwrite_cache preprocessing_num_workers low_cpu_mem_usage use_fast_tokenizer token use_auth_token trust_remote_code model_revision keep_linebreaks | of the download and the preparation of the data
launcher launcher.gradient_accumulation_steps nproc_per_node nnodes num_processes num_gpus gpus devices | of the launcher: paddle-dp train RECIPE --ranks N
"""
_LOST = """
neftune_noise_alpha | | noise on the embeddings is not here
adafactor optim_args optim_target_modules | | settings of this optimizer are not here
lr_scheduler_kwargs | | this setting of the schedule is not here
num_cycles | 0.5 | the cosine falls once
group_by_length | | windows of texts have one length, and samples are shuffled
train_sampling_strategy | random | training samples are shuffled
split_batches accelerator_config.split_batches | | train.batch is the size per device × ranks × accumulation steps
parallelism_config | | strategy: hybrid has the axes
launcher.config_file | | there is no such file, so its precision and its ZeRO stage are not known: train.precision, strategy.sharding_stage
launcher.gradient_clipping launcher.deepspeed_config.gradient_clipping | none auto | optimizer.clip is of max_grad_norm
launcher.deepspeed_config_file launcher.deepspeed_config.deepspeed_config_file | none | its ZeRO stage is not read: strategy has sharding_stage
launcher.mixed_precision launcher.downcast_bf16 | no | train.precision is bfloat16 or float16
launcher.parallelism_config launcher.megatron_lm_config launcher.use_megatron_lm | | strategy: hybrid has the axes
max_train_samples streaming | | all samples of the data set are read
validation_file eval_file | | held-out texts are dataset.held_out of the files
config_overrides | | sizes are settings of the model
dtype torch_dtype | float32 | train.precision of level O2 keeps weights in 16 bits
line_by_line pad_to_max_length | | texts are cut into windows of dataset.length, and none is padded
deepspeed.optimizer deepspeed.scheduler deepspeed.gradient_clipping | | optimizer and schedule are of the arguments
dataset_name dataset_config_name | | nothing is downloaded: write it as texts, and name them in dataset.path
early_stopping_patience | | callbacks has early_stop
finetuning_type use_peft lora_rank lora_r lora_alpha lora_target lora_target_modules | full | adapter has LoRA: use: lora, with match
lora_dropout | | the adapter has no dropout
use_rslora use_dora use_adalora pissa_init loraplus_lr_ratio additional_target lora_modules_to_save create_new_adapter adapter_name_or_path | | this setting of an adapter is not here
stage | pt | all tokens of a text are learned, a prompt's, too
template chat_template | | the tokenizer's chat_template writes the text
train_on_prompt mask_history | | answers alone are learned, each
max_samples dataset_dir eval_dataset mix_strategy interleave_probs | concat data | the files that dataset.path names decide
load_in_4bit load_in_8bit quantization_bit | | base weights are not quantized
loss_type | nll | the loss is cross_entropy
packing | | texts are cut into windows, which go across documents
"""
_NOT_HERE = {
    "beta": "learning from preferences", "loss_type": "learning from preferences", "pref_loss": "learning from preferences",
    "reward_model": "reinforcement learning", "num_generations": "reinforcement learning",
    "predict_with_generate": "a model of sequence to sequence", "generation_max_length": "a model of sequence to sequence",
}  # fmt: skip
_CARRIED = {
    "model_name_or_path", "config_name", "tokenizer_name", "model_type", "train_file", "block_size", "max_seq_length", "max_length", "cutoff_len",
    "validation_split_percentage", "mlm_probability", "bf16", "fp16", "gradient_checkpointing", "optim", "seed",
    "activation_checkpointing", "deepspeed", "data_seed", "eval_steps", "save_steps", "logging_steps", "save_strategy",
    "evaluation_strategy", "max_eval_samples", "adam_beta2", "adam_epsilon", "metric_for_best_model", "dataloader_num_workers",
    "dataloader_prefetch_factor",
} | _TYPICAL  # fmt: skip
_FACTORY = {"stage", "finetuning_type", "template", "cutoff_len", "lora_target"}  # LLaMA-Factory's alone
_TRL = {
    "use_peft", "lora_r", "lora_target_modules", "dataset_text_field", "completion_only_loss", "assistant_only_loss",
}  # fmt: skip


def recognizes(c: Configuration) -> bool:
    """True for a file with some arguments of their Trainer."""
    return "per_device_train_batch_size" in c.values or len(_TYPICAL & c.values.keys()) >= 3


def recipe(c: Configuration, ranks: int, folder: Path | None = None) -> Section:
    """The recipe of arguments for a training on `ranks` devices; `folder` has the model's config.json.

    Raises UsageError for a model, a schedule or a value that no recipe expresses.
    """
    reject_tasks(c, _NOT_HERE)
    if not HUGGING_FACE_ALONE & c.values.keys():
        c.differ("No key is of one tool alone: Hugging Face's Trainer and its defaults are assumed.")
    _read_launcher(c)
    length = length_of(c, 3.0)
    model = _model(c, folder)
    sections: Section = {"model": model.section, "dataset": _dataset(c, model)}
    sections["loss"] = {"use": "cross_entropy"}
    if smoothing := number(c, "label_smoothing_factor", 0.0):
        sections["loss"]["label_smoothing"] = smoothing
    if model.family == "bert" or sections["dataset"]["use"] == "chat":
        sections["loss"]["ignore_index"] = -100
    sections["optimizer"] = optimizer_section(c, _OPTIMIZERS)
    sections["schedule"] = schedule_section(c, length, has_sft_config=bool(_TRL & c.values.keys()))
    sections["strategy"] = _strategy(c, ranks)
    sections["train"] = batch_section(c, length, ranks)
    if precision := _precision(c):
        sections["train"]["precision"] = precision
    sections["loader"] = loader_section(c)
    if adapter := _adapter(c, model):
        sections["adapter"] = adapter
    theirs = "evaluation_strategy" if "evaluation_strategy" in c.values else "eval_strategy"
    evaluates = choice(c.take(theirs, "no")) != "no"
    if evaluates:
        sections["evaluation"] = evaluation_section(c, ranks, {})
        if c.values.get("max_eval_samples"):
            sections["evaluation"]["samples"] = count(c, "max_eval_samples", 1)
    else:
        c.without_counterpart("eval_steps", "nothing is evaluated")
    sections["callbacks"] = callbacks_section(c, length, evaluates)
    settle(c, _UNUSED, _LOST, _CARRIED, "TrainingArguments")
    return sections


def _model(c: Configuration, folder: Path | None) -> PublishedModel:
    is_new = not c.values.get("model_name_or_path") and bool(c.values.get("config_name"))
    key = "config_name" if is_new else "model_name_or_path"
    model = published_model(c, key, folder, with_weights=not is_new)
    for key in ("model_name_or_path", "config_name", "model_type"):
        c.take(key)
    return model


def _dataset(c: Configuration, model: PublishedModel) -> Section:
    if model.family == "vit":
        c.fill("dataset.path", "the folder with train/CLASS and val/CLASS")
        size = model.sizes.get("image")
        return {"use": "image_folder", "path": "path/of/the/images", **({"size": size} if size else {})}
    keys = ("block_size", "max_seq_length", "max_length", "cutoff_len")
    key = next((key for key in keys if c.values.get(key)), None)
    length = count(c, key, 1) if key else None
    is_sft = str(c.values.get("stage") or "sft").lower() == "sft"
    if is_sft and _FACTORY & c.values.keys() and reads_conversations(model):
        return _conversations(c, model, length)
    section = texts_section(c, model, c.take("train_file"), length)
    if held_out := number(c, "validation_split_percentage", 0):
        section["held_out"] = round(held_out / 100, 9)
    if (share := c.take("mlm_probability")) is not None and model.family == "bert":
        section["masked"] = share
    return section


def _conversations(c: Configuration, model: PublishedModel, length: int | None) -> Section:
    """The data of LLaMA-Factory's fine-tunings, whose files another file names."""
    theirs = c.take("dataset")
    names = ", ".join(map(str, theirs)) if isinstance(theirs, list) else theirs
    named = f"theirs are {names} of dataset_info.json" if names else "which the file does not name"
    section = texts_section(c, model, None, length, named, use="chat")
    is_packed = [switch(c, "packing"), switch(c, "neat_packing")]
    section["packing"] = any(is_packed)
    share = number(c, "val_size", 0.0)
    if share >= 1:
        c.lose_key("val_size", "held_out is a share, and this a number of conversations")
    section["held_out"] = share if share < 1 else 0.05
    if not c.take("stage"):
        c.differ("Answers alone are learned (sft), LLaMA-Factory's default: stage is not there.")
    if c.values.get("template"):
        c.lose_key("template", "the tokenizer's chat_template writes the text; theirs another template")
    return section


def _adapter(c: Configuration, model: PublishedModel) -> Section:
    """LoRA of LLaMA-Factory, where it is the default, or of TRL."""
    is_factory = bool(_FACTORY & c.values.keys())
    kind = choice(c.take("finetuning_type", "lora")) if is_factory else "full"
    if is_factory and "finetuning_type" not in c.values:
        c.differ("LoRA is LLaMA-Factory's default: finetuning_type is not there.")
    if not is_factory and switch(c, "use_peft"):
        kind = "lora"
    if kind not in ("lora", "full"):
        c.lose_key("finetuning_type", "lora and full are here; all parameters are trained")
    if kind != "lora":
        c.without_counterpart("lora_*", "without LoRA there is none")
        return {}
    rank = count(c, "lora_rank", 8) if is_factory else count(c, "lora_r", 16)
    alpha = number(c, "lora_alpha", 2.0 * rank if is_factory else 32.0)
    key, usual = ("lora_target", "all") if is_factory else ("lora_target_modules", "q_proj,v_proj")
    targets = c.take(key, usual)
    names = [
        str(each).strip() for each in (targets if isinstance(targets, list) else str(targets).split(","))
    ]
    if not is_factory and "lora_dropout" not in c.values:
        c.differ("The adapter has no dropout; TRL's lora_dropout is 0.05 by default.")
    return {"use": "lora", "match": layers_of(c, model, key, names), "rank": rank, "alpha": alpha}


def _read_launcher(c: Configuration) -> None:
    """accelerate's file of settings, and its options, where the arguments do not decide: precision, ZeRO, FSDP."""
    named = c.values.get("launcher.config_file")
    if named and (file := c.named_file(named)):
        c.give(c.content_of("launcher.config_file", file, "launcher"))
        c.take("launcher.config_file")
    for setting in ("launcher.zero_stage", "launcher.deepspeed_config.zero_stage"):
        if setting in c.values and not c.has("deepspeed"):
            c.give({"deepspeed.zero_optimization.stage": c.take(setting)})
    for setting in ("launcher.fsdp_sharding_strategy", "launcher.fsdp_config.fsdp_sharding_strategy"):
        if setting in c.values and not c.has("fsdp"):
            modes = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}
            c.give({"fsdp": modes.get(str(kind := c.take(setting)), choice(kind))})
    if c.values.get("launcher.use_fsdp") or choice(c.values.get("launcher.distributed_type")) == "fsdp":
        reshards = c.take("launcher.fsdp_config.fsdp_reshard_after_forward", True)  # of its version 2
        c.give({} if c.has("fsdp") else {"fsdp": "full_shard" if reshards else "shard_grad_op"})


def _precision(c: Configuration) -> Any:
    """DeepSpeed keeps the weights in 16 bits, with float32 copies for the updates: level O2."""
    bf16, fp16 = switch(c, "bf16"), switch(c, "fp16")
    launched = choice(c.values.get("launcher.mixed_precision"))  # counts without bf16 and fp16
    if launched in ("bf16", "fp16"):
        c.take("launcher.mixed_precision")
        bf16, fp16 = bf16 or (launched == "bf16" and not fp16), fp16 or (launched == "fp16" and not bf16)
    if bf16 and fp16:
        c.reject("bf16", "fp16 is true, too")
    dtype = "bfloat16" if bf16 else "float16" if fp16 else None
    return {"dtype": dtype, "level": "O2"} if dtype and c.has("deepspeed.zero_optimization") else dtype


def _strategy(c: Configuration, ranks: int) -> Section:
    """The ranks share the updates by ZeRO's stage 1 to 3 where DeepSpeed or FSDP does it there."""
    stage = _zero_stage(c) or _fsdp_stage(c)
    section: Section = {"use": "data_parallel"}
    if stage and ranks > 1:
        section = {"use": "hybrid", "sharding": ranks, "sharding_stage": stage}
    names = ("activation_checkpointing", "fsdp_activation_checkpointing")
    recomputes = [c.take(f"fsdp_config.{name}") for name in names]
    recomputes.append(switch(c, "activation_checkpointing"))  # the name in transformers 5
    if switch(c, "gradient_checkpointing") or any(recomputes):
        section["recompute"] = "full"
    return section


def _zero_stage(c: Configuration) -> int:
    """DeepSpeed's stage, of its settings in the file or in another one that the file names; 0 without."""
    named = c.values.get("deepspeed")
    if isinstance(named, str) and named:
        file = c.named_file(named)
        if file is None:
            unknown = "there is no such file, so its stage is not known"
            c.lose_key("deepspeed", f"{unknown}: strategy has sharding_stage")
            return 0
        c.give(c.content_of("deepspeed", file, "deepspeed"))
        c.take("deepspeed")
    key = "deepspeed.zero_optimization.stage"
    stage = count(c, key, 0, 0) if c.has("deepspeed.zero_optimization") else 0
    return stage if stage <= 3 else c.reject(key, "stage 0 to 3")


def _fsdp_stage(c: Configuration) -> int:
    theirs = c.values.get("fsdp")
    modes = theirs if isinstance(theirs, list) else str(theirs or "").split()
    stages = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}
    if theirs is True or "true" in map(str.lower, map(str, modes)):
        keeps = c.values.get("fsdp_config.reshard_after_forward") is False
        modes = ["shard_grad_op" if keeps else "full_shard"]
    named = [each for each in modes if each in stages]
    if named:
        c.take("fsdp")
    return stages[named[0]] if named else 0
