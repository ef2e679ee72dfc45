"""Arguments of PaddleNLP and PaddleFormers as hybrid recipes: layout, batch, rates, tasks that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.importer import import_recipe
from paddle_dp.coming_from.paddlenlp import recipe
from paddle_dp.errors import UsageError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from tests.coming_from.models import LLAMA, arguments, assert_each_key_once, model_folder, reasons, texts

PRETRAIN: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "tokenizer_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "input_dir": "./data", "output_dir": "./checkpoints/pretrain_ckpts", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16, "per_device_eval_batch_size": 2, "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 1, "sharding": "stage2", "virtual_pp_degree": 1, "sequence_parallel": 0,
    "use_flash_attention": True, "use_fused_rms_norm": True, "max_seq_length": 48, "learning_rate": 3e-05,
    "min_learning_rate": 3e-06, "warmup_steps": 30, "logging_steps": 1, "max_steps": 10000, "save_steps": 5000,
    "eval_steps": 1000, "weight_decay": 0.01, "bf16": True, "fp16_opt_level": "O2", "warmup_ratio": 0.01,
    "max_grad_norm": 1.0, "dataloader_num_workers": 1, "continue_training": 0, "do_train": True, "do_eval": True,
    "disable_tqdm": True, "recompute": False, "distributed_dataloader": 1, "recompute_granularity": "full",
    "unified_checkpoint": True, "save_total_limit": 2,
}  # fmt: skip
FORMERS = """
train_dataset_type: erniekit
train_dataset_path: ./train.jsonl
train_dataset_prob: "1.0"
max_seq_len: 32
packing: true
mix_strategy: concat
model_name_or_path: Qwen/Qwen3-0.6B-Base
_attn_implementation: flashmask
stage: PT
fine_tuning: full
seed: 23
do_train: true
do_eval: true
per_device_train_batch_size: 1
num_train_epochs: 1
max_steps: -1
eval_steps: 100
evaluation_strategy: steps
save_strategy: steps
save_steps: 100
save_total_limit: 1
logging_steps: 1
gradient_accumulation_steps: 4
warmup_steps: 20
learning_rate: 1.0e-5
lr_scheduler_type: cosine
min_lr: 1.0e-6
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sequence_parallel: true
recompute_granularity: full
bf16: true
fp16_opt_level: O2
"""
COMMAND = """
# --learning_rate 5 of a comment
export MODEL={model}
name="llama hybrid"
python -u -m paddle.distributed.launch --gpus "0,1" --log_dir "out/${{name}}_log" \\
    run_pretrain.py \\
    --model_type "llama" --model_name_or_path $MODEL --input_dir "./data" \\
    --split 949,50,1 --max_seq_length 16 --per_device_train_batch_size=2 --gradient_accumulation_steps 2 \\
    --tensor_parallel_degree 2 --sequence_parallel 1 --fp16 --fp16_opt_level O2 --scale_loss 512 \\
    --learning_rate 1e-3 --min_learning_rate 1e-4 --max_steps ${{STEPS:-4}} --warmup_steps 1 --weight_decay 0.01 \\
    --logging_steps 1 --save_steps 2 --do_train --recompute 1 --continue_training 0 2>&1 | tee "$name.log"
    # --recompute 0
"""


def test_a_pretraining(tmp_path: Path) -> None:
    c = arguments(tmp_path, **PRETRAIN)
    sections = recipe(c, 8, model_folder(tmp_path, "llama"))
    assert sections == {
        "model": LLAMA,
        "dataset": {
            "use": "text_files", "path": "path/of/the/texts", "tokenizer": "meta-llama/Meta-Llama-3-8B/tokenizer.json",
            "length": 48,
        },
        "loss": {"use": "cross_entropy"},
        "optimizer": {
            "use": "adamw", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "weight_decay": 0.01, "clip": 1.0,
        },
        "schedule": {"use": "polynomial", "learning_rate": 3e-05, "floor": 0.1, "warmup": "30 steps"},
        "strategy": {"use": "hybrid", "tensor": 2, "sharding": 4, "sharding_stage": 2},
        "train": {
            "length": "10000 steps", "batch": 64, "micro_batches": 16, "seed": 42,
            "precision": {"dtype": "bfloat16", "level": "O2"},
        },
        "loader": {"num_workers": 1},
        "evaluation": {"batch": 8, "samples": 80},
        "callbacks": [
            {"use": "console", "every": "1 step"}, {"use": "metrics", "every": "1 step"},
            {"use": "evaluate", "every": "1000 steps"}, {"use": "checkpoint", "every": "5000 steps", "keep": 2},
        ],
    }  # fmt: skip
    assert c.lost == []
    assert_each_key_once(c)


def test_a_training_of_paddleformers(tmp_path: Path) -> None:
    (tmp_path / "pt.yaml").write_text(FORMERS)
    c = Configuration.read(tmp_path / "pt.yaml")
    sections = recipe(c, 8, model_folder(tmp_path, "llama"))
    assert sections["strategy"] == {
        "use": "hybrid", "tensor": 2, "pipeline": 2, "sharding": 2, "sharding_stage": 1, "sequence_parallel": True,
        "recompute": "full",
    }  # fmt: skip
    assert sections["train"] == {
        "length": "1 epoch", "batch": 8, "micro_batches": 4, "seed": 23,
        "precision": {"dtype": "bfloat16", "level": "O2"},
    }  # fmt: skip
    assert sections["schedule"] == {
        "use": "cosine",
        "learning_rate": 1e-5,
        "floor": 0.1,
        "warmup": "20 steps",
    }
    assert sections["dataset"] == {
        "use": "packed_texts", "path": "./train.jsonl", "length": 32,
        "tokenizer": f"{tmp_path}/llama/tokenizer.json",
    }  # fmt: skip
    assert "adapter" not in sections and reasons(c) == {}
    assert_each_key_once(c)


@pytest.mark.parametrize(
    ("more", "section", "name", "value"),
    [
        ({"tensor_parallel_degree": 2, "sharding": "", "sep_parallel_degree": 2}, "train", "batch", 32),
        ({"tensor_parallel_degree": 2, "sharding": "", "sep_parallel_degree": 2}, "strategy", "sequence", 2),
        ({"tensor_parallel_degree": -1, "sharding": ""}, "strategy", "use", "data_parallel"),
        ({"sharding_parallel_degree": 2}, "strategy", "sharding", 2),
        ({"sharding_parallel_degree": 2}, "train", "batch", 64),  # sharding ranks read different samples
        ({"sharding": "stage3 offload"}, "strategy", "sharding_stage", 3),
        ({"sharding": ["stage1"], "sharding_parallel_degree": 1}, "strategy", "sharding_stage", None),
        ({"pipeline_parallel_degree": 2, "virtual_pp_degree": 2}, "strategy", "pipeline_schedule", "interleaved"),
        ({"virtual_pp_degree": 2}, "strategy", "virtual_stages", None),
        ({"recompute": 1, "recompute_granularity": "core_attn"}, "strategy", "recompute", "selective"),
        ({"recompute": True, "recompute_granularity": "full_attn"}, "strategy", "recompute", "full"),
        ({"fp16": True, "bf16": False}, "train", "precision", {"dtype": "float16", "level": "O2", "scale": 32768.0}),
        ({"warmup_steps": 0, "warmup_ratio": 0.01}, "schedule", "warmup", "100 steps"),
        ({"min_learning_rate": None}, "schedule", "floor", pytest.approx(1 / 3)),  # theirs is 1e-5
        ({"input_dir": None}, "schedule", "floor", None),  # fine-tuning does not read it
        ({"split": "949,50,1"}, "dataset", "held_out", 0.05),
        ({"split": [998, 2]}, "dataset", "held_out", 0.002),
        ({"eval_iters": 10}, "evaluation", "samples", 80),  # 10 batches of 2 on 4 ranks
        ({"max_evaluate_steps": 3, "per_device_eval_batch_size": 1}, "evaluation", "samples", 12),
        ({"max_evaluate_steps": -1}, "evaluation", "samples", 80),
        ({"per_device_eval_batch_size": None}, "evaluation", "batch", 32),
        ({"do_eval": False}, "callbacks", 2, {"use": "checkpoint", "every": "5000 steps", "keep": 2}),
    ],
)  # fmt: skip
def test_one_argument(tmp_path: Path, more: dict[str, Any], section: str, name: Any, value: Any) -> None:
    c = arguments(tmp_path, **PRETRAIN | more)
    made = recipe(c, 8, model_folder(tmp_path, "llama"))[section]
    assert (made[name] if isinstance(made, list) else made.get(name)) == value
    assert_each_key_once(c)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("peak", "least", "same"), [(1e-5, None, True), (5e-6, None, False), (5e-6, 5e-6, True)]
)
def test_a_rate_that_does_not_fall_is_constant(
    tmp_path: Path, kind: str, peak: float, least: float | None, same: bool
) -> None:
    """Their default of min_learning_rate is 1e-5, also for a learning_rate below it, which then rises."""
    c = arguments(
        tmp_path,
        **PRETRAIN | {"lr_scheduler_type": kind, "learning_rate": peak, "min_learning_rate": least},
    )
    made = recipe(c, 8, model_folder(tmp_path, "llama"))["schedule"]
    assert made == {"use": "constant", "learning_rate": peak, "warmup": "30 steps"}
    read_part("schedules", made)
    assert any("theirs rises to 1e-05" in each for each in c.differences) != same
    assert_each_key_once(c)


def test_lora_adapts_all_linear_layers_of_the_blocks(tmp_path: Path) -> None:
    c = arguments(
        tmp_path, **PRETRAIN | {"lora": True, "lora_rank": 4, "lora_alpha": 3, "tensor_parallel_degree": 1}
    )
    sections = recipe(c, 1, model_folder(tmp_path, "llama"))
    assert sections["adapter"] == {
        "use": "lora", "match": ["blocks.1.*", "blocks.2.*"], "rank": 4, "alpha": 8.0,
    }  # fmt: skip
    model = read_part("models", sections["model"]).build()
    adapted = read_part("adapters", sections["adapter"]).config.build(model, 0)
    trained = {name.rpartition(".")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert {name.split(".")[2] for name in trained} == {"q", "k", "v", "out", "gate", "up", "down"}
    assert {name.split(".")[1] for name in trained} == {"1", "2"}


def test_defaults_of_paddleformers_command(tmp_path: Path) -> None:
    c = arguments(tmp_path, stage="PT", model_name_or_path="x", train_dataset_path="a.jsonl", max_seq_len=16)
    sections = recipe(c, 2, model_folder(tmp_path, "llama"))
    assert sections["train"]["precision"] == {"dtype": "bfloat16", "level": "O1"}
    assert sections["adapter"]["rank"] == 8 and sections["strategy"]["sharding_stage"] == 1
    assert [each for each in c.differences if "default" in each] == [
        "bfloat16 is PaddleFormers' default: compute_type is not there.",
        "LoRA is PaddleFormers' default: fine_tuning is not there.",
    ]


def test_dropout_of_gpt_is_an_argument(tmp_path: Path) -> None:
    c = arguments(tmp_path, **PRETRAIN | {"attention_probs_dropout_prob": 0.1})
    assert recipe(c, 8, model_folder(tmp_path, "gpt"))["model"]["dropout"] == 0.1
    assert reasons(c).keys() == {"attention_probs_dropout_prob"}
    c = arguments(tmp_path, **PRETRAIN | {"hidden_dropout_prob": 0.2})
    assert recipe(c, 8, model_folder(tmp_path, "gpt"))["model"]["dropout"] == 0.2
    c = arguments(tmp_path, **PRETRAIN | {"attention_probs_dropout_prob": 0.1})
    assert "dropout" not in recipe(c, 8, model_folder(tmp_path, "llama"))["model"] and c.lost == []


def test_what_is_not_the_same_is_lost(tmp_path: Path) -> None:
    more = {
        "src_length": 1024, "chat_template": "a.json", "rslora": True, "decay_steps": 5000, "optim": "adamw_mini",
        "surprise": 1, "recompoute": True, "dataset_name_or_path": "d", "input_dir": None,
    }  # fmt: skip
    c = arguments(tmp_path, **PRETRAIN | more)
    recipe(c, 8, model_folder(tmp_path, "llama"))
    assert reasons(c).keys() == {*more} - {"input_dir", "dataset_name_or_path"}
    assert reasons(c)["recompoute"].endswith("did you mean recompute?")
    assert_each_key_once(c)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree: 3: the degrees multiply to 6, which does not divide"),
        ({"tensor_parallel_degree": 16}, "the degrees multiply to 16, which does not divide --ranks 8"),
        ({"tensor_parallel_degree": "two"}, "tensor_parallel_degree: two: is no number from 1 on"),
        ({"tensor_parallel_degree": [1, 2]}, "is no number from 1 on"),
        ({"sharding": "stage7"}, "sharding: stage7: stage1, stage2 or stage3"),
        ({"min_learning_rate": 1.0}, "the last rate, 1, has to be below it"),
        ({"fp16_opt_level": "O3"}, "fp16_opt_level: O3: O1 or O2"),
        ({"split": "all"}, "split: all: three shares"),
        ({"split": "1,0,0"}, "three shares"),
        ({"prefix_tuning": True}, "prefix tuning has no recipe"),
        ({"do_ptq": True}, "quantization has no recipe"),
        ({"loss_type": "sigmoid"}, "learning from preferences has no recipe"),
        ({"stage": "DPO"}, "stage: DPO: pt and sft have a recipe"),
        ({"per_device_train_batch_size": -1}, "is no number from 1 on"),
        ({"max_steps": "$STEPS"}, "the file does not say what the variable is"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_its_key(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    c = arguments(tmp_path, **PRETRAIN | {"sharding_parallel_degree": 1, "sharding": "stage1"} | more)
    if more.get("tensor_parallel_degree") == 3:
        c = arguments(tmp_path, **PRETRAIN | {"sharding_parallel_degree": 2} | more)
    with pytest.raises(UsageError) as caught:
        recipe(c, 8, model_folder(tmp_path, "llama"))
    assert said in str(caught.value)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    c = arguments(tmp_path, **PRETRAIN | {"model_name_or_path": "Nobody/Unheard-7B"})
    with pytest.raises(UsageError, match=r"Nobody/Unheard-7B: there is no such folder.*--model FOLDER"):
        recipe(c, 8)
    folder = model_folder(tmp_path, "llama", model_type="unheard")
    with pytest.raises(UsageError, match=r'config\.json has model_type "unheard", and the models here are'):
        recipe(arguments(tmp_path, **PRETRAIN), 8, folder)
    folder = model_folder(tmp_path, "llama", mlp_bias=True)
    with pytest.raises(UsageError, match="has mlp_bias true, which llama does not know"):
        recipe(arguments(tmp_path, **PRETRAIN), 8, folder)


def test_a_command_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(COMMAND.format(model=model_folder(tmp_path, "llama")))
    with pytest.raises(UsageError, match="its launcher starts 2 on a machine: --ranks 2"):
        import_recipe(Path("run.sh"), None)
    result = import_recipe(Path("run.sh"), 2)
    assert (
        result.obstacle == ""
        and result.tool == "PaddleNLP or PaddleFormers"
        and result.configuration.lost == []
    )
    assert result.lines()[-1] == "then: paddle-dp verify run.yaml --ranks 2"
    read = read_recipe("run.yaml")
    assert read.strategy.config.tensor == 2 and read.train.batch == 4 and str(read.train.length) == "4 steps"
    assert read.strategy.config.recompute.blocks and read.train.precision.scale == 512


@pytest.mark.long
@pytest.mark.processes
def test_two_ranks_learn_what_one_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(COMMAND.format(model=model_folder(tmp_path, "llama")))
    import_recipe(Path("run.sh"), 2)
    data = [f"dataset.path={texts(tmp_path)}", "dataset.tokenizer=bytes", "train.precision=float32"]
    with pytest.raises(SystemExit) as ended:
        main(["verify", "run.yaml", "--ranks", "2", "--steps", "2", *data])
    assert ended.value.code == 0


def test_samples_that_are_not_shuffled_there_are_named(tmp_path: Path) -> None:
    c = arguments(tmp_path, **PRETRAIN | {"dataloader_shuffle": False, "random_shuffle": True})
    recipe(c, 8, model_folder(tmp_path, "llama"))
    assert "dataloader_shuffle" in reasons(c) and "random_shuffle" not in reasons(c)


SFT: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "dataset_name_or_path": "./data", "do_train": True,
    "per_device_train_batch_size": 2, "num_train_epochs": 1, "learning_rate": 3e-05, "max_length": 48,
    "evaluation_strategy": "epoch", "save_strategy": "epoch", "tensor_parallel_degree": 1, "zero_padding": False,
    "bf16": True,
}  # fmt: skip
PAIRS = {"field": "src", "answers": "tgt"}


@pytest.mark.parametrize(
    ("more", "dataset"),
    [
        ({}, {"path": "./data/train.json", "test": "./data/dev.json", "packing": False}),
        ({"zero_padding": True}, {"path": "./data/train.json", "test": "./data/dev.json", "packing": True}),
        ({"intokens": True}, {"path": "./data/train.json", "test": "./data/dev.json", "packing": True}),
        ({"evaluation_strategy": "no"}, {"path": "./data/train.json", "held_out": 0.0, "packing": False}),
    ],
)  # fmt: skip
def test_fine_tuning_is_chat(tmp_path: Path, more: dict[str, Any], dataset: dict[str, Any]) -> None:
    c = arguments(tmp_path, **SFT | more)
    made = recipe(c, 2, model_folder(tmp_path, "llama"))
    tokenizer = {"tokenizer": f"{tmp_path}/llama/tokenizer.json", "length": 48}
    assert made["dataset"] == {"use": "chat", **tokenizer, **dataset, **PAIRS}
    assert made["loss"] == {"use": "cross_entropy", "ignore_index": -100} and c.lost == []
    assert any("chat_template.json, or without one as src and tgt alone" in each for each in c.differences)
    assert any(each.startswith("./data is not here: train.json and dev.json in it") for each in c.differences)
    assert_each_key_once(c)


@pytest.mark.parametrize(
    ("values", "rate"),
    [(SFT, 2e-5), (SFT | {"stage": "SFT"}, 5e-5), (PRETRAIN | {"min_learning_rate": 1e-6}, 5e-5)],
)
def test_the_default_rate_is_that_of_their_program(
    tmp_path: Path, values: dict[str, Any], rate: float
) -> None:
    """run_finetune.py of PaddleNLP 3.0 takes an SFTConfig; the others the trainer's arguments."""
    c = arguments(tmp_path, **{key: value for key, value in values.items() if key != "learning_rate"})
    assert recipe(c, 8, model_folder(tmp_path, "llama"))["schedule"]["learning_rate"] == rate
    assert any(each.startswith("2e-05 is SFTConfig") for each in c.differences) == (rate == 2e-5)


def test_the_folder_that_is_there_decides(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        (tmp_path / "data" / name).mkdir(parents=True)
    c = arguments(tmp_path, **SFT | {"dataset_name_or_path": str(tmp_path / "data")})
    made = recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]
    assert (made["path"], made["test"]) == (f"{tmp_path}/data/train", f"{tmp_path}/data/dev")
    assert not any("is not here" in each for each in c.differences)


def formers(folder: Path, **more: Any) -> Configuration:
    """A fine-tuning of PaddleFormers on two data sets."""
    return arguments(
        folder,
        **{
            "stage": "SFT", "fine_tuning": "full", "model_name_or_path": "Qwen/Qwen3-0.6B", "max_seq_len": 32,
            "train_dataset_type": "erniekit,messages", "train_dataset_path": "a.jsonl, b/c.jsonl",
            "train_dataset_prob": "0.8,0.2", "packing": True, "template_backend": "jinja", "template": "qwen3",
            "per_device_train_batch_size": 1, "max_steps": 10, **more,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, {}),
        ({"mix_strategy": "concat"}, {}),
        ({"mix_strategy": "interleave_under"}, {"epoch": "first_exhausted"}),
        ({"mix_strategy": "interleave_over"}, {"epoch": "all_exhausted"}),
        ({"mix_strategy": "random"}, {"weight": True}),
        ({"mix_strategy": "random", "max_steps": -1, "num_samples_each_epoch": 50}, {"samples": 50}),
    ],
)
def test_data_sets_with_probabilities_are_a_mixture(
    tmp_path: Path, more: dict[str, Any], settings: dict[str, Any]
) -> None:
    c = formers(tmp_path, **more)
    made = recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]
    common = {
        "use": "chat", "tokenizer": f"{tmp_path}/llama/tokenizer.json", "length": 32, "packing": True,
        "longer": "leave_out", "held_out": 0.0,
    }  # fmt: skip
    weights = [{"weight": 0.8}, {"weight": 0.2}] if settings else [{}, {}]
    sources = [
        {**common, "path": "a.jsonl", **PAIRS, **weights[0]},
        {**common, "path": "b/c.jsonl", **weights[1]},
    ]
    settings.pop("weight", None)
    assert made == {"use": "mixture", "sources": sources, **settings}
    assert c.lost == []
    assert_each_key_once(c)


def test_held_out_data_sets_belong_to_one_of_their_form(tmp_path: Path) -> None:
    more = {"eval_dataset_type": "messages", "eval_dataset_path": "e.jsonl", "do_eval": True}
    c = formers(tmp_path, **more)
    first, second = recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]["sources"]
    assert first["held_out"] == 0.0 and second["test"] == "e.jsonl" and c.lost == []
    c = formers(tmp_path, **more | {"train_dataset_type": "erniekit,erniekit"})
    recipe(c, 2, model_folder(tmp_path, "llama"))
    assert reasons(c) == {"eval_dataset_path": "a data set has one test of its form, so e.jsonl is not read"}
    c = formers(tmp_path, do_eval=True)
    recipe(c, 2, model_folder(tmp_path, "llama"))
    assert any(each.startswith("dataset.test: theirs evaluates") for each in c.to_fill)
    c = formers(tmp_path, eval_dataset_path="e.jsonl")
    sources = recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]["sources"]
    assert all("test" not in source for source in sources) and c.lost == []
    assert_each_key_once(c)


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({"template_backend": "custom"}, {"template"}),
        ({"template_backend": None}, {"template"}),
        ({"truncation_strategy": "left"}, {"truncation_strategy"}),
        ({"train_dataset_type": "erniekit,alpaca"}, {"train_dataset_type"}),
        ({"train_dataset_path": "a.jsonl#100,b.jsonl"}, {"train_dataset_path"}),
        ({"mix_strategy": "shuffle"}, {"mix_strategy"}),
        ({"use_template": False, "split_multi_turn": True}, {"use_template", "split_multi_turn"}),
        ({"padding_free": True, "buffer_size": 9, "train_dataset_prob": "1.0, 0"}, set()),
    ],
)
def test_what_conversations_cannot_honour_is_lost(
    tmp_path: Path, more: dict[str, Any], lost: set[str]
) -> None:
    c = formers(tmp_path, **more)
    made = recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]
    assert reasons(c).keys() == lost
    assert "#" not in str(made) and (made["use"] == "chat") == ("train_dataset_prob" in more)
    assert_each_key_once(c)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"train_dataset_prob": "0.8"}, "has 2 paths, and there are 2 types and 1 probabilities"),
        ({"train_dataset_prob": "0.8,much"}, "needs a number for each path, such as 0.8,0.2"),
        ({"train_dataset_prob": "0,0"}, "is 0 for each path"),
    ],
)
def test_lists_that_do_not_agree_are_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recipe(formers(tmp_path, **more), 2, model_folder(tmp_path, "llama"))


@pytest.mark.parametrize(
    ("more", "packing"), [({}, False), ({"packing": True, "truncate_packing": False}, True)]
)
def test_texts_that_are_not_cut_there_are_windows(
    tmp_path: Path, more: dict[str, Any], packing: bool
) -> None:
    c = arguments(tmp_path, stage="PT", model_name_or_path="x", train_dataset_path="a.jsonl", **more)
    assert recipe(c, 2, model_folder(tmp_path, "llama"))["dataset"]["use"] == "text_files"
    assert reasons(c).keys() == {*more} and any("leaves out the rest" in each for each in c.differences)


@pytest.mark.long
@pytest.mark.processes
def test_two_ranks_learn_imported_conversations_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("a.jsonl", 20), ("c.jsonl", 7)):
        both = [{"src": [f"{n}?"], "tgt": [f"{n * n}."]} for n in range(count)]
        own = [
            [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{-n}."}]
            for n in range(count)
        ]
        lines = both if name == "a.jsonl" else [{"messages": each} for each in own]
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder = model_folder(tmp_path, "llama", max_position_embeddings=96)
    formers(tmp_path, train_dataset_path="a.jsonl,c.jsonl", mix_strategy="interleave_over", max_seq_len=96)
    result = import_recipe(Path("args.json"), 2, Path("sft.yaml"), model=folder)
    assert result.obstacle == ""
    data = [f"dataset.sources.{n}.tokenizer=bytes" for n in (0, 1)]
    with pytest.raises(SystemExit) as ended:
        main(["verify", "sft.yaml", "--ranks", "2", "--steps", "2", *data, "train.precision=float32"])
    assert ended.value.code == 0
