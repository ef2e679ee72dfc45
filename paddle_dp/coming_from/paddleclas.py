"""Training configurations of PaddleClas (release 2.6) as recipes.

The keys' meanings are from its sources: `ppcls/optimizer`, `ppcls/data`, `ppcls/loss`, `ppcls/engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section
from paddle_dp.coming_from.paddleclas_images import MULTIPLE, OPS, TRAIN, dataset_section, mix_section

# Architectures that paddle.vision.models has under the same name with as many parameters, by their name there.
VISION = {
    "ResNet50": "resnet50", "ResNeXt50_32x4d": "resnext50_32x4d", "DenseNet121": "densenet121", "AlexNet": "alexnet",
    "SqueezeNet1_1": "squeezenet1_1", "InceptionV3": "inception_v3",
}  # fmt: skip
_EVALUATION = "every held-out sample counts once, on any number of ranks"
_UNUSED = (
    ("Infer*", "of prediction: paddle-dp predict"),
    ("Global.save_inference_dir", "paddle-dp export names its folder"),
    ("Global.image_shape", "the size is dataset.size"),
    ("Global.image_channel", "images have three channels"),
    ("Global.device", "train.device is auto"),
    ("Global.output_dir", "the run's folder is runs/NAME, or --output-dir"),
    ("Global.use_multilabel", "the data set decides"),
    ("Global.use_dali", "images are read by loader.num_workers"),
    ("Global.eval_mode", "the loss decides the scores"),
    ("Global.start_eval_epoch", "evaluations begin with the first epoch"),
    ("Global.train_mode", "the loss decides"),
    ("Global.checkpoints", "paddle-dp train RECIPE --resume"),
    ("*.use_shared_memory", "workers always share memory"),
    ("DataLoader.Eval.sampler.*", _EVALUATION),
    ("DataLoader.Eval.loader.*", _EVALUATION),
    ("DataLoader.Eval.dataset.*", "held-out images are read as the training's"),
    ("DataLoader.Train.sampler.name", "ranks share each global batch"),
    ("Metric*", "a classifier's scores are acc1 and acc5"),
    ("Loss.Eval*", "evaluations use the loss of the training"),
    ("Arch.infer*", "of prediction"),
    ("Arch.use_sync_bn", "strategy.sync_batch_norm is true by default"),
    ("AMP.use_dynamic_loss_scaling", "the scale always adapts"),
    ("Optimizer.clip_grad", "PaddleClas does not read it"),
    ("Optimizer.lr.by_epoch", "the rate changes after each update"),
    ("AMP*", "train.precision decides"),
    ("Optimizer.multi_precision", "weights of 16 bits always have float32 masters"),
    ("Optimizer.lr.verbose", "the console prints the rate"),
    ("Optimizer.lr.last_epoch", "a resume continues the schedule by itself"),
    (f"{OPS}.*.backend", "images are read with Pillow"),
    (f"{OPS}.*.use_log_aspect", "the logarithm of the ratio is uniform"),
    (f"{OPS}.*.img_size", "the size of the image itself"),
    (f"{OPS}.TimmAutoAugment.mean", "an area that moves in is black"),
    (f"{OPS}.DecodeImage*", "images are RGB, channels first"),
    (f"{OPS}.ToCHWImage*", "images are channels first"),
)  # fmt: skip

_SAMPLERS = ("DistributedBatchSampler", "BatchSampler")
_SWITCHES = ("Arch.", "Global.", "Slim", f"{OPS}.RandomErasing.", f"{OPS}.TimmAutoAugment.")
Used = Callable[[Configuration], bool]
_LOST: tuple[tuple[str, Used, str], ...] = (
    ("Arch.pretrained*", lambda c: bool(c.values.get("Arch.pretrained")),
     "weights are not downloaded: give their file as load: {path: …}"),
    ("Optimizer.clip_norm", lambda c: True,
     "theirs clips each parameter by its own norm; optimizer.clip takes the norm of all"),
    ("Optimizer.lr.by_epoch", lambda c: c.values.get("Optimizer.lr.by_epoch") is True,
     "the rate changes after each update"),
    ("DataLoader.Train.sampler.shuffle", lambda c: True, "training samples are always shuffled"),
    ("DataLoader.Train.sampler.*",
     lambda c: c.values.get("DataLoader.Train.sampler.name", "BatchSampler") not in _SAMPLERS,
     "ranks share each global batch, and samples have one size"),
    (f"{OPS}.RandomErasing.*", lambda c: bool(c.values.get(f"{OPS}.RandomErasing.EPSILON")),
     "a rectangle of 2 to 33 % of the area gets the mean's colour"),
    ("DataLoader.Eval.dataset.transform_ops.CropImage.size", lambda c: True, "images are square here"),
    ("DataLoader.Eval.dataset.transform_ops.ResizeImage.size", lambda c: True,
     "held-out images keep their proportions, and are cropped in the centre"),
)  # fmt: skip


NAME = "PaddleClas"


def recognizes(c: Configuration) -> bool:
    """True for a file with an architecture."""
    return c.has("Arch")


def recipe(configuration: Configuration, ranks: int, folder: Path | None = None) -> Section:
    """The recipe of a configuration that is meant for `ranks` cards. Raises UsageError for a training that no recipe
    expresses, and for a `folder` of a model, which it does not need."""
    if folder is not None:
        configuration.reject("--model", "a model of PaddleClas is named by Arch")
    c = configuration
    if not c.has("Arch") or not c.has("DataLoader.Train"):
        c.reject("Arch and DataLoader.Train", "missing, so this is no training of PaddleClas")
    epochs = c.take("Global.epochs", 120)
    sections: Section = {
        "model": _model(c), "dataset": dataset_section(c), "loss": _loss(c), "optimizer": _optimizer(c),
        "schedule": _schedule(c, epochs), "strategy": {"use": "data_parallel"}, "train": _train(c, epochs, ranks),
        "loader": {"num_workers": c.take("DataLoader.Train.loader.num_workers", 0)},
    }  # fmt: skip
    if sections["loss"].get("over_labels") == "sum" and sections["loss"]["use"] == "asymmetric":
        batch = _card_batch(c)
        sections["optimizer"]["epsilon"] = sections["optimizer"].get("epsilon", 1e-8) / batch
        c.differ(
            f"The loss is the mean over samples; theirs adds up a card's {batch}. With epsilon / {batch} AdamW's steps "
            "are the same."
        )
    has_labels = "labels" in sections["dataset"]
    if not has_labels and (mix := mix_section(c)):
        sections["mix"] = mix
    if c.has("EMA"):
        sections["ema"] = {"decay": c.take("EMA.decay", 0.9999)}
        c.take("EMA")
    if weights := c.take("Global.pretrained_model"):
        sections["load"] = {"path": weights if weights.endswith(".pdparams") else f"{weights}.pdparams"}
    if has_labels:
        sections["metrics"] = [{"use": "average_precision"}]
        c.without_counterpart("Metric*", "scores are acc1, the share of right labels, and average_precision")
    elif further := _further_k(c):
        sections["metrics"] = [{"use": "top_k", "k": further}]
    sections["callbacks"] = _callbacks(c, "average_precision" if has_labels else "acc1")
    _notes(c)
    return sections


def _model(c: Configuration) -> Section:
    name = c.take("Arch.name")
    if not isinstance(name, str):
        c.reject("Arch.name", "missing, so the model is not known")
    if name in ("RecModel", "DistillationModel", "AttentionModel"):
        c.reject("Arch.name", "models that are put together there (recognition, distillation) have no recipe")
    classes = c.take("Arch.class_num")
    sized = {} if classes is None else {"class_num": classes}
    settings = {
        key.removeprefix("Arch."): c.take(key) for key in list(c.values) if _is_setting(key, c.values[key])
    }
    if c.take("Arch.use_ml_decoder"):
        arch = {"name": name, **sized, **settings}
        keys = [key for key in c.values if key.startswith("MLDecoder.")]
        decoder = {key.removeprefix("MLDecoder."): c.take(key) for key in keys}
        config = {"Arch": {**arch, "use_ml_decoder": True}, "MLDecoder": decoder}
        return {"use": "ppcls.arch.build_model", "config": config}
    if name in VISION and not settings:
        c.differ(
            f"Initial weights are drawn as in paddle.vision; theirs: model.use=ppcls.arch.backbone.{name}."
        )
        return {
            "use": f"paddle.vision.models.{VISION[name]}", **({"num_classes": classes} if sized else {}),
        }  # fmt: skip
    return {"use": f"ppcls.arch.backbone.{name}", **sized, **settings}


def _is_setting(key: str, value: Any) -> bool:
    """True for a further argument of the architecture's function."""
    outer = ("name", "class_num", "pretrained", "use_sync_bn", "use_ssld", "use_ml_decoder")
    simple = key.startswith("Arch.") and key.count(".") == 1 and value is not None
    return simple and key.removeprefix("Arch.") not in outer and not key.startswith("Arch.infer")


def _loss(c: Configuration) -> Section:
    kinds = {key.split(".")[2] for key in c.values if key.startswith("Loss.Train.")}
    if c.values.get(f"{TRAIN}.name") == MULTIPLE:
        return _loss_of_labels(c, kinds)
    if kinds != {"CELoss"}:
        names = "CELoss, MultiLabelLoss or MultiLabelAsymmetricLoss"
        c.reject("Loss.Train", f"{', '.join(sorted(kinds)) or 'no loss'}: only {names} alone has a recipe")
    c.take("Loss.Train.CELoss")
    c.take_if("Loss.Train.CELoss.weight", 1)
    section: Section = {"use": "cross_entropy"}
    if 0 < (smoothing := c.take("Loss.Train.CELoss.epsilon", 0)) < 1:  # theirs is off otherwise
        section["label_smoothing"] = smoothing
    return section


def _loss_of_labels(c: Configuration, kinds: set[str]) -> Section:
    if kinds == {"MultiLabelAsymmetricLoss"}:
        return _asymmetric(c, "Loss.Train.MultiLabelAsymmetricLoss")
    loss = "Loss.Train.MultiLabelLoss"
    if kinds != {"MultiLabelLoss"}:
        kind = ", ".join(sorted(kinds)) or "no loss"
        c.reject(
            "Loss.Train",
            f"{kind}: of lists with several labels MultiLabelLoss or MultiLabelAsymmetricLoss alone has a recipe",
        )
    c.take(loss)
    c.take_if(f"{loss}.weight", 1)
    section: Section = {"use": "binary_cross_entropy"}
    if c.take(f"{loss}.weight_ratio") and (file := c.values.get(f"{TRAIN}.cls_label_path")):
        c.take(f"{TRAIN}.label_ratio")
        section["frequencies"] = file
    c.without_counterpart("DataLoader.*.label_ratio", "of weight_ratio, by the list of the training")
    if not 0 < (c.values.get(f"{loss}.epsilon") or 0) < 1:  # theirs is off otherwise
        c.take(f"{loss}.epsilon")
    return section | ({"over_labels": "sum"} if c.take(f"{loss}.size_sum") else {})


def _asymmetric(c: Configuration, loss: str) -> Section:
    """Theirs adds up the losses of a card's batch, by default; AdamW's steps are the same with a smaller epsilon."""
    c.take(loss)
    c.take_if(f"{loss}.weight", 1)
    c.take_if(f"{loss}.epsilon", 1e-8)  # below this probability theirs has no gradient
    section: Section = {
        "use": "asymmetric", "gamma_positive": float(c.take(f"{loss}.gamma_pos", 1)),
        "gamma_negative": float(c.take(f"{loss}.gamma_neg", 4)), "margin": float(c.take(f"{loss}.clip", 0.05)),
    }  # fmt: skip
    if not c.take(f"{loss}.disable_focal_loss_grad", True):
        section["through_focus"] = True
    reduction = c.take(f"{loss}.reduction", "sum")
    if reduction not in ("sum", "mean") or (reduction == "sum" and c.values.get("Optimizer.name") != "AdamW"):
        c.reject(
            f"{loss}.reduction",
            "mean has a recipe, and sum with AdamW, whose steps do not depend on the size",
        )
    return section | ({"over_labels": "sum"} if reduction == "sum" else {})


def _optimizer(c: Configuration) -> Section:
    kind = c.take("Optimizer.name")
    decay = c.take("Optimizer.weight_decay", 0.0)
    if c.has("Optimizer.regularizer.name"):
        if c.take("Optimizer.regularizer.name") != "L2":
            c.reject("Optimizer.regularizer.name", "only L2 has a recipe")
        decay = c.take("Optimizer.regularizer.coeff", 0.0)
    rates = _present(c, "beta1", "beta2", "epsilon")
    if kind in ("Momentum", "SGD", "AdamW"):
        section: Section = {"use": kind.lower(), **rates}
        if kind == "Momentum":
            section["momentum"] = c.take("Optimizer.momentum", 0.9)
            if c.take("Optimizer.use_nesterov"):
                section["nesterov"] = True
        section["weight_decay"] = decay
        names = c.take("Optimizer.no_weight_decay_name")
        # Their Momentum looks at one-dimensional parameters only where there are names.
        if not c.take("Optimizer.one_dim_param_no_weight_decay") or (kind == "Momentum" and not names):
            section["decay_all"] = True
        if names:
            section["groups"] = [{"match": f"*{name}*", "weight_decay": 0} for name in names.split()]
        return section
    if kind in ("Adam", "RMSProp"):
        return {
            "use": f"paddle.optimizer.{kind}", **rates, **_present(c, "momentum", "rho"), "weight_decay": decay,
        }  # fmt: skip
    return c.reject(
        "Optimizer.name" if kind else "Optimizer", "one Momentum, SGD, Adam, AdamW or RMSProp has a recipe"
    )


def _present(c: Configuration, *names: str) -> Section:
    """The optimizer's settings of these names, as far as they are there."""
    return {name: c.take(f"Optimizer.{name}") for name in names if c.has(f"Optimizer.{name}")}


def _schedule(c: Configuration, epochs: int) -> Section:
    kind = c.take("Optimizer.lr.name", "Constant")
    peak, warmup = c.take("Optimizer.lr.learning_rate"), c.take("Optimizer.lr.warmup_epoch", 0)
    shapes = {"Cosine": "cosine", "Linear": "polynomial", "Constant": "constant", "ConstLR": "constant"}
    falls = {"Piecewise": _piecewise, "MultiStepDecay": _milestones, "Step": _steps}
    if kind in falls:
        peak, milestones, factor = falls[kind](c, peak, epochs)
        later = [each + warmup for each in milestones if each + warmup < epochs]
        section: Section = {"use": "milestones", "learning_rate": peak}
        if later:
            section |= {"milestones": [f"{each} epochs" for each in later], "factor": factor}
        else:
            section["use"] = "constant"
    elif kind in shapes:
        section = {"use": shapes[kind], "learning_rate": peak}
        floor = c.take("Optimizer.lr.eta_min" if kind == "Cosine" else "Optimizer.lr.end_lr", 0)
        if floor:
            section["floor"] = round(floor / peak, 12)
        if kind == "Linear" and (power := c.take("Optimizer.lr.power", 1.0)) != 1:
            section["power"] = power
    else:
        c.reject(
            "Optimizer.lr.name", "Cosine, Linear, Piecewise, MultiStepDecay, Step and ConstLR have a recipe"
        )
    start = c.take("Optimizer.lr.warmup_start_lr", 0)
    if warmup:
        section["warmup"] = f"{warmup} epochs"
        c.differ(f"The warm-up begins one step earlier: their first update has rate {start}.")
        if start:
            section["warmup_from"] = round(start / section["learning_rate"], 12)
    return section


def _piecewise(c: Configuration, rate: Any, epochs: int) -> tuple[float, list[float], float]:
    """A learning rate replaces the values: a tenth after each 30 epochs."""
    milestones, values = c.take("Optimizer.lr.decay_epochs", []), c.take("Optimizer.lr.values", [])
    if rate:
        return rate, list(range(30, epochs, 30)), 0.1
    factors = [after / before for before, after in pairwise(values)]
    if len(values) != len(milestones) + 1 or max(factors) - min(factors) > 1e-9:
        c.reject("Optimizer.lr.values", "each has to be the same share of the one before")
    return values[0], milestones, round(factors[0], 12)


def _milestones(c: Configuration, rate: Any, epochs: int) -> tuple[float, list[float], float]:
    return rate, c.take("Optimizer.lr.milestones", []), c.take("Optimizer.lr.gamma", 0.1)


def _steps(c: Configuration, rate: Any, epochs: int) -> tuple[float, list[float], float]:
    size = c.take("Optimizer.lr.step_size", 30)
    milestones = [size * number for number in range(1, 1 + int(epochs / size))]
    return rate, milestones, c.take("Optimizer.lr.gamma", 0.1)


def _card_batch(c: Configuration) -> int:
    """The samples of a card in each of its forwards."""
    return int(c.take("DataLoader.Train.sampler.batch_size", c.take("DataLoader.Train.sampler.first_bs", 64)))


def _train(c: Configuration, epochs: int, ranks: int) -> Section:
    batch = _card_batch(c)
    together = c.take("Global.update_freq", 1)
    section: Section = {"length": f"{epochs} epochs", "batch": batch * ranks * together}
    if together > 1:
        section["micro_batches"] = together
    section["seed"] = c.take("Global.seed", 0)
    if c.take("DataLoader.Train.sampler.drop_last"):
        section["drop_last"] = True
    c.take_if("DataLoader.Train.sampler.shuffle", True)
    if c.has("AMP") and c.take("AMP.use_amp", True):  # theirs is on if AMP is there
        section["precision"] = {
            "dtype": "float16", "level": c.take("AMP.level", "O1"), "scale": float(c.take("AMP.scale_loss", 65536.0)),
        }  # fmt: skip
    if c.take("Global.to_static"):
        section["compile"] = True
    return section


def _further_k(c: Configuration) -> list[int]:
    """The k of TopkAcc beyond acc1 and acc5, which the loss gives, and below the number of classes, where it is 1."""
    wanted, classes = c.take("Metric.Eval.TopkAcc.topk", ()), c.values.get("Arch.class_num") or 1000
    return [k for k in dict.fromkeys(wanted) if k not in (1, 5) and k < classes]


def _callbacks(c: Configuration, best: str) -> list[Section]:
    lines = c.take("Global.print_batch_step", 10)
    callbacks: list[Section] = [{"use": "console", "every": f"{lines} steps"}, {"use": "metrics"}]
    if c.take("Global.use_visualdl"):
        callbacks.append({"use": "dashboard"})
    if c.take("Global.eval_during_train", True):
        callbacks.append({"use": "evaluate", "every": _epochs(c.take("Global.eval_interval", 1))})
    save = {"use": "checkpoint", "every": _epochs(c.take("Global.save_interval", 1)), "keep": 3}
    callbacks.append({**save, **({"best": best} if callbacks[-1]["use"] == "evaluate" else {})})
    return callbacks


def _epochs(count: int) -> str:
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def _notes(c: Configuration) -> None:
    """Gives each remaining key its reason, and names differences that no key decides."""
    if not c.values.get("Arch.use_sync_bn"):
        c.differ("BatchNorm is over all ranks; as theirs, over each: strategy.sync_batch_norm=false.")
    if f"{OPS}.TimmAutoAugment.config_str" in c.carried:
        c.differ(
            "RandAugment has torchvision's operations at one strength; theirs are timm's, with noise (mstd)."
        )
    if c.has(f"{TRAIN}.batch_transform_ops") and not c.values.get("Loss.Train.CELoss.epsilon"):
        c.differ("Their CELoss without epsilon takes the softmax of mixed targets; here they are as mixed.")
    for key, is_used, reason in _LOST:
        if is_used(c):
            c.lose(key, reason)
    for key in [key for key in c.values if key.endswith(".interpolation") and not key.startswith("Infer")]:
        resized = "images are resized as the training's are"
        c.lose(key, resized if "Eval" in key else "its result is not interpolated")
    for pattern, reason in _UNUSED:
        c.without_counterpart(pattern, reason)
    for key in [key for key, value in c.values.items() if not value and key.startswith(_SWITCHES)]:
        c.without_counterpart(key, "switched off there, too")
    c.lose(f"{OPS}.*", "this augmentation is not on the shelf")
    c.lose(f"{TRAIN}.batch_transform_ops.*", "this mixing is not on the shelf")
    c.lose_the_rest()
