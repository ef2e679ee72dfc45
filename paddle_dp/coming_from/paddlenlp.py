"""Arguments of PaddleNLP's trainings and PaddleFormers's, as JSON, YAML or a command's options, as recipes.

The arguments' meanings are from `paddlenlp/trainer/training_args.py`, `llm/run_pretrain.py`, `llm/run_finetune.py` and
`paddleformers/cli/hparams` (PaddleNLP 3.0, PaddleFormers 1.2).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section
from paddle_dp.coming_from.conversations import conversations_section, packed_section, reads_conversations
from paddle_dp.coming_from.model_folder import PublishedModel, blocks_of, published_model, texts_section
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
from paddle_dp.mesh.degrees import MODEL_AXES

# ruff: noqa: E501 - a row of a table is a line
NAME = "PaddleNLP or PaddleFormers"
_FORMERS = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "train_dataset_path", "max_seq_len", "stage",
    "fine_tuning", "sharding_parallel_size", "template", "mix_strategy", "context_parallel_size",
}  # fmt: skip
_TYPICAL = {
    "tensor_parallel_degree", "pipeline_parallel_degree", "sharding", "sharding_parallel_degree", "fp16_opt_level",
    "amp_master_grad", "recompute", "recompute_granularity", "unified_checkpoint", "src_length", "input_dir", "lora",
    "dataset_name_or_path", "virtual_pp_degree", "sep_parallel_degree", "continue_training", "use_flash_attention",
} | _FORMERS  # fmt: skip
_UNUSED = """
output_dir logging_dir overwrite_output_dir log_dir output_signal_dir metrics_output_path | the run's folder is runs/NAME, or --output-dir
run_name | the run is named after the recipe
do_train do_eval do_predict do_export | verbs: paddle-dp train, evaluate, predict, export
resume_from_checkpoint ignore_data_skip ignore_load_lr_and_optim load_sharded_model skip_data_intervals | paddle-dp train RECIPE --resume
per_device_eval_batch_size eval_accumulation_steps prediction_loss_only eval_iters test_iters max_evaluate_steps minimum_eval_times | evaluation has the batch and the samples
eval_with_do_generation save_generation_output top_k top_p | evaluations score the targets
bf16_full_eval fp16_full_eval | evaluations compute as the training does
amp_master_grad | gradients are added up in float32
amp_custom_black_list amp_custom_white_list | Paddle's own lists are used
report_to wandb_api_key wandb_http_proxy | metrics.jsonl of the run has the numbers
log_level log_on_each_node disable_tqdm logging_first_step skip_memory_metrics skip_profile_timer timer profile benchmark | the console prints a line at each interval
unified_checkpoint unified_checkpoint_config save_on_each_node save_sharded_model ignore_save_lr_and_optim save_checkpoint_format load_checkpoint_format save_to_hf convert_from_hf use_async_save async_save save_safetensors load_via_cpu save_tokenizer force_reshard_pp to_static | a checkpoint is whole, and resumes in any layout
download_hub from_aistudio save_to_aistudio aistudio_repo_id aistudio_repo_private aistudio_repo_license aistudio_token copy_custom_file_list | nothing is downloaded or uploaded
greater_is_better | known by the name of the score
no_cuda device local_rank | train.device is auto
distributed_dataloader lazy_data_processing share_folder data_impl skip_warmup data_cache lazy dataset_num_proc prefetch_factor use_cache | data ranks read their own samples
remove_unused_columns label_names past_index | a data set gives inputs and targets
tensor_parallel_config pipeline_parallel_config sharding_parallel_config data_parallel_config sequence_parallel_config hybrid_parallel_topo_order pp_seg_method tensor_parallel_output fuse_sequence_parallel_allreduce sharding_comm_buffer_size_mb sharding_parallel_mesh_dimension split_inputs_sequence_dim overlap_p2p_comm batch_p2p_comm variable_seq_lengths | of memory and speed: strategy has the axes
expert_parallel_degree expert_model_parallel_size use_expert_parallel moe_token_dispatcher_type moe_group | every rank holds all experts
recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_use_reentrant no_recompute_layers pp_recompute_interval recompute_mtp_granularity vit_num_recompute_layers | of memory: strategy.recompute has full, selective, and every N blocks
use_flash_attention use_fused_rms_norm use_fused_rope use_fused_head_and_loss_fn use_fused_dropout_add use_fused_linear use_fast_layer_norm fuse_attention_qkv fuse_attention_ffn use_fused_linear_cross_entropy attn_impl _attn_implementation flash_mask use_sparse_flash_attn enable_linear_fused_grad_add flatten_param_grads use_attn_mask_startend_row_indices tensorwise_offload_optimizer use_sparse_head_and_loss_fn | of the kernels, not of the numbers
autotuner_benchmark model_type model_name dataset_type pad_token_id | the folder of the model, and the other keys, decide
train_dataset_type eval_dataset_type eval_dataset_prob mix_strategy num_samples_each_epoch buffer_size greedy_intokens greedy_zero_padding packing_interval | samples are windows of dataset.length tokens
use_quick_lora save_to_lora padding_free offload_optim fuse_rope tp_sync_param pp_sync_param sync_grad disable_ckpt_quant | the same numbers by other means
launcher nproc_per_node nnodes node_rank gpus devices xpus npus master ips rank run_mode job_id max_restart auto_tuner_json | of the launcher: paddle-dp train RECIPE --ranks N
max_prompt_len | theirs reads it for other tasks
enable_auto_parallel auto_parallel_resume_form_hybrid_parallel auto_parallel_sync_shared_params use_intermediate_api pipeline_schedule_mode job_schedule_profiler_start job_schedule_profiler_end fused_linear_param_grad_add fuse_allreduce_split_to_reducescatter eliminate_transpose sr use_dualpipev best_unbalanced_scheduler forward_backward_overlap_scheduler | the same numbers by other means: strategy has the axes
ddp_find_unused_parameters release_grads pp_release_grads sd_release_grads sharding_comm_buffer_size_MB sharding_comm_group_call_opt sharding_offload_opt_buffersize_GB split_norm_comm nccl_comm_group_config reorder_pipeline_priority pre_alloc_memory cp_balance_mode cp_comm_type dp_comm_overlap pp_sharding_comm_overlap tp_async_allreduce sp_async_reduce_scatter mp_async_allreduce mp_skip_c_identity mp_fused_linear_param_grad_add gradient_sync_after_accumulate pp_delay_scale_loss p2p_cache_shape partial_send_recv clear_every_step_cache non_batch_p2p_comm offload_queue send_recv_overlap split_backward stage1_tensor_fusion tensor_fusion stage1_overlap overlap stage2_overlap stage1_broadcast_overlap stage1_allgather_overlap stage1_reduce_avg fuse_optimizer_states split_param sd_sharding_comm_overlap sd_shardingv1_comm_overlap optim_shard_num replace_with_c_embedding replace_with_parallel_cross_entropy expert_tensor_model_parallel_size | of the exchange and of memory
resume_from_huggingface_ckpt load_sharded_model_remap_parameter_name sharded_model_from_ema ordered_save_group_size ckpt_quant_stage enable_zero_cost_checkpoint zcc_workers_num zcc_pipeline_hooks_capacity_usage zcc_save_ema_coef zcc_ema_interval zcc_ema_loss_threshold save_rng_states pdc_download_ckpt pdc_download_timeout save_hf_steps save_hf_total_limit save_last_step save_hf_memory_growth_threshold aoa_config load_from_hf replicate_saved_into_local save_sharding_stage1_model_include_freeze_params flex_ckpt_comm_method online_merge_ema | a checkpoint is whole, and resumes in any layout
profile_step_start profile_step_end count_trained_tokens deterministic_mode max_estimate_samples estimation_output_file global_logging_interval log_global_grad_norm | the console prints samples a second
use_mem_eff_attn fuse_softmax_mask fuse_gate_detach_matmul fa_version loss_subbatch_seqlen bos_token_id eos_token_id dataset_text_field dataset_batch_size warmup_only_rank0 processor_use_fast binpacking packed_idx_cache_dir dataset_output_dir | of the kernels and of the preparation
muon_exclude_patterns muon_qkv_update_mode muon_ffn_split muon_extra_scale_factor muon_momentum muon_version muon_ns_steps muon_ns_coeff_type muon_ns_coeffs | of the optimizer muon
lora_alpha | the product's factor is 2: theirs takes 2 × lora_rank, whatever this says
"""
_LOST = """
optim_args use_lowprecision_moment | | states of the optimizer are float32
decay_steps | | the rate falls until the end of the training
num_cycles | 0.5 | the cosine falls once
min_lr | | only the cosine has it there
flash_device_save_steps moe_router_bias_update_rate | | has no counterpart
neftune neftune_noise_alpha | 5.0 | noise on the embeddings is not here
rslora rslora_plus | | the product's factor is alpha / rank
layerwise_lr_decay_bound | 1.0 1 | layers have one rate here: optimizer.groups has others
lora_plus_scale | 1.0 1 | one learning rate for both matrices
pissa vera vera_rank use_mora lorapro reft lokr hqlora | 8 | this adapter is not here
weight_quantize_algo weight_blocksize weight_double_quant weight_double_quant_block_size qlora_weight_blocksize qlora_weight_double_quant quant_type | 64 256 | base weights are not quantized
intokens zero_padding packing | | texts are cut into windows, which go across documents
autoregressive | | answers alone are learned
truncate_packing | true | a text that does not fit into a window goes on in the next
pad_to_multiple_of pad_to_max_length | | windows have dataset.length tokens
train_dataset_prob | 1.0 1 | one data set is read
eval_dataset_path dev_dataset_path | | held-out texts are dataset.held_out of the files
chat_template template template_backend | custom none | the tokenizer's chat_template writes the text
use_template encode_one_turn | true | the tokenizer's chat_template writes a conversation as a whole
split_multi_turn | | a conversation is one sample
truncation_strategy | delete | conversations are cut at their end, or left out: dataset.longer
dataloader_shuffle random_shuffle | true | training samples are shuffled
src_length | | questions are not cut by themselves: a longer conversation is cut at its end
task_name task_name_or_path | | the data set's files decide
num_hidden_layers hidden_size | | the sizes are of the model's config.json
rope_scaling_factor use_long_sequence_strategies strategy_type strategy_name | 1.0 1 | the positions are of the model's config.json
lora_path | | the adapter begins anew: load has its file
moe_gate moe_orthogonal_loss_lambda | top2_fused | no model here has experts
freeze_training freeze_config train_mtp_only num_nextn_predict_layers | | all parameters are trained
attention_probs_dropout_prob hidden_dropout_prob | 0.0 | the dropout is the model's, and attention weights are never dropped
context_parallel_size | 1 -1 | has no counterpart
"""
_NOT_HERE = {
    "do_ptq": "quantization", "do_qat": "quantization", "do_gptq": "quantization", "do_awq": "quantization",
    "prefix_tuning": "prefix tuning", "loss_type": "learning from preferences", "beta": "learning from preferences",
    "pref_loss_ratio": "learning from preferences", "reward_model_name_or_path": "reinforcement learning",
    "actor_model_name_or_path": "reinforcement learning", "process_reward": "a reward model",
    "autotuner": "a search of settings", "max_response_len": "a reward model",
}  # fmt: skip
_CARRIED = {
    "model_name_or_path", "tokenizer_name_or_path", "max_seq_length", "max_length", "split", "per_device_train_batch_size", "batch_size", "compute_type", "adam_beta1", "optim",
    "gradient_accumulation_steps", "learning_rate", "min_learning_rate", "warmup_steps", "warmup_ratio", "max_steps",
    "num_train_epochs", "weight_decay", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "lr_end",
    "power", "bf16", "fp16", "scale_loss", "seed", "sequence_parallel", "sep_parallel_size", "context_parallel_degree",
    "logging_steps", "logging_strategy", "evaluation_strategy", "eval_steps", "save_strategy", "save_steps",
    "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "dataloader_num_workers", "lora_rank",
    "dataloader_drop_last", "sharding_degree",
} | _TYPICAL  # fmt: skip
_AXES = {
    "tensor": ("tensor_parallel_degree", "tensor_model_parallel_size"),
    "pipeline": ("pipeline_parallel_degree", "pipeline_model_parallel_size"),
    "sharding": ("sharding_parallel_degree", "sharding_parallel_size", "sharding_degree"),
    "sequence": ("sep_parallel_degree", "sep_parallel_size", "context_parallel_degree", "context_parallel_size"),
}  # fmt: skip


def recognizes(c: Configuration) -> bool:
    """True for a file with arguments that Hugging Face's Trainer and tools around it do not have. Raises UsageError for
    one that both tools read, to another effect: fp16_opt_level is of weights here, and of nothing there."""
    if HUGGING_FACE_ALONE & c.values.keys():
        return False
    typical = _TYPICAL & c.values.keys()
    trains = {"per_device_train_batch_size", "learning_rate"} & c.values.keys()
    if typical == {"fp16_opt_level"} and trains and (c.values.get("bf16") or c.values.get("fp16")):
        shared = "PaddleNLP and Hugging Face's Trainer both have these keys, and differ in the default length"
        c.reject("fp16_opt_level", f'{shared}: write a key of one alone, sharding: "" or eval_strategy: no')
    return len(typical) >= 2 or bool(trains and typical - {"fp16_opt_level", "stage", "template"})


def recipe(c: Configuration, ranks: int, folder: Path | None = None) -> Section:
    """The recipe of arguments for a training on `ranks` cards in all; `folder` has the model's config.json.

    Raises UsageError for a task, a model, a layout or a value that no recipe expresses.
    """
    reject_tasks(c, _NOT_HERE)
    stage = str(c.take("stage")).upper()
    pretrains = bool(c.values.get("input_dir")) or stage == "PT"
    length = length_of(c, 1.0)
    with_weights = switch(c, "continue_training", default=not pretrains or bool(_FORMERS & c.values.keys()))
    model = published_model(c, "model_name_or_path", folder, with_weights)
    strategy, readers = _strategy(c, ranks)
    kind = choice(c.take("evaluation_strategy", "no"))
    evaluates = bool(c.values.get("do_eval")) or kind != "no"
    if kind == "no":
        c.values.pop("evaluation_strategy", None)  # theirs is then steps, if do_eval is true
        c.carried.discard("evaluation_strategy")
    sections: Section = {"model": model.section, "dataset": _dataset(c, model, pretrains, evaluates)}
    has_ignored = model.family == "bert" or (not pretrains and reads_conversations(model))
    sections["loss"] = {"use": "cross_entropy", **({"ignore_index": -100} if has_ignored else {})}
    sections["optimizer"] = optimizer_section(c, {"adamw": "adamw", "adamw_custom": "adamw"})
    ahead = {"shift": "Rates of their pretraining are one update ahead."} if c.values.get("input_dir") else {}
    is_sft = not (ahead or _FORMERS & c.values.keys())
    sections["schedule"] = schedule_section(c, length, _floor(c), int, has_sft_config=is_sft, **ahead)
    sections["strategy"] = strategy
    sizes = [key for key in ("per_device_train_batch_size", "batch_size") if key in c.values]
    sections["train"] = batch_section(c, length, readers, *sizes[:1])
    if precision := _precision(c):
        sections["train"]["precision"] = precision
    sections["loader"] = loader_section(c)
    if adapter := _adapter(c, model):
        sections["adapter"] = adapter
    if evaluates:  # run_pretrain.py evaluates 10 batches, whatever the data
        limits = {"eval_iters": 10 if c.values.get("input_dir") else -1, "max_evaluate_steps": -1}
        sections["evaluation"] = evaluation_section(c, readers, limits)
    sections["callbacks"] = callbacks_section(c, length, evaluates)
    _dropout(c, model, pretrains)
    if not evaluates:
        c.without_counterpart("eval_steps", "nothing is evaluated")
    settle(c, _UNUSED, _LOST, _CARRIED, NAME)
    return sections


def _dataset(c: Configuration, model: PublishedModel, pretrains: bool, evaluates: bool) -> Section:
    keys = ("max_seq_length", "max_seq_len", "max_length")
    key = next((key for key in keys if c.values.get(key)), None)
    for other in keys if key else ():
        if other != key:
            c.without_counterpart(other, f"{key} decides")
    length = count(c, key, 1) if key else None
    if not pretrains and reads_conversations(model):
        return conversations_section(c, model, length, evaluates)
    if pretrains and c.values.get("train_dataset_path") and reads_conversations(model):
        return packed_section(c, model, length, evaluates)
    path = c.take("train_dataset_path")
    if isinstance(path, str) and "," in path:
        c.lose_key("train_dataset_path", "one data set is read: the first")
        path = path.split(",")[0].strip()
    named_keys = [name for name in ("input_dir", "dataset_name_or_path") if c.values.get(name)]
    theirs = [f"{name} {c.take(name)}" for name in named_keys]
    named = f"theirs, {theirs[0]}, are tokens or pairs" if theirs else "which the file does not name"
    section = texts_section(c, model, path, length, named)
    if not pretrains:
        for name in ("dataset_name_or_path", "train_dataset_path"):
            c.lose_key(name, "all tokens of a text are learned; theirs leaves out the prompts")
    if (split := c.take("split")) is not None:
        section["held_out"] = _test_share(c, split)
    return section


def _test_share(c: Configuration, split: Any) -> float:
    """The second share of "949,50,1"."""
    shares = split if isinstance(split, list) else str(split).split(",")
    try:
        numbers = [float(share) for share in shares]
        share = round(numbers[1] / sum(numbers), 9)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        share = 0
    if not 0 < share < 1:
        c.reject("split", "three shares, such as 949,50,1, of which the second is held out")
    return share


def _floor(c: Configuration) -> float:
    """The last rate: of pretraining by default 1e-5, to which theirs raises a lower first one, and ours keeps that;
    PaddleFormers' min_lr is of cosine."""
    kind = choice(c.values.get("lr_scheduler_type", "linear"))
    if kind == "cosine" and c.values.get("min_lr"):
        return number(c, "min_lr", 0.0)
    if c.values.get("input_dir") and not _FORMERS & c.values.keys() and kind in ("linear", "cosine"):
        least = min(number(c, "learning_rate", 5e-5), 1e-5)
        if least < 1e-5 and c.values.get("min_learning_rate") is None:
            c.differ("The rate stays; theirs rises to 1e-05, their default of min_learning_rate.")
        return number(c, "min_learning_rate", least)
    c.without_counterpart("min_learning_rate", "fine-tuning does not read it there")
    return 0.0


def _precision(c: Configuration) -> Any:
    """PaddleFormers' command has compute_type, by default bf16."""
    bf16, fp16 = switch(c, "bf16"), switch(c, "fp16")
    if bf16 and fp16:
        c.reject("bf16", "fp16 is true, too")
    if "stage" in c.values:
        if "compute_type" not in c.values and not bf16:
            c.differ("bfloat16 is PaddleFormers' default: compute_type is not there.")
        kind = choice(c.take("compute_type", "bf16"))
        bf16, fp16 = kind not in ("fp16", "float32"), kind == "fp16"
        if kind not in ("bf16", "fp16", "float32"):
            c.lose_key("compute_type", "base weights are not quantized")
    level = str(c.take("fp16_opt_level", "O1"))
    if level not in ("O1", "O2"):
        c.reject("fp16_opt_level", "O1 or O2")
    if fp16:
        return {"dtype": "float16", "level": level, "scale": number(c, "scale_loss", 2.0**15)}
    c.without_counterpart("scale_loss", "of float16")
    return {"dtype": "bfloat16", "level": level} if bf16 else None


def _strategy(c: Configuration, ranks: int) -> tuple[Section, int]:
    """The layout of `ranks` ranks, and the number of its data ranks, which read different samples."""
    degrees = {axis: _degree(c, keys) for axis, keys in _AXES.items()}
    theirs = c.take("sharding", "stage1" if _FORMERS & c.values.keys() else "")
    words = theirs if isinstance(theirs, list) else str(theirs or "").split()
    stages = {f"stage{number}": number for number in (1, 2, 3)}
    stage = next((stages[each] for each in words if each in stages), 0)
    if not stage and any(each not in ("offload", "False") for each in words):
        c.reject("sharding", "stage1, stage2 or stage3")
    model_degree = math.prod(degrees[axis] for axis in MODEL_AXES)
    shards = (degrees["sharding"] if degrees["sharding"] > 0 else ranks // model_degree) if stage else 1
    if ranks % (model_degree * max(shards, 1)):
        c.reject(
            "tensor_parallel_degree" if "tensor_parallel_degree" in c.values else "sharding",
            f"the degrees multiply to {model_degree * max(shards, 1)}, which does not divide --ranks {ranks}",
        )
    axes = {**degrees, "sharding": shards}
    section: Section = {"use": "hybrid", **{axis: degree for axis, degree in axes.items() if degree > 1}}
    if len(section) == 1:
        section = {"use": "data_parallel"}
    if shards > 1:
        section["sharding_stage"] = stage
    if switch(c, "sequence_parallel") and axes["tensor"] > 1:
        section["sequence_parallel"] = True
    if (virtual := count(c, "virtual_pp_degree", 1)) > 1 and axes["pipeline"] > 1:
        section |= {"pipeline_schedule": "interleaved", "virtual_stages": virtual}
    if switch(c, "recompute") or (_FORMERS & c.values.keys() and c.values.get("recompute_granularity")):
        granularity = choice(c.take("recompute_granularity", "full"))
        section["recompute"] = "selective" if granularity == "core_attn" else "full"
        if granularity not in ("full", "core_attn", "selective"):
            c.differ(f"Whole blocks are computed again; theirs less ({granularity}): memory alone.")
    return section, ranks // model_degree


def _degree(c: Configuration, keys: tuple[str, ...]) -> int:
    """The first degree that is set, -1 being none; sharding's -1 stays, as it means all other ranks."""
    for key in keys:
        if c.values.get(key) not in (None, -1):
            return count(c, key, 1)
        c.take(key)
    return -1 if "sharding_degree" in keys else 1


def _adapter(c: Configuration, model: PublishedModel) -> Section:
    is_on = switch(c, "lora")
    if "stage" in c.values:  # of PaddleFormers' command, which does not read `lora`
        if "fine_tuning" not in c.values:
            c.differ("LoRA is PaddleFormers' default: fine_tuning is not there.")
        is_on = choice(c.take("fine_tuning", "lora")) == "lora"
    if not is_on:
        c.without_counterpart("lora_*", "without LoRA there is none")
        return {}
    rank = count(c, "lora_rank", 8)
    return {"use": "lora", "match": blocks_of(c, model), "rank": rank, "alpha": 2.0 * rank}


def _dropout(c: Configuration, model: PublishedModel, pretrains: bool) -> None:
    """Pretraining sets GPT's dropout by an argument, 0.1 by default; Llama has none."""
    keys = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if model.family == "llama":
        for key in keys:
            c.without_counterpart(key, "a Llama has no dropout")
    elif pretrains:
        model.section["dropout"] = number(c, keys[0], 0.1)
