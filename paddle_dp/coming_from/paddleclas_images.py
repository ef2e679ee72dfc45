"""The images of PaddleClas's trainings, augmented and mixed, as a recipe's sections `dataset` and `mix`."""

from __future__ import annotations

import os
import re
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section

TRAIN = "DataLoader.Train.dataset"
OPS = f"{TRAIN}.transform_ops"
EVALUATION = "DataLoader.Eval.dataset.transform_ops"
MULTIPLE = "MultiLabelDataset"
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def dataset_section(c: Configuration) -> Section:
    kind = c.take(f"{TRAIN}.name")
    if kind not in ("ImageNetDataset", "MultiScaleDataset", MULTIPLE):
        c.reject(f"{TRAIN}.name", f"only lists of images (ImageNetDataset, {MULTIPLE}) have a recipe")
    root = c.take(f"{TRAIN}.image_root", ".")
    c.take("DataLoader.Eval.dataset.image_root")
    section: Section = {"use": "image_list", "path": root}
    for name, split in (("train", TRAIN), ("test", "DataLoader.Eval.dataset")):
        if file := c.take(f"{split}.cls_label_path"):
            section[name] = _within(file, root)
    separators = {" ": "space", "\t": "tab", ",": "comma"}
    if (between := c.take(f"{TRAIN}.delimiter")) is not None:
        section["separator"] = separators.get(between) or c.reject(
            f"{TRAIN}.delimiter", "space, tab or comma"
        )
    if kind == MULTIPLE:
        if (labels := c.values.get("Arch.class_num")) is None:
            c.reject("Arch.class_num", "missing, so the number of labels is not known")
        section |= {"separator": "tab", "labels": labels}
    section |= _fit(c)
    return section | _views(c, section["size"])


def mix_section(c: Configuration) -> Section:
    """The alpha of an operator is 1 for Mixup and 0.2 for CutMix, if it has none."""
    ops = f"{TRAIN}.batch_transform_ops"
    defaults = {"Mixup": 1.0, "Cutmix": 0.2}
    alone = {name for name in defaults if c.has(f"{ops}.{name}Operator")}
    if len(alone) > 1:
        c.lose(f"{ops}.CutmixOperator*", "both operators mix each batch there, one after the other")
        alone = {"Mixup"}
    chances = {
        name: c.take(f"{ops}.OpSampler.{name}Operator.prob", 0)
        for name in defaults
        if c.has(f"{ops}.OpSampler.{name}Operator")
    }
    section: Section = {}
    for name, alpha in defaults.items():
        operator = f"{ops}.{name}Operator" if name in alone else f"{ops}.OpSampler.{name}Operator"
        if name in alone or chances.get(name):
            c.take(operator)
            section[name.lower()] = c.take(f"{operator}.alpha", alpha)
    if section and not alone and (together := sum(chances.values())):
        if together < 1:
            section["probability"] = together
        if len(section.keys() & {"mixup", "cutmix"}) == 2 and chances["Cutmix"] != together / 2:
            section["cutmix_probability"] = round(chances["Cutmix"] / together, 12)
    return section


def _fit(c: Configuration) -> Section:
    """The size of the model's input, in pixels, and how images get it. Other crops than a random resized one are
    lost."""
    if section := _stretched(c):
        return section
    same = [f"{OPS}.{name}.size" for name in ("RandCropImage", "RandomResizedCrop")]
    others = [f"{OPS}.{name}.size" for name in ("RandCropImageV2", "RandomCropImage", "ResizeImage")]
    for key in (*same, *others):
        if (side := c.values.get(key)) is None:
            continue
        size = _height_and_width(side)
        if key in same:
            c.take(key)
            return {"size": size[::-1] if "Resized" in key and isinstance(size, list) else size}
        c.lose(key, f"images are random crops to {_pixels(size)} pixels, of dataset.crop of the area")
        return {"size": size}
    return {"size": 224}


def _stretched(c: Configuration) -> Section:
    """Whole images of one size, whatever their proportions, in training and evaluation; a random crop of padded ones is
    a shift."""
    trained, evaluated = f"{OPS}.ResizeImage.size", f"{EVALUATION}.ResizeImage.size"
    crops = [
        name for name in ("RandCropImage", "RandomResizedCrop", "RandCropImageV2") if c.has(f"{OPS}.{name}")
    ]
    side = c.values.get(trained)
    if side is None or c.values.get(evaluated) != side or crops or c.has(f"{EVALUATION}.CropImage"):
        return {}
    padded, crop, section = f"{OPS}.Padv2", f"{OPS}.RandomCropImage", {"size": _height_and_width(side)}
    if c.has(padded) or c.has(crop):
        padded_side, cropped_side = (c.values.get(f"{op}.size") for op in (padded, crop))
        if not isinstance(side, list) or not isinstance(padded_side, list) or cropped_side != side:
            return {}
        shifts = {large - small for large, small in zip(padded_side, side, strict=True)}
        is_centred = c.values.get(f"{padded}.pad_mode") == 1 and c.values.get(f"{padded}.fill_value") == 0
        if len(shifts) > 1 or not is_centred or (shift := shifts.pop()) % 2 or shift < 0:
            return {}
        for key in [key for key in c.values if key.startswith((f"{padded}.", f"{crop}."))]:
            c.take(key)
        section["pad"] = shift // 2
    c.take(trained)
    c.take(evaluated)
    return {**section, "fit": "stretch"}


def _height_and_width(side: Any) -> Any:
    """Of one number, or of [width, height]; one number where both are equal."""
    sides = [int(each) for each in (side if isinstance(side, list) else [side])]
    return sides[0] if len({*sides}) == 1 else sides[::-1]


def _pixels(size: Any) -> str:
    return " x ".join(map(str, size)) if isinstance(size, list) else str(size)


def _within(file: str, folder: str) -> str:
    """The path of a list from the folder of the images, or an absolute path if that one is absolute."""
    if os.path.isabs(file) or os.path.isabs(folder):
        return os.path.abspath(file)
    return os.path.relpath(file, folder)


def _views(c: Configuration, size: Any) -> Section:
    section: Section = {}
    test_size = size
    if isinstance(cropped := c.values.get(f"{EVALUATION}.CropImage.size"), int):
        test_size = c.take(f"{EVALUATION}.CropImage.size")
        if cropped != size:
            section["test_size"] = cropped
    shorter = c.values.get(f"{EVALUATION}.ResizeImage.resize_short")
    if shorter is not None and isinstance(test_size, int):
        c.take(f"{EVALUATION}.ResizeImage.resize_short")
        if shorter != round(test_size * 8 / 7):
            section["resize"] = max(shorter, test_size)
    if scale := c.take(f"{OPS}.RandCropImage.scale", c.take(f"{OPS}.RandomResizedCrop.scale")):
        section["crop"] = scale
    flips = c.take_if(f"{OPS}.RandFlipImage.flip_code", 1) or c.take_if(
        f"{OPS}.RandomHorizontalFlip.prob", 0.5
    )
    if not flips:
        section["flip"] = 0.0
    section |= {**_augmentation(c), **_jitter(c), **_erasing(c)}
    ways = [f"{OPS}.{name}.interpolation" for name in ("RandCropImage", "ResizeImage")]
    ways.append(f"{EVALUATION}.ResizeImage.interpolation")
    if "bicubic" in [way for way in ("bicubic", "bilinear") for key in ways if c.take_if(key, way)]:
        section["interpolation"] = "bicubic"
    return section | _normalisation(c)


def _erasing(c: Configuration) -> Section:
    """A rectangle of 2 to 33 % of the area, at most 3.3 times as long as wide, in the mean's colour."""
    erasing = f"{OPS}.RandomErasing"
    chance = c.take(f"{erasing}.EPSILON", 0.5 if c.has(erasing) else 0)
    c.take(erasing)
    if not chance:
        c.without_counterpart(f"{erasing}.*", "switched off there, too")
        return {}
    is_noise = c.take_if(f"{erasing}.mode", "pixel")
    for name, same in (
        ("sl", 0.02), ("sh", "1.0/3.0"), ("sh", 0.33), ("r1", 0.3), ("attempt", 10), ("use_log_aspect", True),
        ("mode", "const"),
    ):  # fmt: skip
        c.take_if(f"{erasing}.{name}", same)
    return {"erase": chance, **({"erase_fill": "noise"} if is_noise else {})}


def _jitter(c: Configuration) -> Section:
    names = [f"{OPS}.ColorJitter.{name}" for name in ("brightness", "contrast", "saturation")]
    strengths = [c.values.get(name) for name in names]
    if not strengths[0] or len({*strengths}) > 1:
        return {}
    return {"jitter": min([c.take(name) for name in names])}


def _normalisation(c: Configuration) -> Section:
    section: Section = {}
    if not (c.has(f"{OPS}.NormalizeImage") or c.has(f"{OPS}.Normalize")):
        c.differ(
            "Images are normalised by ImageNet's mean and deviation; theirs are not (dataset.mean, std)."
        )
    for statistic, usual in IMAGENET.items():
        for norm in ("NormalizeImage", "Normalize"):
            numbers = c.values.get(f"{OPS}.{norm}.{statistic}")
            if numbers is not None and len(numbers) == 3:
                section |= {} if c.take(f"{OPS}.{norm}.{statistic}") == usual else {statistic: numbers}
    for scale in ("1.0/255.0", 0.00392157, "0.00392157"):
        c.take_if(f"{OPS}.NormalizeImage.scale", scale)
    for order in ("", "hwc", "chw"):
        c.take_if(f"{OPS}.NormalizeImage.order", order)
    return section


def _augmentation(c: Configuration) -> Section:
    """RandAugment: theirs has strengths to 10, ours to 30."""
    if c.has(f"{OPS}.AutoAugment"):
        c.take(f"{OPS}.AutoAugment")
        c.differ("AutoAugment: an area that an operation moves in is black; there it is grey.")
        return {"augment": "auto"}
    if c.has(f"{OPS}.RandAugment"):
        count = c.take(f"{OPS}.RandAugment.num_layers", 2)
        strength = c.take(f"{OPS}.RandAugment.magnitude", 5)
    elif c.values.get(f"{OPS}.TimmAutoAugment.config_str"):
        fields = str(c.take(f"{OPS}.TimmAutoAugment.config_str", "")).split("-")
        chance = c.take(f"{OPS}.TimmAutoAugment.prob", 0.5)
        numbers = {
            match[1]: match[2] for word in fields[1:] if (match := re.fullmatch(r"([a-z]+)([\d.]+)", word))
        }
        if fields[0] != "rand":
            c.carried.discard(f"{OPS}.TimmAutoAugment.config_str")
        if fields[0] != "rand" or not chance:
            return {}
        count, strength = int(numbers.get("n", 2)), float(numbers.get("m", 10))
        if chance != 1:
            c.carried.discard(f"{OPS}.TimmAutoAugment.prob")
            c.lose(f"{OPS}.TimmAutoAugment.prob", "every image is augmented; their default is half of them")
    else:
        return {}
    strength = min(round(3 * strength), 30)
    section: Section = {"augment": "rand", "augment_count": count, "augment_strength": strength}
    for interpolation in ("bilinear", "bicubic"):
        if c.take_if(f"{OPS}.TimmAutoAugment.interpolation", interpolation):
            section["augment_interpolation"] = interpolation
    return section
