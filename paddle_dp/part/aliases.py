"""Hints on keys that are unknown where they stand: other tools' words, and a recipe's own keys of another group.

A hint that leads to a different training is worse than none, so a row states where meanings differ, such as multiplying
and splitting a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paddle_dp.errors import near

_BATCH = (
    "train.batch is global: theirs is of one device, so multiply it by the data-parallel ranks (data × sharding, not "
    "tensor or pipeline) and by the accumulation steps"
)
_PARTS = (
    "train.micro_batches splits train.batch, theirs multiplies it: 8 samples a device × 2 data-parallel ranks × 4 "
    "accumulation steps is train.batch=64 and train.micro_batches=4"
)
_FLOOR = (
    "floor is a share of the peak rate: 1e-5 of 1e-3 is floor=0.01. Schedules cosine, polynomial, wsd and plateau have "
    "it"
)
_SHARE = "a number of steps or epochs, not a share: 0.1 of '10 epochs' is '1 epoch'"
_UNITS = "a length with its unit, such as '3 epochs' or '5000 steps'"
_EVERY = "with its unit, such as '500 steps' or '1 epoch'"
_LEVEL = "precision: {dtype: bfloat16, level: O2} is Paddle's O2; weights in float32 are kept, too"
_STAGE3 = "strategy: {use: hybrid, sharding: N, sharding_stage: 3} is FSDP and ZeRO-3; 2 shards gradients and states"
_STAGE = "strategy: {use: hybrid, sharding: N, sharding_stage: 1, 2 or 3} is DeepSpeed's ZeRO"
_DATA = "the data set is a part: dataset: {use: …, path: …} (paddle-dp parts datasets)"
_BEST = (
    "of the evaluations' numbers, such as loss or acc1; costs should fall, all others rise, by their names"
)
_NONE = "there is none"
_EVAL_BATCH = "of all ranks together, so theirs × ranks; train.batch without it"
_DEVICE = "a rank takes the device that is there; train.device: cpu or gpu asks for one"
_LAUNCH = "a command's option, not a recipe's key: paddle-dp train RECIPE"
_NODES = "run the command on each machine, and --ranks counts the processes of one"
_MERGE = (
    "gradient_merge multiplies the batch by k_steps, train.micro_batches splits train.batch, so multiply both: k_steps "
    "4 is 4 times train.batch, and train.micro_batches=4. k_steps of localsgd is strategy.every, of strategy local_sgd"
)
_LORA = "adapter: {use: lora, rank: 8, match: ['*.q', '*.v']}, with the names of this model's layers"
_ONCE = "every sample counts once: ranks may have unequal shares, and nothing is repeated to fill them"
_ENDS = "a schedule ends with the training, at train.length"
_TRY = "train.length='2 steps' tries a recipe"
_TOP = "at the top level of a recipe"
_HOW = "how a checkpoint is continued is the command's business: paddle-dp train RECIPE --resume"
_EXACT = "an update is exact over ranks as it is, so there is nothing to set"

# ruff: noqa: E501 - a row of the table is a line
# words | tools | the key in a recipe, or - | a note. {…}: a text above.
_ROWS = """
lr base_lr max_lr peak_lr                 | torch, Paddle    | schedule.learning_rate |
min_lr eta_min end_lr min_learning_rate   | torch, PaddleNLP | schedule.floor         | {_FLOOR}
min_lr_factor                             | torchtitan       | schedule.floor         | both are a share of the peak rate. Schedules cosine, polynomial, wsd and plateau have it
warmup_steps warmup_epochs warmup_epoch lr_warmup_iters | HF, PaddleClas, Megatron | schedule.warmup | {_EVERY}
warmup_ratio warmup_proportion            | HF, PaddleNLP    | schedule.warmup        | {_SHARE}
lr_warmup_fraction                        | Megatron         | schedule.warmup        | a number of steps, not a share: 0.01 of lr_decay_iters 5000 is '50 steps'
warmup_start_lr lr_warmup_init            | PaddleClas, Megatron | schedule.warmup_from | a share of the peak rate: 0.01 of 0.1 is 0.1
lr_scheduler_type lr_scheduler scheduler  | HF, PaddleNLP    | schedule.use           | a word of `paddle-dp parts schedules` (linear is polynomial), or a class of paddle.optimizer.lr
lr_scheduler_kwargs                       | HF               | schedule               | its settings stand in the group schedule
lr_decay gamma                            | PaddleClas, torch | schedule.factor       | of schedule milestones
values                                    | PaddleClas       | schedule.factor        | of schedule milestones: one factor for all, so values [0.1, 0.01, 0.001] are learning_rate 0.1 and factor 0.1
decay_epochs                              | PaddleClas       | schedule.milestones    | of schedule milestones, such as ['30 epochs', '60 epochs'] from the start of training: theirs count from the end of the warm-up, so add warmup_epoch
by_epoch                                  | PaddleClas       | -                      | the rate changes after every step
lr_decay_style                            | Megatron         | schedule.use           | constant, cosine, wsd, inverse_sqrt, polynomial (linear is polynomial)
lr_decay_iters decay_steps                | Megatron, PaddleNLP | -                   | {_ENDS}
epochs num_epochs max_epochs num_train_epochs n_epochs | HF, PaddleClas, Lightning | train.length | {_UNITS}
max_steps iters train_iters num_steps total_steps max_iters steps step num_iters | HF, Megatron, Lightning | train.length | {_UNITS}
batch_size                                | torch, PaddleClas | train.batch           | {_BATCH}
global_batch_size train_batch_size        | Megatron, DeepSpeed | train.batch         |
per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu | HF, PaddleNLP, DeepSpeed | train.batch | {_BATCH}. {_PARTS}
per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size | HF, PaddleNLP | evaluation.batch | {_EVAL_BATCH}
val_batch_size validation_batch_size      | torch, timm      | evaluation.batch       | of all ranks together
max_eval_samples limit_val_batches limit_test_batches eval_iters test_iters max_evaluate_steps | HF, Lightning, Megatron, PaddleNLP | evaluation.samples | a number of samples, spread over the data set
gradient_accumulation_steps accumulate_grad_batches update_freq accum_grad accumulation_steps grad_accum | HF, Lightning, PaddleClas | train.micro_batches | {_PARTS}
micro_batch_size local_batch_size         | Megatron, fleet, torchtitan | train.micro_batches | a number of parts; theirs is the size of one, which splits global_batch_size: train.micro_batches is global_batch_size / (theirs × data-parallel ranks). Without a global batch, train.batch is theirs × data-parallel ranks × accumulate_steps
rampup_batch_size                         | Megatron         | train.batch_ramp       | {start: 64, increment: 64, every: 100 steps}; theirs counts samples, ours updates
accumulate_steps                          | fleet            | train.micro_batches    | both split the batch
k_steps gradient_merge                    | fleet            | train.micro_batches    | {_MERGE}
eval_accumulation_steps                   | HF               | -                      | held-out scores are sums, which take no memory
auto_find_batch_size                      | HF               | train.micro_batches    | auto: the smallest number that fits a transformer; the update stays the same
dtype fp16 bf16 amp use_amp mixed_precision half_precision_backend fp16_backend fp16_opt_level amp_level bf16_full_eval fp16_full_eval amp_configs level | HF, PaddleNLP, PaddleClas, Lightning | train.precision | float32, bfloat16, float16 or float64; {_LEVEL}
amp_master_grad multi_precision use_multi_precision | PaddleNLP, Paddle | train.precision | {_LEVEL}
loss_scale scale_loss scale_loss_window init_loss_scaling grad_scaler scaler | Paddle, PaddleClas | train.precision | precision: {dtype: float16, scale: …}
tf32                                      | HF               | -                      | FLAGS_use_tf32 of Paddle
random_seed                               | Paddle           | train.seed             |
data_seed                                 | HF               | train.seed             | one seed gives weights, order and masks
full_determinism deterministic            | HF, Lightning    | -                      | two runs on as many ranks have the same bits on CPUs as it is
dataloader_drop_last                      | HF               | train.drop_last        |
num_workers dataloader_num_workers workers | torch, HF       | loader.num_workers     | of each rank
dataloader_prefetch_factor prefetch_factor | torch, HF       | loader.prefetch        | batches of a rank, not of a worker
pin_memory dataloader_pin_memory persistent_workers dataloader_persistent_workers use_shared_memory use_dali | torch, HF, PaddleClas | - | workers and memory of the loader last for the whole training as it is
shuffle                                   | torch            | -                      | training samples are shuffled by train.seed in every epoch, held-out ones never
sampler batch_sampler                     | torch, PaddleClas | -                     | the loader makes its own, for each number of ranks; Sampler.batch_size is train.batch
remove_unused_columns label_names group_by_length length_column_name past_index | HF | - | {_DATA}; loader.pad makes samples of unequal lengths equal
data_collator collate_fn                  | HF, torch        | loader.collate         | the data set's collate_fn gets one sample at a time: collate: batch passes it the whole global batch
even_batches use_distributed_sampler      | HF accelerate, Lightning | -              | {_ONCE}
split_batches dispatch_batches accelerator_config | HF accelerate | -               | every rank reads its own samples; dataset.reading=scatter lets rank 0 read for all
clip_norm                                 | PaddleClas       | -                      | ClipGradByNorm clips each tensor by its own norm, which there is none for; ClipGradByGlobalNorm's is optimizer.clip
grad_clip max_grad_norm max_norm gradient_clip_val clip_grad gradient_clipping global_clip_norm clip_grad_norm | HF, Lightning, Megatron, DeepSpeed, torchtitan | optimizer.clip | by the global norm
gradient_clip_algorithm                   | Lightning        | optimizer.clip         | optimizer.clip is by the global norm, optimizer.clip_value by value
adam_beta1                                | HF               | optimizer.beta1        |
adam_beta2                                | HF               | optimizer.beta2        |
adam_epsilon adam_eps eps                 | HF, Megatron, torch | optimizer.epsilon   |
epsilon                                   | Paddle           | optimizer.epsilon      | an optimizer's: CELoss's is loss.label_smoothing
loss.epsilon                              | PaddleClas       | loss.label_smoothing   | of loss cross_entropy
betas                                     | torch            | optimizer.beta1        | and beta2
wd                                        | torch            | optimizer.weight_decay |
regularizer                               | PaddleClas       | optimizer.weight_decay | its coeff, of L2. Theirs decays biases and norms, too; here they decay only with decay_all: true
one_dim_param_no_weight_decay             | PaddleClas       | optimizer.decay_all    | false leaves biases and norms out, as true does there; it is the default here
no_weight_decay_name no_weight_decay no_decay | PaddleClas   | optimizer.groups       | a list: {match: ['*.bias'], weight_decay: 0}
layer_decay                               | PaddleClas       | optimizer.groups       | docs/fine-tuning.md, layer-wise decay
optim optimizer_name                      | HF               | optimizer.use          | a word of `paddle-dp parts optimizers`, or a class of paddle.optimizer
adafactor                                 | HF               | optimizer.use          | optimizer: {use: adafactor}
optim_args optim_target_modules           | HF               | optimizer.use          | paddle.optimizer's classes and yours: use: package.Class
label_smoothing_factor ls_epsilon         | HF, PaddleClas   | loss.label_smoothing   | of loss cross_entropy
loss_type criterion loss_fn               | PaddleNLP, torch | loss.use               |
dp dp_degree data_parallel_degree data_parallel_size | fleet, PaddleNLP, Megatron | strategy.data | of strategy hybrid
tp mp mp_degree tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size model_parallel_size mp_parameters | fleet, PaddleNLP, Megatron | strategy.tensor | of strategy hybrid
pp pp_degree pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size | fleet, PaddleNLP, Megatron | strategy.pipeline | of strategy hybrid
sharding_degree sharding_parallel_degree sharding_parallel_size | fleet, PaddleNLP | strategy.sharding | of strategy hybrid
sharding                                  | PaddleNLP        | strategy.sharding_stage | stage2 is strategy: {use: hybrid, sharding: N, sharding_stage: 2}, with N the number of ranks
strategy.sharding                         | PaddleNLP        | strategy.sharding      | the number of ranks
use_distributed_optimizer                 | Megatron         | strategy.sharding      | strategy: {use: hybrid, sharding: N, sharding_stage: 1}; N counts among the data-parallel ranks: data × sharding
data_parallel_shard_degree                | torchtitan       | strategy.sharding      | {_STAGE3}. It takes no -1
data_parallel_replicate_degree            | torchtitan       | strategy.data          | of strategy hybrid
schedule_mode                             | fleet            | strategy.pipeline_schedule | of strategy hybrid: 1F1B is 1f1b, F-then-B f_then_b, VPP interleaved
fp16_allreduce dgc                        | fleet            | strategy.compress      | of strategy data_parallel: float16, or 'power_sgd rank 4'; there is no top-k
localsgd                                  | fleet            | strategy.every         | strategy: {use: local_sgd, every: 8 steps}
adaptive_localsgd                         | fleet            | strategy.adaptive      | of strategy local_sgd
a_sync                                    | fleet            | strategy.mode          | strategy: {use: parameter_server, servers: N, mode: async}
sep sp_degree sep_degree sep_parallel_degree sep_parallel_size context_parallel_degree context_parallel_size cp_degree cp cp_size ulysses_degree | fleet, PaddleNLP, Megatron | strategy.sequence | of strategy hybrid: ranks that split each sample's tokens
sequence_parallel                         | PaddleNLP, Megatron | strategy.sequence_parallel | of strategy hybrid, with tensor
expert_parallel_degree ep_degree expert_model_parallel_size | PaddleNLP, Megatron | - | {_NONE} for experts: all ranks hold all of them (strategy.find_unused_parameters)
virtual_pp_degree virtual_pipeline_model_parallel_size | fleet, Megatron | strategy.virtual_stages | of strategy hybrid, with pipeline_schedule: interleaved
num_layers_per_virtual_pipeline_stage     | Megatron         | strategy.virtual_stages | stages on a rank, not layers of a stage
fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap fully_shard | torch, HF | strategy.sharding | {_STAGE3}
deepspeed zero_optimization               | DeepSpeed, HF    | strategy.sharding      | {_STAGE}
zero zero_stage stage                     | DeepSpeed        | strategy.sharding_stage | of strategy hybrid, with sharding: N
ddp ddp_backend distributed distributed_backend parallelism_config tensor_parallel_config pipeline_parallel_config sharding_parallel_config hybrid_configs | torch, HF, Lightning, fleet | strategy | a part: data_parallel is DDP; hybrid has tensor, pipeline, sharding and sequence
ddp_find_unused_parameters                | HF               | strategy.find_unused_parameters | of strategy data_parallel; hybrid takes them as they are
ddp_bucket_cap_mb bucket_cap_mb fuse_grad_size_in_MB comm_buffer_size | torch, HF, fleet | strategy.comm_buffer_size | with its unit: '25 MB'
ddp_broadcast_buffers broadcast_buffers   | torch, HF        | -                      | all ranks continue with the first one's buffers
last_comm_buffer_size                     | Paddle           | strategy.last_comm_buffer_size | with its unit: '1 MB'
accumulate_allreduce_grads_in_fp32        | Megatron         | strategy.reduce_dtype  | float32, of strategy hybrid
ddp_timeout nccl_timeout distributed_timeout_minutes | torch, HF, Megatron | train.patience | with its unit: '600 s'; and watch.patience
exit_duration_in_mins                     | Megatron         | train.max_time         | with its unit: '230 min'
sync_batchnorm convert_sync_batchnorm sync_bn use_sync_bn | Lightning, torch | strategy.sync_batch_norm | true unless switched off
average_tokens_across_devices             | HF               | -                      | {_EXACT}
gradient_as_bucket_view fuse_sequence_parallel_allreduce | torch, PaddleNLP | - | {_EXACT}
gradient_checkpointing gradient_checkpointing_kwargs use_recompute recompute recompute_granularity activation_checkpointing | HF, PaddleNLP, Megatron | strategy.recompute | none, full, selective, or 'every 2 blocks'
recompute_num_layers recompute_interval   | Megatron, PaddleNLP | strategy.recompute  | 'every 2 blocks' recomputes every second one
offload_optimizer cpu_offload offload     | DeepSpeed, torch, fleet | strategy.offload       | of strategy hybrid
torch_compile torch_compile_backend torch_compile_mode torchdynamo to_static jit_mode_eval use_cinn | HF, torch, Paddle | train.compile | true or false
load_best_model_at_end save_best_only     | HF, Keras        | callbacks.checkpoint.best | {_BEST}; evaluate --checkpoint best takes it
metric_for_best_model monitor             | HF, Lightning    | callbacks.checkpoint.best | {_BEST}. early_stop.watch ends a training
greater_is_better mode                    | HF, Lightning    | -                      | {_BEST}
early_stopping_patience                   | HF               | callbacks.early_stop.patience | evaluations without improvement
early_stopping_threshold min_delta        | HF, Lightning    | callbacks.early_stop.by |
save_steps save_interval save_epoch_interval save_strategy every_n_epochs every_n_train_steps save_freq | HF, PaddleClas, Lightning, paddle.Model | callbacks.checkpoint.every | {_EVERY}
save_total_limit save_top_k max_to_keep keep_checkpoint_max keep_latest_k | HF, Lightning, torchtitan | callbacks.checkpoint.keep | the newest so many; the best is kept, too
enable_checkpointing save_safetensors save_on_each_node save_only_model save_checkpoint_format | HF, PaddleNLP | callbacks.checkpoint | a checkpoint is whole, in safetensors; paddle-dp export and merge write the model alone
restore_callback_states_from_checkpoint ignore_data_skip resume_from_checkpoint resume checkpoints ckpt_path | HF, PaddleClas, Lightning | - | {_HOW}
unified_checkpoint                        | PaddleNLP        | -                      | every checkpoint is: it continues on any number of ranks, in any layout
fast_dev_run overfit_batches limit_train_batches | Lightning | train.length           | {_TRY}
profiler                                  | Lightning        | callbacks.profile      | or paddle-dp why RUN, after the run
overwrite_output_dir                      | HF               | -                      | an earlier run of the name moves to runs/NAME.1; nothing is overwritten
eval_steps eval_interval evaluation_strategy eval_strategy val_check_interval check_val_every_n_epoch eval_freq eval_delay eval_on_start eval_during_train start_eval_epoch | HF, PaddleClas, Lightning | callbacks.evaluate.every | {_EVERY}
eval_do_concat_batches batch_eval_metrics include_inputs_for_metrics include_for_metrics prediction_loss_only eval_use_gather_object | Megatron, HF, Lightning | callbacks.evaluate | every held-out sample is evaluated, each once
compute_metrics torchmetrics              | HF, Lightning    | metrics                | by name, [{use: auc}], or functions of all (outputs, targets) (docs/metrics.md)
logging_steps print_batch_step log_every_n_steps log_interval print_freq logging_first_step logging_strategy log_freq | HF, PaddleClas, Lightning | callbacks.console.every | {_EVERY}
logging_nan_inf_filter detect_anomaly     | HF, Lightning    | guard.non_finite       | stop, skip or rewind
terminate_on_nan                          | Lightning        | guard.non_finite       | stop
report_to logger wandb mlflow use_visualdl vdl project trackio_space_id logging_dir | HF, Lightning, PaddleClas | callbacks.dashboard | VisualDL; or callbacks.tensorboard, trackio, swanlab; metrics.jsonl of a run is for all others
tensorboard use_tensorboard               | HF, Lightning    | callbacks.tensorboard  | the dashboard's curves for TensorBoard
disable_tqdm verbose enable_progress_bar log_level log_level_replica log_on_each_node skip_memory_metrics | HF, Lightning | callbacks.console | leave it out of callbacks for no bar
include_tokens_per_second include_num_input_tokens_seen | HF    | -                      | the console and metrics.jsonl show samples a second
save_dir log_dir default_root_dir output  | Paddle, Lightning | output_dir            |
run_name exp_name experiment_name         | HF               | name                   |
do_train do_eval do_predict               | HF               | -                      | verbs: paddle-dp train, evaluate, predict
model_name_or_path pretrained_model pretrained | HF, PaddleClas | load.path            | a file or folder; model.from=FOLDER takes sizes and weights of a Hugging Face folder
use_pretrained                            | PaddleClas       | load.path              | a file of weights
lora_rank                                 | PaddleNLP        | adapter.rank           | {_LORA}
lora_alpha                                | PaddleNLP, HF    | adapter.alpha          | {_LORA}
target_modules lora_target_modules        | PaddleNLP, HF    | adapter.match          | {_LORA}
tokenizer_name_or_path tokenizer_name tokenizer_model | HF, PaddleNLP, Megatron | dataset.tokenizer      | the path of a tokenizer.json, not of its folder
max_seq_length max_seq_len seq_length block_size max_length seqlen | HF, PaddleNLP, Megatron | dataset.length | and model.length
input_dir data_dir data_path dataset_path train_file image_root train_dataset_path | HF, PaddleNLP, PaddleClas | dataset.path |
split                                     | PaddleNLP, Megatron | dataset.held_out    | a share of the files, such as 0.05: '949,50,1' is about 0.05, and there is no third part
packing zero_padding greedy_zero_padding  | HF, PaddleNLP    | dataset                | packed_texts packs documents, chat conversations, and attention does not cross from one to another
probabilities data_weights                | HF datasets      | dataset.sources        | of data set mixture; each data set has its weight: [{use: …, weight: 0.7}]
stopping_strategy                         | HF datasets      | dataset.epoch          | of data set mixture: first_exhausted or all_exhausted
cls_label_path file_list                  | PaddleClas       | dataset.train          | of data set image_list; the list to evaluate on is dataset.test
class_id_map_file label_list              | PaddleClas, PaddleX | dataset.names       | of data set image_list
delimiter                                 | PaddleClas       | dataset.separator      | space, tab or comma, of data set image_list
transform_ops                             | PaddleClas       | -                      | flip, crop, jitter, augment (rand, trivial, auto), erase, resize, mean and std are settings of dataset image_folder and image_list; others are a data set's of your own (docs/add-a-part.md)
batch_transform_ops                       | PaddleClas       | -                      | mix: {mixup: 0.2, cutmix: 1.0} mixes images of the global batch (docs/augmentation.md)
mixup mixup_alpha                         | timm, PaddleClas | mix.mixup              | alpha of the share's Beta distribution
cutmix cutmix_alpha                       | timm, PaddleClas | mix.cutmix             | alpha of the share's Beta distribution
mixup_prob                                | timm             | mix.probability        |
mixup_switch_prob                         | timm             | mix.cutmix_probability |
class_num num_classes class_dim           | PaddleClas, torch | model.classes         |
topk                                      | PaddleClas       | metrics.top_k.k        | [{use: top_k, k: [2, 3]}]; a classifier's evaluations give acc1 and acc5 anyway
num_layers num_hidden_layers              | Megatron, HF     | model.depth            | of models gpt and llama
hidden_size                               | Megatron, HF     | model.width            | of models gpt and llama
num_attention_heads                       | Megatron, HF     | model.heads            | of models gpt and llama
num_query_groups num_key_value_heads      | Megatron, HF     | model.kv_heads         | of model llama
head_dim kv_channels                      | HF, Megatron     | model.head_width       | of model llama
attention_bias qkv_bias add_qkv_bias      | HF, Megatron     | model.bias             | qkv or qkvo, of model llama
qk_layernorm                              | Megatron         | model.qk_norm          | of model llama
ffn_hidden_size intermediate_size         | Megatron, HF     | model.hidden           | of models gpt and llama
hidden_dropout attention_dropout resid_pdrop attn_pdrop | Megatron, HF | model.dropout | of model gpt: 0 unless set, and attention weights are never dropped
use_ema ema_decay EMA                     | PaddleClas       | ema.decay              |
neftune_noise_alpha use_liger_kernel liger_kernel_config use_flash_attention use_ipex torch_empty_cache_steps hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token debug tpu_num_cores tpu_metrics_debug use_legacy_prediction_loop ray_scope fuse_attention_qkv fuse_attention_ffn use_fused_rms_norm use_fused_rope | HF, PaddleNLP | - | {_NONE}
device use_gpu use_cpu no_cuda use_mps_device place accelerator | Paddle, HF, Lightning | train.device | {_DEVICE}
local_rank nproc_per_node num_gpus trainers world_size | launchers, HF    | -                      | {_LAUNCH} --ranks N
devices gpus                              | Lightning, launchers | -                  | {_LAUNCH} --devices 0,1 for these, --ranks N for a number of them
nnodes num_nodes                          | launchers, Lightning | -                  | {_LAUNCH} --nodes N --node-rank R --master HOST:PORT; {_NODES}
node_rank master_addr master_port         | launchers        | -                      | {_LAUNCH} --nodes N --node-rank R --master HOST:PORT
Global Arch Optimizer Loss DataLoader Metric Infer SSLD | PaddleClas | -              | Arch is model here, Loss.Train loss, Optimizer optimizer, Optimizer.lr schedule, Global.epochs train.length, DataLoader.Train dataset and loader; `paddle-dp import FILE --ranks CARDS` converts a whole file
"""


@dataclass(frozen=True)
class KeyHint:
    """A word of other tools, or a recipe's own key (`tool` ""). `key`: the recipe's, or ""; `note`: a further clause."""

    name: str
    tool: str
    key: str
    note: str

    @property
    def sentence(self) -> str:
        note = f" ({self.note})" if self.note else ""
        if self.key:
            return f" In a recipe that is {self.key}{note}."
        return f" '{self.name}' is of {self.tool}: {self.note}."


def _hints() -> Iterator[KeyHint]:
    for row in _ROWS.strip().splitlines():
        names, tool, key, note = (cell.strip() for cell in row.split("|"))
        note = re.sub(r"\{(_[A-Z_0-9]+)\}", lambda match: str(globals()[match[1]]), note)
        for name in names.split():
            yield KeyHint(name, tool, key.removeprefix("-"), note)


# Keys that users look for in another group, under the same names.
_MOVED_KEYS = """
schedule.learning_rate schedule.warmup schedule.floor train.length train.batch train.micro_batches train.precision
train.seed train.drop_last train.dropout train.compile train.max_time loader.num_workers loader.pad optimizer.clip
optimizer.weight_decay optimizer.groups strategy.data strategy.tensor strategy.pipeline strategy.sharding
strategy.sequence strategy.sharding_stage strategy.sequence_parallel strategy.recompute strategy.sync_batch_norm
strategy.find_unused_parameters
"""
_TOP_KEYS = "model dataset loss optimizer schedule strategy train loader load guard adapter ema mix evaluation metrics callbacks output_dir"
HINTS = {key.rpartition(".")[2]: KeyHint(key.rpartition(".")[2], "", key, "") for key in _MOVED_KEYS.split()}
HINTS |= {name: KeyHint(name, "", name, _TOP) for name in _TOP_KEYS.split()}
HINTS |= {row.name: row for row in _hints()}
# A part's `use` in other tools, by shelf: the part here, or advice.
PARTS = {
    "losses": {
        "mse": "mean_squared_error", "mse_loss": "mean_squared_error", "l2": "mean_squared_error",
        "asl": "asymmetric", "bce": "binary_cross_entropy", "bce_with_logits": "binary_cross_entropy",
        "ce": "cross_entropy", "celoss": "cross_entropy", "nll": "cross_entropy", "softmax": "cross_entropy",
        "infonce": "contrastive", "arcface": "margin_softmax", "cosface": "margin_softmax",
    },
    "strategies": {
        "ddp": "data_parallel", "dp": "data_parallel", "fsdp": f": {_STAGE3}",
        "deepspeed": f": {_STAGE}", "megatron": "hybrid", "fleet": "hybrid", "tp": "hybrid", "pp": "hybrid",
        "ps": "parameter_server", "auto": "data_parallel",
    },
    "optimizers": {"adam": ": adamw with weight_decay: 0 is Adam", "sgdm": "momentum", "nesterov": "momentum"},
    "schedules": {
        "linear": "polynomial", "step": "milestones", "multistep": "milestones", "piecewise": "milestones",
        "cosine_annealing": "cosine", "constant_with_warmup": "constant", "noam": "inverse_sqrt",
        "onecycle": "one_cycle", "warmup_stable_decay": "wsd",
        "reduce_lr_on_plateau": "plateau", "reduceonplateau": "plateau", "reducelronplateau": "plateau",
    },
    "callbacks": {
        "tensorboardx": "tensorboard", "visualdl": "dashboard", "wandb": "dashboard", "mlflow": "dashboard",
        "logger": "metrics", "csv": "metrics", "early_stopping": "early_stop", "earlystopping": "early_stop",
        "model_checkpoint": "checkpoint", "progress_bar": "console", "profiler": "profile",
    },
    "datasets": {
        "imagenet": "image_folder", "imagefolder": "image_folder", "imagenetdataset": "image_folder",
        "text": "text_files", "json": "text_files", "jsonl": "text_files", "cifar10": "cifar", "cifar100": "cifar",
        "webdataset": "tar_files", "wds": "tar_files", "concat": "mixture", "concatdataset": "mixture", "interleave_datasets": "mixture", "blended": "mixture",
    },
}  # fmt: skip
# Options and verbs of launchers and other command lines, and their equivalents here.
OPTIONS = {
    "--nproc_per_node": "--ranks N", "--nproc-per-node": "--ranks N", "--num_processes": "--ranks N",
    "--num_gpus": "--ranks N", "--nprocs": "--ranks N", "--gpus": "--ranks N for a number of them, --devices 0,1 for these",
    "--gpu": "--devices 0", "--xpus": "--devices 0,1", "--npus": "--devices 0,1", "--nnodes": "--nodes N",
    "--num_machines": "--nodes N", "--rank": "--ranks N, the number of processes, or --node-rank R, this machine's number",
    "--node_rank": "--node-rank R",
    "--machine_rank": "--node-rank R", "--master_addr": "--master HOST:PORT", "--master_port": "--master HOST:PORT",
    "--main_process_ip": "--master HOST:PORT", "--rdzv_endpoint": "--master HOST:PORT", "--ips": "--master HOST:PORT",
    "--max_restarts": "--restarts N", "--max_restart": "--restarts N", "--log_dir": "--output-dir DIR",
    "--output_dir": "--output-dir DIR", "--resume_from_checkpoint": "--resume", "--model_path": "RUN, the run's folder",
    "-c": "the recipe's path alone", "--config": "the recipe's path alone", "-f": "the recipe's path alone",
    "-o": "KEY=VALUE alone", "--opt": "KEY=VALUE alone", "--override": "KEY=VALUE alone", "--set": "KEY=VALUE alone",
    "--seed": "train.seed=N", "--batch_size": "train.batch=N, of all ranks together", "--epochs": "train.length='3 epochs'",
    "--lr": "schedule.learning_rate=0.001", "--device": "train.device=cpu", "--fp16": "train.precision=float16",
    "--bf16": "train.precision=bfloat16", "--amp": "train.precision=bfloat16",
    "--per_device_train_batch_size": "train.batch=N, theirs × data-parallel ranks × accumulation steps",
    "--gradient_accumulation_steps": f"train.micro_batches=N: {_PARTS}",
}  # fmt: skip
VERBS = {
    "infer": "predict", "inference": "predict", "test": "evaluate", "eval": "evaluate", "validate": "evaluate",
    "val": "evaluate", "fit": "train", "finetune": "train", "pretrain": "train", "run": "launch",
    "torchrun": "launch", "spawn": "launch", "env": "doctor", "info": "doctor", "init": "new", "create": "new",
    "help": "--help", "version": "--version", "list": "parts", "convert": "export", "save": "export", "chat": "generate", "profile": "why",
    "estimate": "plan", "simulate": "plan", "tune": "plan", "autotune": "plan",
}  # fmt: skip


def find_hint(name: str, exactly: bool = False) -> KeyHint | None:
    """The row of a word, found despite a typing error unless `exactly`; None for an unknown word.

    PaddleClas's Optimizer and Loss differ from a recipe's groups by their capitals alone. A row for one group is found
    under both names: loss.epsilon.
    """
    key = name.lower().replace("-", "_")
    return HINTS.get(name) or HINTS.get(key) or (None if exactly else HINTS.get(near(key, HINTS) or ""))
