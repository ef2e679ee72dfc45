"""Hugging Face's TrainingArguments as recipes: what each becomes, that none is passed over, and that rates agree."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.coming_from import paddlenlp
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.huggingface import recipe
from paddle_dp.coming_from.importer import import_recipe
from paddle_dp.errors import UsageError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from tests.coming_from.models import arguments, assert_each_key_once, model_folder, reasons, texts

# The arguments of transformers 5, as to_json_string writes them.
FULL: dict[str, Any] = {
    "output_dir": "out", "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1,
    "learning_rate": 5e-05, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "optim": "adamw_torch", "optim_args": None, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-08, "gradient_accumulation_steps": 1, "average_tokens_across_devices": True,
    "max_grad_norm": 1.0, "label_smoothing_factor": 0.0, "bf16": False, "fp16": False, "gradient_checkpointing": False,
    "neftune_noise_alpha": None, "logging_strategy": "steps", "logging_steps": 500, "report_to": [],
    "eval_strategy": "no", "eval_steps": None, "save_strategy": "steps", "save_steps": 500, "save_total_limit": None,
    "load_best_model_at_end": False, "metric_for_best_model": None, "greater_is_better": None, "seed": 42,
    "data_seed": None, "accelerator_config": {"split_batches": False, "even_batches": True},
    "parallelism_config": None, "dataloader_drop_last": False, "dataloader_num_workers": 0,
    "train_sampling_strategy": "random", "ddp_timeout": 1800, "fsdp": None, "fsdp_config": None, "deepspeed": None,
    "hub_token": "<HUB_TOKEN>", "push_to_hub": False, "remove_unused_columns": True, "local_rank": -1,
}  # fmt: skip


def imported(
    folder: Path, more: dict[str, Any], ranks: int = 2, family: str = "gpt", **model: Any
) -> tuple[Configuration, dict[str, Any]]:
    """Their arguments, `FULL` and more, and the recipe of them. Each key has one fate."""
    c = arguments(folder, **FULL | more)
    sections = recipe(c, ranks, model_folder(folder, family, **model))
    assert_each_key_once(c)
    return c, sections


def test_their_defaults_are_written_out(tmp_path: Path) -> None:
    c, sections = imported(tmp_path, {}, 4)
    assert sections == {
        "model": {
            "use": "gpt", "vocab": 256, "width": 32, "depth": 2, "heads": 2, "length": 64, "hidden": None,
            "epsilon": 1e-05, "tied": True, "dropout": 0.0,
        },
        "dataset": {
            "use": "text_files", "path": "path/of/the/texts", "tokenizer": str(tmp_path / "gpt/tokenizer.json"),
            "length": 64,
        },
        "loss": {"use": "cross_entropy"},
        "optimizer": {
            "use": "adamw", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "weight_decay": 0.0, "clip": 1.0,
        },
        "schedule": {"use": "polynomial", "learning_rate": 5e-05},
        "strategy": {"use": "data_parallel"},
        "train": {"length": "3 epochs", "batch": 32, "seed": 42},
        "loader": {"num_workers": 0},
        "callbacks": [
            {"use": "console", "every": "500 steps"}, {"use": "metrics", "every": "500 steps"},
            {"use": "checkpoint", "every": "500 steps", "keep": 3},
        ],
    }  # fmt: skip
    assert c.lost == [] and [each.partition(":")[0] for each in c.to_fill] == [
        "load", "dataset.path", "dataset.length", "dataset.tokenizer"
    ]  # fmt: skip


def test_a_file_without_their_defaults_gives_the_same(tmp_path: Path) -> None:
    few = arguments(tmp_path, output_dir="out", per_device_train_batch_size=8)
    model = model_folder(tmp_path, "gpt")
    assert recipe(few, 4, model) == recipe(arguments(tmp_path, **FULL), 4, model)


def test_a_whole_training(tmp_path: Path) -> None:
    c, sections = imported(
        tmp_path,
        {
            "max_steps": 400, "gradient_accumulation_steps": 4, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
            "learning_rate": 3e-4, "weight_decay": 0.1, "max_grad_norm": 0, "label_smoothing_factor": 0.1, "bf16": True,
            "gradient_checkpointing": True, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2,
            "load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy", "greater_is_better": True,
            "logging_steps": 10, "seed": 7, "data_seed": 7, "dataloader_drop_last": True, "dataloader_num_workers": 2,
            "dataloader_prefetch_factor": 4, "report_to": ["wandb"], "train_file": "texts.txt", "block_size": 32,
            "validation_split_percentage": 5, "per_device_eval_batch_size": 16, "max_eval_samples": 100,
        },
        family="llama",
    )  # fmt: skip
    assert sections["train"] == {
        "length": "400 steps", "batch": 64, "micro_batches": 4, "seed": 7, "drop_last": True, "precision": "bfloat16",
    }  # fmt: skip
    assert sections["schedule"] == {"use": "cosine", "learning_rate": 3e-4, "warmup": "40 steps"}
    assert sections["loss"] == {"use": "cross_entropy", "label_smoothing": 0.1}
    assert sections["strategy"] == {"use": "data_parallel", "recompute": "full"}
    assert sections["loader"] == {"num_workers": 2, "prefetch": 4}
    assert sections["evaluation"] == {"batch": 32, "samples": 100}
    assert "clip" not in sections["optimizer"] and sections["optimizer"]["weight_decay"] == 0.1
    assert sections["dataset"]["path"] == "texts.txt" and sections["dataset"]["held_out"] == 0.05
    assert sections["dataset"]["length"] == 32
    assert sections["callbacks"] == [
        {"use": "console", "every": "10 steps"}, {"use": "metrics", "every": "10 steps"},
        {"use": "evaluate", "every": "1 epoch"}, {"use": "checkpoint", "every": "1 epoch", "keep": 2, "best": "acc1"},
    ]  # fmt: skip
    assert c.lost == []


@pytest.mark.parametrize(
    ("more", "section", "name", "value"),
    [
        ({"num_train_epochs": 0.5}, "train", "length", "0.5 epochs"),
        ({"num_train_epochs": 10, "warmup_steps": 0.06}, "schedule", "warmup", "0.6 epochs"),
        ({"max_steps": 7, "warmup_ratio": 0.1}, "schedule", "warmup", "1 step"),  # rounded up, as theirs
        ({"warmup_steps": 5, "warmup_ratio": 0.5}, "schedule", "warmup", "5 steps"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "schedule", "warmup", None),  # theirs passes over it
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, "schedule", "warmup", "5 steps"),
        ({"fp16": True}, "train", "precision", "float16"),
        ({"optim": "adafactor"}, "optimizer", "relative", False),
        ({"optim": "lion_32bit", "adam_beta2": 0.95}, "optimizer", "beta2", 0.95),
        ({"optim": "galore_adamw"}, "optimizer", "use", "adamw"),
        ({"optim": "sgd"}, "optimizer", "use", "sgd"),
        ({"fsdp": "full_shard auto_wrap"}, "strategy", "sharding_stage", 3),
        ({"fsdp": ["shard_grad_op"]}, "strategy", "sharding_stage", 2),
        ({"fsdp": True}, "strategy", "sharding_stage", 3),
        ({"fsdp": "no_shard"}, "strategy", "use", "data_parallel"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "strategy", "sharding_stage", 1),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "strategy", "sharding", 4),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, "strategy", "use", "data_parallel"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}, "bf16": True}, "train", "precision",
         {"dtype": "bfloat16", "level": "O2"}),
        ({"seed": 0}, "train", "seed", 0),
        ({"save_total_limit": 0}, "callbacks", 2, {"use": "checkpoint", "every": "500 steps", "keep": 3}),
    ],
)  # fmt: skip
def test_one_argument(tmp_path: Path, more: dict[str, Any], section: str, name: Any, value: Any) -> None:
    made = imported(tmp_path, more, 4)[1][section]
    assert (made[name] if isinstance(made, list) else made.get(name)) == value


def test_the_stage_is_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": True}, "gradient_clipping": "auto",
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    )  # fmt: skip
    c, sections = imported(tmp_path, {"deepspeed": "zero.json"}, 4)
    assert sections["strategy"]["sharding_stage"] == 3
    assert reasons(c).keys() == {"deepspeed.optimizer.type", "deepspeed.optimizer.params.lr"}


STEPS = 40
# transformers/optimization.py, as shares of the rate.
THEIRS: dict[str, Any] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "polynomial": lambda done: (1 - 0.001) * (1 - done) ** 2 + 0.001,
    "cosine_with_min_lr": lambda done: 0.5 * (1 + math.cos(math.pi * done)) * (1 - 0.1) + 0.1,
    "constant": lambda done: 1.0,
    "constant_with_warmup": lambda done: 1.0,
}
KWARGS = {"polynomial": {"lr_end": 1e-6, "power": 2.0}, "cosine_with_min_lr": {"min_lr_rate": 0.1}}


@pytest.mark.parametrize("warmup", [0, 8])
@pytest.mark.parametrize("kind", THEIRS)
def test_rates_are_theirs(tmp_path: Path, kind: str, warmup: int) -> None:
    """In the warm-up ours is one step ahead."""
    more = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": KWARGS.get(kind), "learning_rate": 1e-3}
    c, sections = imported(tmp_path, more | {"max_steps": STEPS, "warmup_steps": warmup}, 1)
    assert c.lost == []
    ours = read_part("schedules", sections["schedule"]).config
    start = 0 if kind == "constant" else warmup
    for step in range(STEPS):
        share = THEIRS[kind]((step - start) / (STEPS - start)) if step >= start else (step + 1) / (start + 1)
        assert ours.rate(step, steps=STEPS, steps_per_epoch=7, batch=8) == pytest.approx(
            1e-3 * share, rel=1e-9
        )


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_the_same_parameters_decay_as_theirs(tmp_path: Path, family: str) -> None:
    """Trainer leaves out biases and the parameters of LayerNorm and RMSNorm."""
    _, sections = imported(tmp_path, {"weight_decay": 0.1}, 1, family)
    model = read_part("models", sections["model"]).build()
    named = list(model.named_parameters())
    decaying = {id(each) for each in read_part("optimizers", sections["optimizer"]).config.decaying(named)}
    for name, parameter in named:
        theirs = ".bias" not in name and "norm" not in name
        assert (id(parameter) in decaying) == theirs, name


def test_what_is_not_the_same_is_lost(tmp_path: Path) -> None:
    more = {
        "neftune_noise_alpha": 5.0, "group_by_length": True, "data_seed": 1, "optim": "adamw_bnb_8bit",
        "accelerator_config": {"split_batches": True}, "metric_for_best_model": "f1", "load_best_model_at_end": True,
        "eval_strategy": "steps", "deepspeed": "nowhere.json", "parallelism_config": {"tp_size": 2},
    }  # fmt: skip
    c, _ = imported(tmp_path, more)
    assert reasons(c).keys() == {
        "neftune_noise_alpha", "group_by_length", "data_seed", "optim", "accelerator_config.split_batches",
        "metric_for_best_model", "deepspeed", "parallelism_config.tp_size",
    }  # fmt: skip


def test_an_unknown_key_is_named_with_its_near_miss(tmp_path: Path) -> None:
    c, _ = imported(tmp_path, {"learnig_rate": 1e-3, "surprise": {"depth": [1]}, "tensor_parallel_size": 2})
    assert reasons(c) == {
        "learnig_rate": "no argument of TrainingArguments that is known here: did you mean learning_rate?",
        "surprise.depth": "no argument of TrainingArguments that is known here",
        "tensor_parallel_size": "no argument of TrainingArguments that is known here: In a recipe that is "
        "strategy.tensor (of strategy hybrid)",
    }  # fmt: skip


def test_bert_learns_masked_texts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "bert")
    added = {"added_tokens": [{"id": 0, "content": "[PAD]"}, {"id": 250, "content": "[MASK]"}]}
    (folder / "tokenizer.json").write_text(json.dumps(added))
    sections = recipe(arguments(tmp_path, **FULL | {"mlm_probability": 0.2}), 1, folder)
    assert sections["loss"] == {"use": "cross_entropy", "ignore_index": -100}
    assert sections["dataset"] == {
        "use": "masked_texts", "path": "path/of/the/texts", "tokenizer": str(folder / "tokenizer.json"), "length": 64,
        "mask": 250, "masked": 0.2,
    }  # fmt: skip


def test_the_folder_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights begin the training if it is named; a checkpoint's, next to the arguments, are results of it."""
    folder = model_folder(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    c = arguments(tmp_path, **FULL | {"model_name_or_path": "llama"})
    assert recipe(c, 1)["model"]["width"] == 32 and c.to_fill[0].startswith("load: ")
    (folder / "model.safetensors").touch()
    c = arguments(tmp_path, **FULL | {"model_name_or_path": "llama"})
    assert recipe(c, 1)["model"] == {"use": "llama", "from": "llama"} and "load" not in c.to_fill[0]
    c = arguments(folder, **FULL)
    assert recipe(c, 1)["model"]["width"] == 32 and c.to_fill[0].startswith("load: ")
    c = arguments(tmp_path, **FULL | {"config_name": "llama"})
    assert recipe(c, 1)["model"]["width"] == 32 and not any(each.startswith("load") for each in c.to_fill)


def test_dropout_of_attention_is_named(tmp_path: Path) -> None:
    c, _ = imported(tmp_path, {}, 1, attn_pdrop=0.1)
    assert "Attention weights are not dropped; theirs are: attn_pdrop of config.json." in c.differences


def test_a_name_of_a_hub_is_to_be_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps(FULL | {"model_name_or_path": "meta-llama/Llama-3.2-1B", "block_size": 128}))
    result = import_recipe(file, 2, tmp_path / "mine.yaml")
    assert "there is no such folder" in result.obstacle
    here = (
        "the folder of meta-llama/Llama-3.2-1B, which is not here. llama is by its name; config.json decides"
    )
    assert f"  model.from: {here}" in result.lines()


def test_no_password_is_written(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(
        json.dumps(FULL | {"hub_token": "hf_secret", "wandb_api_key": "secret", "a\u2028model: b": "c\nd"})
    )
    import_recipe(file, 2, tmp_path / "mine.yaml", model=model_folder(tmp_path, "gpt"))
    assert "secret" not in (tmp_path / "mine.yaml").read_text()
    assert read_recipe(tmp_path / "mine.yaml").train.batch == 16


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size: 8: is no number from 1 on"),
        ({"per_device_train_batch_size": 0}, "is no number from 1 on"),
        ({"per_device_train_batch_size": 1.5}, "is no whole number"),
        ({"learning_rate": float("nan")}, "learning_rate: NaN: is no number"),
        ({"learning_rate": [1]}, "is no number from 0 on"),
        ({"learning_rate": 0}, "nothing is learned"),
        ({"max_steps": 1e300}, "max_steps: 1e+300: is no number"),
        ({"max_steps": -5}, "max_steps: -5: is no number from 1 on"),
        ({"num_train_epochs": 0}, "nothing is trained"),
        ({"seed": -1}, "seed: -1: is no number from 0 on"),
        ({"bf16": True, "fp16": True}, "fp16 is true, too"),
        ({"bf16": "yes"}, "is neither true nor false"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "of the schedules, linear, cosine"),
        ({"warmup_ratio": 2}, "is a share of the training, 0 to 1"),
        ({"save_strategy": "sometimes"}, "no, steps or epoch"),
        ({"stage": "dpo"}, "stage: dpo: pt and sft have a recipe"),
        ({"beta": 0.1}, "learning from preferences has no recipe"),
        ({"deepspeed": {"zero_optimization": {"stage": 9}}}, "stage 0 to 3"),
    ],
)  # fmt: skip
def test_bad_input_writes_nothing(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps(FULL | more))
    with pytest.raises(UsageError) as caught:
        import_recipe(file, 2, tmp_path / "mine.yaml", model=model_folder(tmp_path, "gpt"))
    assert said in str(caught.value) and not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("folder", ["my run", 'it\'s "$HOME" `run` 训练\\'])
@pytest.mark.parametrize(
    ("beginning", "module"),
    [(b"PK\x03\x04", "torch"), (b"\x80\x02\x8a\nl\xfc", "torch"), (b"\x80\x04\x95", "paddle")],
)
def test_a_pickle_is_refused_with_the_line_that_writes_it_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], beginning: bytes,
    module: str, folder: str,
) -> None:  # fmt: skip
    """PaddleNLP's was answered by the line for PyTorch's; a quote or a $ in the path broke the line in the shell."""
    (tmp_path / folder).mkdir()
    file = model_folder(tmp_path / folder, "gpt") / "training_args.bin"
    file.write_bytes(beginning + b"rest")
    kind = "a file of torch.save: a pickle" if module == "torch" else "a pickle, as paddle.save writes"
    with pytest.raises(UsageError, match=rf"\.bin is {kind}, .*it is not read") as caught:
        import_recipe(file, 2, tmp_path / "mine.yaml")
    python, _, code, to, written = shlex.split(str(caught.value).partition("import the JSON: ")[2])
    loaded: list[tuple[str, dict[str, bool]]] = []

    def load(path: str, **options: bool) -> Any:
        loaded.append((path, options))
        return SimpleNamespace(to_json_string=lambda: json.dumps(FULL))

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(load=load))
    exec(code, {})
    monkeypatch.undo()
    options = {"weights_only": False} if module == "torch" else {}
    assert (python, to, loaded) == ("python", ">", [(str(file), options)])
    Path(written).write_text(capsys.readouterr().out)
    import_recipe(Path(written), 2, tmp_path / "mine.yaml")  # the model's config.json is next to it


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (json.dumps(FULL), [], "its batch size is for one card. Say for how many it is written"),
        (json.dumps(FULL | {"neftune_noise_alpha": 5}), ["--ranks", "2", "--strict"], "neftune_noise_alpha: noise on"),
        (json.dumps(FULL), ["--ranks", "2", "--model", "nowhere"], "nowhere"),
        ('{"log_history": [{"loss": 1.0}], "max_steps": 4}', ["--ranks", "2"], "training_args.bin next to it has them"),
        ('{"per_device_train_batch_size": 8', ["--ranks", "2"], "is no YAML"),
        ("{}", ["--ranks", "2"], "nor arguments of PaddleNLP, PaddleFormers or Hugging Face's Trainer"),
        ("[" * 700, ["--ranks", "2"], "nested too deep"),
        ("", ["--ranks", "2"], "holds no configuration: its content is a NoneType"),
        ("\0", ["--ranks", "2"], "is no YAML"),
    ],
)  # fmt: skip
def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], said: str
) -> None:
    (tmp_path / "args.json").write_text(text)
    model = [] if "--model" in options else ["--model", str(model_folder(tmp_path, "gpt"))]
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "args.json"), "--out", str(tmp_path / "mine.yaml"), *options, *model])
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.long
@pytest.mark.processes
def test_two_ranks_learn_what_one_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = {
        "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "warmup_steps": 1,
        "deepspeed": {"zero_optimization": {"stage": 2}}, "train_file": str(texts(tmp_path)), "block_size": 16,
    }  # fmt: skip
    arguments(tmp_path, **FULL | more)
    import_recipe(Path("args.json"), 2, Path("mine.yaml"), model=model_folder(tmp_path, "gpt"))
    with pytest.raises(SystemExit) as ended:
        main(["verify", "mine.yaml", "--ranks", "2", "--steps", "2", "dataset.tokenizer=bytes"])
    assert ended.value.code == 0


ACCELERATE = "accelerate launch {} --num_processes 2 run.py --learning_rate 1e-4 --max_steps 9 {}"


@pytest.mark.parametrize(
    ("launcher", "program", "precision", "stage"),
    [
        ("--mixed_precision bf16 --gradient_accumulation_steps 8", "", "bfloat16", None),
        ("--mixed_precision bf16", "--fp16", "float16", None),  # the arguments decide
        ("--mixed_precision no", "", None, None),
        ("--use_deepspeed --zero_stage 2", "", None, 2),
        ("--config_file zero3.yaml", "", {"dtype": "bfloat16", "level": "O2"}, 3),
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD", "", None, 3),
        ("--use_fsdp --fsdp_sharding_strategy 2", "", None, 2),
        ("--config_file fsdp2.yaml", "", None, 2),
    ],
)
def test_settings_of_accelerate(
    tmp_path: Path, launcher: str, program: str, precision: Any, stage: Any
) -> None:
    (tmp_path / "zero3.yaml").write_text(
        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4}\nmixed_precision: bf16\nnum_processes: 8\n"
    )
    (tmp_path / "fsdp2.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n"
    )
    (tmp_path / "run.sh").write_text(ACCELERATE.format(launcher, program))
    c = Configuration.read(tmp_path / "run.sh")
    sections = recipe(c, 2, model_folder(tmp_path, "gpt"))
    assert (
        sections["train"].get("precision") == precision
        and sections["strategy"].get("sharding_stage") == stage
    )
    assert sections["train"]["batch"] == 16 and "micro_batches" not in sections["train"] and c.lost == []
    assert_each_key_once(c)


def test_a_missing_file_of_accelerate_is_lost(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(ACCELERATE.format("--config_file none.yaml --gradient_clipping 0.5", ""))
    c = Configuration.read(tmp_path / "run.sh")
    recipe(c, 2, model_folder(tmp_path, "gpt"))
    assert reasons(c).keys() == {"launcher.config_file", "launcher.gradient_clipping"}


@pytest.mark.parametrize("form", ["{{x: *a{n}, y: *a{n}}}", "[*a{n}, *a{n}]"])
def test_aliases_that_expand_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.yaml").write_text(
        "learning_rate: 1\na0: &a0 [1, 2]\n"
        + "".join(f"a{n + 1}: &a{n + 1} {form.format(n=n)}\n" for n in range(40))
    )
    with pytest.raises(UsageError, match="aliases make more than 100,000 values"):
        Configuration.read(tmp_path / "a.yaml")


def text_of(folder: Path, content: str, name: str = "a.json") -> str:
    """The recipe of a file with this content, as text."""
    (folder / name).write_text(content)
    made = import_recipe(folder / name, 1, folder / "a.yaml", model=model_folder(folder, "gpt"))
    return made.recipe.read_text("utf-8")


def test_letters_of_two_halves_and_half_a_letter_are_written(tmp_path: Path) -> None:
    letters = '"train_file": "\\ud83d\\ude00.txt", "tokenizer_name": "\\ud83d"'
    assert "\U0001f600.txt" in text_of(tmp_path, f'{{"per_device_train_batch_size": 1, {letters}}}')


def test_a_name_of_a_file_writes_no_yaml(tmp_path: Path) -> None:
    text = text_of(tmp_path, '{"per_device_train_batch_size": 1}', "n\nguard: {}\n#.json")
    assert "\nguard" not in text and text.startswith("# n guard: {} #.json of")


def test_no_folder_for_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"per_device_train_batch_size": 1}))
    with pytest.raises(UsageError, match="there is no folder"):
        import_recipe(file, 1, tmp_path / "none/a.yaml", model=model_folder(tmp_path, "gpt"))


def test_sentences_of_refused_and_accepted_values(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="seed: 3000000000: is no number from 0 on, below 2147483648"):
        imported(tmp_path, {"seed": 3000000000}, 1)
    assert imported(tmp_path, {"loss_type": "nll"}, 1)[0].lost == []


@pytest.mark.parametrize(
    ("family", "architecture", "is_read"),
    [
        ("llama", "LlamaForSequenceClassification", False), ("bert", "BertForTokenClassification", False),
        ("llama", "LlamaForCausalLM", True), ("gpt", "GPT2LMHeadModel", True), ("bert", "BertModel", True),
        ("bert", "BertForPreTraining", True), ("gpt", "GPTForPretraining", True), ("gpt", "GPT2RewardModel", False),
    ],
)  # fmt: skip
def test_a_head_of_another_task_is_refused(
    tmp_path: Path, family: str, architecture: str, is_read: bool
) -> None:
    folder, c = model_folder(tmp_path, family, architectures=[architecture]), arguments(tmp_path, **FULL)
    if is_read:
        assert recipe(c, 1, folder)["model"]["use"] == family
    else:
        with pytest.raises(UsageError, match=rf"architectures {architecture}, a head of another task"):
            recipe(c, 1, folder)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"torch_dtype": "auto"}, "torch_dtype"),
        ({"packing": False}, "packing"),
        ({"eval_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}, "greater_is_better"),
        ({"use_peft": True, "lora_dropout": 0.1}, "lora_dropout"),
    ],
)  # fmt: skip
def test_off_is_not_every_default(tmp_path: Path, more: dict[str, Any], key: str) -> None:
    assert reasons(imported(tmp_path, more, 1)[0]).keys() == {key}


def test_the_folder_of_the_file_does_not_replace_the_model_that_it_names(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "gpt")
    c = arguments(folder, **FULL | {"model_name_or_path": "meta-llama/Llama-2-7b"})
    assert recipe(c, 1)["model"] == {"use": "llama", "from": "meta-llama/Llama-2-7b"}
    assert any("next to the file is not read" in each for each in c.differences)
    assert recipe(arguments(folder, **FULL), 1)["model"]["use"] == "gpt"


def test_evaluations_and_the_best(tmp_path: Path) -> None:
    best = {"save_strategy": "best"}
    _, sections = imported(tmp_path, best | {"eval_strategy": "steps", "metric_for_best_model": "loss"}, 4)
    assert sections["evaluation"] == {"batch": 32}
    assert sections["callbacks"][-1] == {"use": "checkpoint", "every": None, "keep": 3, "best": "loss"}
    assert "save_strategy" in reasons(imported(tmp_path, best, 4)[0])


def test_the_assumed_tool_is_named(tmp_path: Path) -> None:
    few = {"per_device_train_batch_size": 2, "learning_rate": 1e-4}
    c = arguments(tmp_path, **few)
    recipe(c, 1, model_folder(tmp_path, "gpt"))
    assert any("No key is of one tool alone" in each for each in c.differences)
    assert paddlenlp.recognizes(arguments(tmp_path, **few, tensor_parallel_degree=2))
    with pytest.raises(
        UsageError, match="fp16_opt_level: O2: PaddleNLP and Hugging Face's Trainer both have"
    ):
        paddlenlp.recognizes(arguments(tmp_path, **few, bf16=True, fp16_opt_level="O2"))
    assert not paddlenlp.recognizes(
        arguments(tmp_path, **few, fp16=True, fp16_opt_level="O1", eval_strategy="no")
    )


FACTORY: dict[str, Any] = {
    "stage": "sft", "finetuning_type": "lora", "dataset": "identity,alpaca_en_demo", "template": "llama3",
    "cutoff_len": 32, "per_device_train_batch_size": 1, "learning_rate": 1e-4, "num_train_epochs": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "adapter"),
    [
        ({}, {"match": ["blocks.1.*", "blocks.2.*"], "rank": 8, "alpha": 16.0}),
        ({"finetuning_type": None, "lora_rank": 4}, {"match": ["blocks.1.*", "blocks.2.*"], "rank": 4, "alpha": 8.0}),
        ({"lora_target": "q_proj,down_proj", "lora_alpha": 5}, {"match": ["*.q", "*.down"], "rank": 8, "alpha": 5.0}),
        ({"finetuning_type": "full"}, None),
    ],
)  # fmt: skip
def test_a_fine_tuning_of_llama_factory(tmp_path: Path, more: dict[str, Any], adapter: Any) -> None:
    values = {key: value for key, value in (FACTORY | more).items() if value is not None}
    c = arguments(tmp_path, **values)
    made = recipe(c, 2, model_folder(tmp_path, "llama"))
    assert made.get("adapter") == (adapter and {"use": "lora", **adapter})
    assert made["dataset"] == {
        "use": "chat", "path": "path/of/the/texts", "tokenizer": f"{tmp_path}/llama/tokenizer.json", "length": 32,
        "packing": False, "held_out": 0.0,
    }  # fmt: skip
    assert made["loss"]["ignore_index"] == -100 and reasons(c).keys() == {"template"}
    assert any("theirs are identity,alpaca_en_demo of dataset_info.json" in each for each in c.to_fill)
    assert_each_key_once(c)


@pytest.mark.parametrize("left", ["finetuning_type", "template", "cutoff_len", "lora_target"])
def test_without_a_stage_llama_factory_learns_answers_alone(tmp_path: Path, left: str) -> None:
    """One of its own keys is enough to know it, and its default of `stage`."""
    values = {"finetuning_type": "lora", "template": "llama3", "cutoff_len": 32, "lora_target": "all"}
    common = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "dataset": "identity"}
    c = arguments(tmp_path, **common, **{left: values[left]})
    made = recipe(c, 2, model_folder(tmp_path, "llama"))
    assert made["dataset"]["use"] == "chat" and made["loss"]["ignore_index"] == -100 and "adapter" in made
    assert any("LLaMA-Factory's default: stage is not there" in each for each in c.differences)
    assert_each_key_once(c)
    assert not paddlenlp.recognizes(arguments(tmp_path, stage="sft", template="x", lora_target="all"))
    pretraining = recipe(
        arguments(tmp_path, **common, stage="pt", template="x"), 2, model_folder(tmp_path, "llama")
    )
    assert pretraining["dataset"]["use"] == "text_files"


@pytest.mark.parametrize(
    ("more", "match", "lost"),
    [
        ({}, ["*.q", "*.v"], set()),
        ({"lora_target_modules": "all-linear", "lora_dropout": 0.0}, ["blocks.1.*", "blocks.2.*"], set()),
        ({"lora_target_modules": ["k_proj", "lm_head"]}, ["*.k"], {"lora_target_modules"}),
        ({"lora_target_modules": ["q_proj", "o_proj"]}, ["*.q", "blocks.1.out", "blocks.2.out"], set()),
        ({"lora_target_modules": ["c_attn"]}, ["blocks.1.*", "blocks.2.*"], {"lora_target_modules"}),
        ({"use_dora": True}, ["*.q", "*.v"], {"use_dora"}),
    ],
)
def test_lora_of_trl(tmp_path: Path, more: dict[str, Any], match: list[str], lost: set[str]) -> None:
    c, made = imported(tmp_path, {"use_peft": True, **more}, family="llama")
    assert (
        made["adapter"] == {"use": "lora", "match": match, "rank": 16, "alpha": 32.0}
        and reasons(c).keys() == lost
    )
    assert any("TRL's lora_dropout is 0.05" in each for each in c.differences) == ("lora_dropout" not in more)
    c, made = imported(tmp_path, {"lora_r": 8}, family="llama")
    assert "adapter" not in made and c.lost == []


@pytest.mark.parametrize(
    ("more", "rate"),
    [
        ({}, 5e-5),
        ({"finetuning_type": "full"}, 5e-5),
        ({"use_peft": True}, 2e-5),
        ({"completion_only_loss": True, "learning_rate": None}, 2e-5),
        ({"use_peft": True, "learning_rate": 1e-4}, 1e-4),
    ],
)
def test_the_default_rate_is_that_of_their_tool(tmp_path: Path, more: dict[str, Any], rate: float) -> None:
    c = arguments(tmp_path, output_dir="out", per_device_train_batch_size=8, **more)
    assert recipe(c, 1, model_folder(tmp_path, "llama"))["schedule"]["learning_rate"] == rate
    assert any(each.startswith("2e-05 is SFTConfig") for each in c.differences) == (rate == 2e-5)


def test_kinds_of_fine_tuning_and_sizes_of_test_sets_that_are_not_here(tmp_path: Path) -> None:
    c = arguments(tmp_path, **FACTORY | {"finetuning_type": "freeze", "val_size": 100, "packing": True})
    made = recipe(c, 2, model_folder(tmp_path, "llama"))
    assert "adapter" not in made and reasons(c).keys() == {"template", "finetuning_type", "val_size"}
    assert made["dataset"]["packing"] and made["dataset"]["held_out"] == 0.05
    tenth = arguments(tmp_path, **FACTORY | {"val_size": 0.1})
    assert recipe(tenth, 2, model_folder(tmp_path, "llama"))["dataset"]["held_out"] == 0.1
