"""The arguments that the trainers of Hugging Face, PaddleNLP and PaddleFormers have in common, as a recipe's
sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section
from paddle_dp.errors import near
from paddle_dp.part import find, names
from paddle_dp.part.aliases import find_hint
from paddle_dp.part.config import fields_of

_IDLE: tuple[Any, ...] = (None, False, "", "no", "none", "None", "null", "auto", [], 0)
# Keys whose default is not off: a switched-off one changes the training. So does a dtype that is "auto".
_ON = {
    "dataloader_shuffle", "random_shuffle", "packing", "encode_one_turn", "use_template", "layerwise_lr_decay_bound",
    "lora_plus_scale", "train_dataset_prob", "torch_dtype", "dtype", "truncate_packing",
}  # fmt: skip
HUGGING_FACE_ALONE = {
    "gradient_checkpointing", "eval_strategy", "finetuning_type", "cutoff_len", "torch_dtype", "deepspeed", "fsdp",
    "lora_target",
}  # fmt: skip
_MOST = 2**31  # above every number of steps, and every seed, that is meant


@dataclass(frozen=True)
class TrainingLength:
    """The length of a training: a number of steps, or of epochs."""

    count: float
    unit: str

    def __str__(self) -> str:
        return quantity(self.count, self.unit)

    def share(self, ratio: float, rounding: Any = math.ceil) -> str:
        """A share of it, such as a warm-up; `rounding` rounds steps."""
        count = self.count * ratio
        return quantity(rounding(count) if self.unit == "steps" else count, self.unit)


def quantity(count: float, unit: str) -> str:
    """ "3 epochs", "1 step", "0.3 epochs"."""
    shown = int(count) if count == int(count) else round(count, 9)
    return f"{shown} {unit[:-1] if shown == 1 else unit}"


def number(c: Configuration, key: str, default: float, least: float = 0.0) -> float:
    """A number of the file, or the other tool's default. Raises UsageError for anything else."""
    value = c.take(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < _MOST:  # NaN is neither
        hint = ": the file does not say what the variable is" if "$" in str(value) else ""
        hint = f", below {_MOST}" if is_number and value >= _MOST else hint
        c.reject(key, f"is no number from {least:g} on{hint}")
    return float(value)


def count(c: Configuration, key: str, default: int, least: int = 1) -> int:
    """A whole number, likewise."""
    value = number(c, key, default, least)
    if value != int(value):
        c.reject(key, "is no whole number")
    return int(value)


def switch(c: Configuration, key: str, default: bool = False) -> bool:
    """True or false; 0 and 1 count as these."""
    value = c.take(key, default)
    if isinstance(value, str) or value not in (0, 1):
        c.reject(key, "is neither true nor false")
    return bool(value)


def choice(value: Any) -> str:
    """A word of an enumeration, such as "steps" for "IntervalStrategy.STEPS". YAML reads `no` as false."""
    return "no" if value in (None, False) else str(value).rpartition(".")[2].lower()


def length_of(c: Configuration, epochs: float) -> TrainingLength:
    """max_steps, or num_train_epochs, by default `epochs`."""
    if (c.values.get("max_steps") or -1) != -1:
        c.without_counterpart("num_train_epochs", "max_steps decides")
        return TrainingLength(count(c, "max_steps", 1), "steps")
    c.take("max_steps")
    length = number(c, "num_train_epochs", epochs)
    if length == 0:
        c.reject("num_train_epochs", "nothing is trained")
    return TrainingLength(length, "epochs")


def batch_section(
    c: Configuration, length: TrainingLength, readers: int, key: str = "per_device_train_batch_size"
) -> Section:
    """`train`: the batch of one device × `readers`, the data-parallel ranks, × accumulation steps."""
    micro_batches = count(c, "gradient_accumulation_steps", 1)
    batch = count(c, key, 8) * readers * micro_batches
    section: Section = {"length": str(length), "batch": batch}
    if micro_batches > 1:
        section["micro_batches"] = micro_batches
    section["seed"] = count(c, "seed", 42, 0)
    if (seed := c.values.get("data_seed")) in (None, section["seed"]):
        c.take("data_seed")
    else:
        c.lose_key("data_seed", f"train.seed gives weights, order and masks: {seed} is not used")
    if switch(c, "dataloader_drop_last"):
        section["drop_last"] = True
    return section


def evaluation_section(c: Configuration, readers: int, limits: Mapping[str, int]) -> Section:
    """The batch of evaluations on all `readers`, and the number of samples; `limits` are keys of numbers of such
    batches, with their defaults, -1 for all."""
    section: Section = {"batch": count(c, "per_device_eval_batch_size", 8) * readers}
    for key, default in limits.items():
        if (c.values.get(key) or default) != -1:
            section["samples"] = count(c, key, default) * section["batch"]
    return section


def loader_section(c: Configuration) -> Section:
    section: Section = {"num_workers": count(c, "dataloader_num_workers", 0, 0)}
    if c.values.get("dataloader_prefetch_factor"):
        section["prefetch"] = count(c, "dataloader_prefetch_factor", 2)
    return section


def optimizer_section(c: Configuration, uses: Mapping[str, str]) -> Section:
    """`uses`: their names of an optimizer → ours with the same settings. Others are lost, for AdamW: an optimizer of
    the same name may have other defaults."""
    kind = choice(c.take("optim", "adamw"))
    use = uses.get(kind, "adamw")
    if kind not in uses:
        c.lose_key("optim", "adamw is taken")
    takes = fields_of(find("optimizers", use))
    section: Section = {"use": use}
    if use == "adafactor":
        section["relative"] = False  # scale_parameter and relative_step are False in theirs
    for ours, (key, default) in {
        "beta1": ("adam_beta1", 0.9), "beta2": ("adam_beta2", 0.999), "epsilon": ("adam_epsilon", 1e-8),
    }.items():  # fmt: skip
        if ours in takes:
            section[ours] = number(c, key, default)
        else:
            c.without_counterpart(key, f"{use} has none")
    section["weight_decay"] = number(c, "weight_decay", 0.0)
    if clip := number(c, "max_grad_norm", 1.0):
        section["clip"] = clip
    return section


def warmup_of(c: Configuration, length: TrainingLength, rounding: Any = math.ceil) -> str | None:
    """The length of the warm-up: warmup_steps if there are any, else the share warmup_ratio."""
    steps = number(c, "warmup_steps", 0)
    ratio = c.values.get("warmup_ratio")
    if steps >= 1:
        c.without_counterpart("warmup_ratio", "warmup_steps decides")
        return quantity(int(steps), "steps")
    ratio = steps or number(c, "warmup_ratio", 0)  # warmup_steps below 1 is a share, too
    if ratio > 1:
        c.reject("warmup_ratio", "is a share of the training, 0 to 1")
    return length.share(ratio, rounding) if ratio and length.share(ratio, rounding)[:2] != "0 " else None


_LATER = "The warm-up begins one step earlier: their first update has rate 0."


def schedule_section(
    c: Configuration,
    length: TrainingLength,
    floor: float = 0.0,
    rounding: Any = math.ceil,
    shift: str = _LATER,
    has_sft_config: bool = False,
) -> Section:
    """`floor`: the last rate, unless lr_scheduler_kwargs has it. `rounding` is of a warm-up's share of the steps.
    `shift`: how their rates differ, with a warm-up. `has_sft_config`: theirs is an SFTConfig, with its default."""
    kind = choice(c.take("lr_scheduler_type", "linear"))
    peak = number(c, "learning_rate", 2e-5 if has_sft_config else 5e-5)
    if peak == 0:
        c.reject("learning_rate", "nothing is learned")
    if has_sft_config and c.values.get("learning_rate") is None:
        c.differ(f"{peak:g} is SFTConfig's default: learning_rate is not there.")
    extra = {key.rpartition(".")[2]: key for key in c.values if key.startswith("lr_scheduler_kwargs.")}
    shapes = {
        "linear": "polynomial", "cosine": "cosine", "polynomial": "polynomial", "constant": "constant",
        "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
    }  # fmt: skip
    if kind not in shapes:
        c.reject("lr_scheduler_type", f"of the schedules, {', '.join(shapes)} have a recipe")
    section: Section = {"use": shapes[kind], "learning_rate": peak}
    if kind == "polynomial":
        floor = number(c, extra.get("lr_end", "lr_end"), 1e-7)
        if (power := number(c, extra.get("power", "power"), 1.0)) != 1:
            section["power"] = power
    elif kind == "cosine_with_min_lr":
        share = number(c, extra["min_lr_rate"], 0) if "min_lr_rate" in extra else 0.0
        floor = number(c, extra["min_lr"], 0) if "min_lr" in extra else share * peak
    if kind.startswith("cosine") and c.values.get(extra.get("num_cycles", "num_cycles")) == 0.5:
        c.take(extra.get("num_cycles", "num_cycles"))
    if floor and section["use"] != "constant":
        section |= _last_rate(c, kind, floor, peak)
    warmup = warmup_of(c, length, rounding)
    if warmup and kind != "constant":  # theirs passes over it then
        section["warmup"] = warmup
        c.differ(shift)
    return section


def _last_rate(c: Configuration, kind: str, floor: float, peak: float) -> Section:
    """The last rate as a share of the peak; a rate that does not fall is constant. Theirs refuses such a polynomial."""
    if floor == peak and kind != "polynomial":
        return {"use": "constant"}
    if floor >= peak:
        c.reject("learning_rate", f"the last rate, {floor:g}, has to be below it")
    return {"floor": round(floor / peak, 12)}


def callbacks_section(c: Configuration, length: TrainingLength, evaluates: bool) -> list[Section]:
    """`evaluates`: whether the arguments ask for evaluations."""
    lines = _every(c, "logging", length) or "500 steps"
    callbacks: list[Section] = [{"use": "console", "every": lines}, {"use": "metrics", "every": lines}]
    callbacks += [{"use": use} for use in _reports(c)]
    if evaluates:
        callbacks.append({"use": "evaluate", "every": _every(c, "eval", length) or lines})
    keeps_best = choice(c.values.get("save_strategy")) == "best"
    save: Section = {"use": "checkpoint", "every": _every(c, "save", length)}
    has_limit = bool(c.values.get("save_total_limit"))  # 0 is none
    save["keep"] = count(c, "save_total_limit", 3) if has_limit else 3
    if not has_limit:
        c.take("save_total_limit")
        c.differ("The newest 3 checkpoints are kept; theirs keeps all: callbacks.checkpoint.keep.")
    key = "save_strategy" if keeps_best else ""
    if switch(c, "load_best_model_at_end"):
        key = "load_best_model_at_end"
    if key and evaluates:
        save["best"] = _best(c)
    elif key:
        c.lose_key(key, "nothing is evaluated")
    c.without_counterpart("metric_for_best_model", "the best is kept with load_best_model_at_end alone")
    return [*callbacks, save]


def _best(c: Configuration) -> str:
    metric = str(c.take("metric_for_best_model", "loss")).removeprefix("eval_")
    numbers = {"loss": "loss", "accuracy": "acc1"}
    if metric not in numbers:
        c.lose_key("metric_for_best_model", "checkpoint.best is the loss: further scores are in metrics")
    ours = numbers.get(metric, "loss")
    if c.values.get("greater_is_better") in (None, ours != "loss"):
        c.take("greater_is_better")
    else:
        c.lose_key("greater_is_better", "the best has the lowest loss, or the highest accuracy")
    return ours


def _every(c: Configuration, noun: str, length: TrainingLength) -> str | None:
    """The interval of logging, evaluations or checkpoints, or None."""
    strategy = "eval_strategy" if noun == "eval" else f"{noun}_strategy"
    if noun == "eval" and "evaluation_strategy" in c.values:
        strategy = "evaluation_strategy"
    kind, key = choice(c.take(strategy, "steps")), f"{noun}_steps"
    if kind == "best":
        c.without_counterpart(key, "checkpoints are of the best")
        return None
    if kind in ("epoch", "no"):
        c.without_counterpart(key, f"{strategy} is {kind}")
        return "1 epoch" if kind == "epoch" else None
    if kind != "steps":
        c.reject(strategy, "no, steps or epoch")
    default = {"logging": 500, "save": 500, "eval": c.values.get("logging_steps") or 500}[noun]
    steps = number(c, key, default)
    if steps >= 1:
        return quantity(int(steps), "steps")
    if length.unit == "epochs" and steps:
        c.lose_key(key, "a share of the training, whose steps are not known: every epoch")
        return "1 epoch"
    return length.share(steps) if steps else None


def _reports(c: Configuration) -> list[str]:
    """The callbacks for the trackers of report_to; metrics.jsonl has the numbers for all others."""
    report_to = c.values.get("report_to")
    trackers = [choice(each) for each in (report_to if isinstance(report_to, list) else [report_to])]
    uses = {"visualdl": "dashboard", "all": "dashboard"}
    ours = [uses.get(each, each) for each in trackers]
    known = [each for each in dict.fromkeys(ours) if each in names("callbacks")]
    if known and len(known) == len({*ours}):
        c.take("report_to")
    return known


def reject_tasks(c: Configuration, tasks: Mapping[str, str]) -> None:
    """Raises UsageError for a key of a task that is no training on texts: `tasks` is key → task."""
    for key, task in tasks.items():
        if c.values.get(key) not in (None, False, 0, "", "nll"):  # the loss_type of language models
            c.reject(key, f"{task} has no recipe")
    if str(c.values.get("stage") or "pt").lower() not in ("pt", "sft"):
        c.reject("stage", "pt and sft have a recipe")


def settle(c: Configuration, unused: str, lost: str, known: Iterable[str], tool: str) -> None:
    """Gives each remaining key its reason. A row of `unused` is `keys | reason`, of `lost` `keys | values that change
    nothing | reason`; `known` are further arguments of the tool."""
    reasons = {key: reason for keys, reason in _rows(unused) for key in keys.split()}
    losses = {
        key: ({_plain(value) for value in values.split()}, reason)
        for keys, values, reason in _rows(lost)
        for key in keys.split()
    }
    every = {*known, *reasons, *losses}
    resting = []
    for key in c.remaining():
        value, levels = c.values[key], key.split(".")
        # The key, and the groups of settings that it is in.
        groups = [".".join(levels[:number]) for number in range(len(levels), 0, -1)]
        group = next((group for group in groups if group in every), "")
        row = losses.get(group)
        is_idle = value is None or (value in _IDLE and key not in _ON)
        if group and (is_idle or (row and _plain(value) in row[0])):
            resting.append(key)
        elif row:
            c.lose_key(key, row[1])
        elif group in reasons:
            c.without_counterpart(key, reasons[group])
        else:
            c.lose_key(key, _unknown(key, every, tool))
    c.at_rest(resting, "at their defaults, or switched off there, too")


def _unknown(key: str, known: set[str], tool: str) -> str:
    """The reason for a key that is in no table, with a guess at the intended key."""
    if key not in known:
        close = near(key, known)
        row = find_hint(key, exactly=True)
        hint = f": did you mean {close}?" if close else f":{row.sentence}".rstrip(".") if row else ""
        return f"no argument of {tool} that is known here{hint}"
    return "has no counterpart"


def _rows(table: str) -> Iterable[list[str]]:
    return ([cell.strip() for cell in row.split("|")] for row in table.strip().splitlines())


def _plain(value: Any) -> str:
    return str(value).lower()
