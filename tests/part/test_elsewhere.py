"""The table of other tools' words: every row names a key that a recipe has, and none leads to another training."""

from __future__ import annotations

import re

import pytest

from paddle_dp.cli import app
from paddle_dp.errors import RecipeError, near
from paddle_dp.part import SHELVES, find, names
from paddle_dp.part.aliases import HINTS, OPTIONS, PARTS, VERBS, find_hint
from paddle_dp.part.config import fields_of
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.recipe.schema import Ema, EvaluationSettings, Guard, Load, LoaderSettings, Mix
from paddle_dp.recipe.train_schema import Train

# transformers.TrainingArguments.
HUGGING_FACE = """
accelerator_config adafactor adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices
batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object
evaluation_strategy fp16 fp16_full_eval fp16_opt_level fsdp fsdp_config full_determinism gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better group_by_length half_precision_backend
hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names
label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank
log_level log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter logging_steps
logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
neftune_noise_alpha no_cuda num_train_epochs optim optim_args optim_target_modules overwrite_output_dir
parallelism_config past_index per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit skip_memory_metrics
tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps use_cpu use_liger_kernel
warmup_ratio warmup_steps weight_decay
"""
# Words of PaddleClas, PaddleNLP, fleet, Megatron, torchtitan, accelerate and Lightning (docs/coming-from).
OTHERS = """
EMA level values gamma by_epoch one_dim_param_no_weight_decay lora_rank lora_alpha target_modules unified_checkpoint
split packing offload schedule_mode gradient_merge fp16_allreduce fuse_grad_size_in_MB comm_buffer_size lr_warmup_iters
lr_warmup_fraction lr_decay_style lr_decay_iters adam_eps use_distributed_optimizer num_layers hidden_size
num_query_groups ffn_hidden_size tokenizer_model rampup_batch_size local_batch_size max_norm data_parallel_shard_degree
data_parallel_replicate_degree min_lr_factor keep_latest_k even_batches data_collator use_distributed_sampler
fast_dev_run ckpt_path profiler decay_epochs accelerator k_steps clip_norm regularizer nnodes num_nodes devices
transform_ops output_dir lr_warmup_init distributed_timeout_minutes exit_duration_in_mins num_attention_heads
hidden_dropout resid_pdrop dgc localsgd adaptive_localsgd a_sync collate_fn limit_train_batches zero_padding decay_steps
"""
GROUPS = {
    "train": Train, "loader": LoaderSettings, "guard": Guard, "ema": Ema, "mix": Mix,
    "evaluation": EvaluationSettings, "load": Load,
}  # fmt: skip


def mistake(override: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_recipe("configs/digits_mlp.yaml", [override])
    return str(caught.value)


def test_each_of_their_words_is_answered() -> None:
    """All at once: a recipe is told all of its mistakes."""
    words = [*HUGGING_FACE.split(), *OTHERS.split()]
    with pytest.raises(RecipeError) as caught:
        read_recipe("configs/digits_mlp.yaml", [f"train.{word}=1" for word in words])
    assert len(caught.value.mistakes) == len(words)
    for word, found in zip(words, map(str, caught.value.mistakes), strict=True):
        assert f"train has no setting '{word}'" in found
        assert "In a recipe that is" in found or f"'{word}' is of" in found, found
        assert "Did you mean" not in found


def keys() -> set[str]:
    """Every key of a recipe that a row may name."""
    models = {f"model.{name}" for model in ("gpt", "llama") for name in fields_of(find("models", model))}
    known = {"model.classes", *models, "name", "output_dir", *Recipe.model_fields}
    known |= {f"{shelf}.use" for shelf in ("schedule", "optimizer", "loss")}
    known |= {f"{group}.{name}" for group, kind in GROUPS.items() for name in fields_of(kind)}
    for shelf, noun in SHELVES.items():
        for name in names(shelf) if shelf != "models" else ():
            prefix = f"{shelf}.{name}" if shelf in ("metrics", "callbacks") else noun
            known |= {prefix, *(f"{prefix}.{field}" for field in fields_of(find(shelf, name)))}
    return known | {"optimizer.groups"}


def test_every_row_names_a_key_that_there_is() -> None:
    assert {row.key for row in HINTS.values() if row.key} <= keys()
    assert all(row.key or row.note for row in HINTS.values())


def test_every_part_option_and_verb_is_one_of_ours() -> None:
    for shelf, rows in PARTS.items():
        assert {here for here in rows.values() if here[0] != ":"} <= set(names(shelf))
        assert not set(rows) & set(names(shelf))
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(VERBS.values()) <= {*verbs, "--help", "--version"} and not set(VERBS) & verbs
    assert all(option[0] == "-" for option in OPTIONS)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "train.gradient_accumulation_steps=4",
            r"micro_batches splits .* theirs multiplies .*batch=64 and .*batches=4",
        ),
        (
            "train.per_device_train_batch_size=8",
            r"train\.batch \(.*multiply it by the data-parallel ranks \(data × sharding, not tensor or pipeline\)",
        ),
        (
            "train.per_device_eval_batch_size=8",
            r"evaluation\.batch \(of all ranks together, so theirs × ranks",
        ),
        ("train.eval_accumulation_steps=8", r"held-out scores are sums"),
        ("strategy.sep_degree=2", r"In a recipe that is strategy\.sequence "),
        ("strategy.context_parallel_degree=2", r"In a recipe that is strategy\.sequence "),
        ("schedule.min_learning_rate=1e-5", r"schedule\.floor \(floor is a share of the peak rate"),
        ("loss.use=mse", "Here that is mean_squared_error"),
        ("loss.use=bce", "Here that is binary_cross_entropy"),
        ("strategy.use=ddp", "Here that is data_parallel"),
        ("strategy.use=fsdp", "sharding_stage: 3"),
        ("train.deepspeed=zero3.json", r"strategy\.sharding "),
        ("train.recompute=full", r"strategy\.recompute "),
        ("Global.epochs=3", r"Arch is model here, .*Global\.epochs train\.length.*`paddle-dp import FILE"),
        ("train.step=5", r"train\.length "),
        ("train.steps=5", r"train\.length "),
        ("loader.shuffle=true", "shuffled by train.seed in every epoch"),
        ("callbacks.5.use=wandb", "Here that is dashboard"),
        ("optimizer.max_grad_norm=1", r"optimizer\.clip \(by the global norm\)\. optimizer adamw takes"),
        ("schedule.decay_epochs=[30]", r"schedule\.milestones \(.*from the end of the warm-up, so add"),
        ("schedule.values=[0.1]", r"schedule\.factor \(of schedule milestones: one factor for all"),
        ("schedule.by_epoch=true", "the rate changes after every step"),
        ("train.accelerator=gpu", r"In a recipe that is train\.device "),
        (
            "strategy.k_steps=4",
            r"train\.micro_batches \(gradient_merge multiplies .*localsgd is strategy\.every",
        ),
        ("loss.epsilon=0.1", r"In a recipe that is loss\.label_smoothing "),
        ("train.epsilon=0.1", r"optimizer\.epsilon \(an optimizer's: CELoss's is loss\.label_smoothing\)"),
        ("train.batch_size=8", r"train\.batch \(.*by the data-parallel ranks .* and by the accumulation"),
        (
            "train.micro_batch_size=2",
            r"train\.micro_batches \(.*is global_batch_size / \(theirs × data-parallel",
        ),
        (
            "train.local_batch_size=2",
            r"train\.micro_batches \(.*train\.batch is theirs × data-parallel ranks ×",
        ),
        ("optimizer.clip_norm=1", "clips each tensor by its own norm, which there is none for"),
        (
            "optimizer.regularizer=1",
            r"weight_decay \(.*biases and norms, too; here they decay only with decay_all",
        ),
        (
            "optimizer.one_dim_param_no_weight_decay=true",
            r"optimizer\.decay_all \(false leaves biases and norms",
        ),
        ("train.sharding=stage2", r"strategy\.sharding_stage \(stage2 is .*sharding: N, sharding_stage: 2}"),
        (
            "strategy.sharding=2",
            r"has no setting 'sharding'\. 'sharding' is a setting of strategy hybrid: strategy\.use=hybrid\. It",
        ),
        ("train.num_nodes=2", "paddle-dp train RECIPE --nodes N"),
        ("train.nnodes=2", "paddle-dp train RECIPE --nodes N"),
        ("train.devices=2", "paddle-dp train RECIPE --devices 0,1"),
        ("dataset.transform_ops=1", "flip, crop, jitter, .* of dataset image_folder"),
        (
            "dataset.batch_transform_ops=1",
            r"mix: \{mixup: 0.2, cutmix: 1.0\} mixes images of the global batch",
        ),
        ("Optimizer.lr=0.1", "'Optimizer' is of PaddleClas: Arch is model here"),
        ("Loss.Train=1", "'Loss' is of PaddleClas: Arch is model here"),
        ("EMA.decay=0.9", r"In a recipe that is ema\.decay"),
        ("train.optimizer=adamw", r"In a recipe that is optimizer \(at the top level of a recipe\)"),
        ("train.output_dir=x", r"In a recipe that is output_dir \(at the top level of a recipe\)"),
        ("train.level=O2", r"train\.precision \(.*level: O2"),
        (
            "train.lr_warmup_fraction=0.01",
            r"schedule\.warmup \(a number of steps, not a share: .*lr_decay_iters",
        ),
        ("train.min_lr_factor=0.1", r"schedule\.floor \(both are a share of the peak rate"),
        ("train.use_distributed_optimizer=true", r"sharding: N, sharding_stage: 1}"),
        (
            "train.rampup_batch_size=8",
            r"train\.batch_ramp \({start: 64, .* theirs counts samples, ours updates",
        ),
        ("train.split=949", r"dataset\.held_out \(a share of the files"),
        ("train.fuse_grad_size_in_MB=32", r"strategy\.comm_buffer_size \(with its unit"),
        ("train.fp16_allreduce=true", r"strategy\.compress \(of strategy data_parallel: float16"),
        ("schedule.lr=1e-3", r"schedule\.learning_rate\. schedule cosine takes"),
    ],
)
def test_a_hint_never_leads_to_another_training(override: str, said: str) -> None:
    found = mistake(override)
    assert re.search(said, found) and "Did you mean" not in found, found


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("lenght", ["length"], "length"),
        ("bacth", ["batch"], "batch"),
        ("Batch-Size", ["batch_size"], "batch_size"),
        ("momentun", ["momentum"], "momentum"),
        ("cosin", ["cosine"], "cosine"),
        ("adamww", ["adamw"], "adamw"),
        ("mse", ["siamese"], None),
        ("deepspeed", ["seed"], None),
        ("recompute", ["dropout"], None),
        ("Global", ["load"], None),
        ("epsilon", ["precision"], None),
        ("cpu", ["gpu"], None),
    ],
)
def test_a_slip_is_one_letter(word: str, known: list[str], meant: str | None) -> None:
    assert near(word, known) == meant


def test_a_slip_in_another_tools_word_is_understood() -> None:
    row = find_hint("gradient_acumulation_steps")
    assert row is not None and row.key == "train.micro_batches"
    assert find_hint("gradient_acumulation_steps", exactly=True) is None
    assert find_hint("wibble") is None


@pytest.mark.parametrize(
    ("override", "sentences"),
    [
        (
            "strategy.tensr=2",
            "Did you mean 'tensor'? 'tensor' is a setting of strategy hybrid: strategy.use=hybrid.",
        ),
        (
            "train.weight_decy=0.1",
            "train has no setting 'weight_decy'. Did you mean 'optimizer.weight_decay'? train",
        ),
        (
            "train.weight_decay=0.1",
            "train has no setting 'weight_decay'. In a recipe that is optimizer.weight_decay.",
        ),
    ],
)
def test_a_slip_in_a_recipe_s_own_key_is_no_word_of_another_tool(override: str, sentences: str) -> None:
    assert sentences in mistake(override)


def test_capitals_tell_paddleclas_s_groups_from_a_recipe_s() -> None:
    assert find_hint("Optimizer") is HINTS["Optimizer"] is not find_hint("optimizer")
    assert find_hint("amp") is find_hint("AMP") is not None
    assert find_hint("loss.epsilon") is not find_hint("epsilon")
