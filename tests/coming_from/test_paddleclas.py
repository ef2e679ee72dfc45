"""PaddleClas's configurations as recipes: what each key becomes, that none is passed over, and that rates agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.optimizer import lr

from paddle_dp.cli import main
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.importer import import_recipe
from paddle_dp.coming_from.paddleclas import recipe
from paddle_dp.errors import UsageError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe

CONVNET = """
Global: {checkpoints: null, output_dir: ./output/, epochs: 120, print_batch_step: 10, use_visualdl: True,
  eval_during_train: True, eval_interval: 1, save_interval: 5, image_shape: [3, 224, 224], to_static: False}
AMP: {use_amp: True, scale_loss: 128.0, use_dynamic_loss_scaling: True, level: O1}
Arch: {name: ResNet50, class_num: 102}
Loss:
  Train: [{CELoss: {weight: 1.0, epsilon: 0.1}}]
  Eval: [{CELoss: {weight: 1.0}}]
Optimizer:
  name: Momentum
  momentum: 0.9
  lr: {name: Cosine, learning_rate: 0.4, warmup_epoch: 5, warmup_start_lr: 0.04, eta_min: 0.004}
  regularizer: {name: 'L2', coeff: 0.00007}
DataLoader:
  Train:
    dataset:
      name: ImageNetDataset
      image_root: ./dataset/flowers/
      cls_label_path: ./dataset/flowers/train_list.txt
      transform_ops:
        - DecodeImage: {to_rgb: True, channel_first: False}
        - RandCropImage: {size: 176, interpolation: bicubic, backend: pil}
        - RandFlipImage: {flip_code: 1}
        - NormalizeImage: {scale: 1.0/255.0, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225], order: ''}
        - ColorJitter: {brightness: 0.4, contrast: 0.4, saturation: 0.4}
    sampler: {name: DistributedBatchSampler, batch_size: 64, drop_last: True, shuffle: True}
    loader: {num_workers: 4, use_shared_memory: True}
  Eval:
    dataset:
      name: ImageNetDataset
      image_root: ./dataset/flowers/
      cls_label_path: ./dataset/flowers/val_list.txt
      transform_ops:
        - ResizeImage: {resize_short: 232, interpolation: bicubic}
        - CropImage: {size: 176}
    sampler: {name: DistributedBatchSampler, batch_size: 64, drop_last: False, shuffle: False}
Infer: {infer_imgs: a.jpg, PostProcess: {name: Topk, topk: 5}}
Metric: {Eval: [{TopkAcc: {topk: [1, 5]}}]}
"""
JITTER = "        - ColorJitter: {"
TRANSFORMER = """
Global: {epochs: 300, update_freq: 2, print_batch_step: 10, eval_during_train: False, save_interval: 1,
  use_visualdl: True}
Arch: {name: Swin_own, class_num: 10, drop_path_rate: 0.2}
Loss: {Train: [{CELoss: {epsilon: 0.1}}]}
EMA: {decay: 0.9999}
Optimizer:
  name: AdamW
  beta1: 0.9
  beta2: 0.999
  epsilon: 1e-8
  weight_decay: 0.05
  no_weight_decay_name: pos_embed norm
  one_dim_param_no_weight_decay: True
  lr: {name: Cosine, learning_rate: 1e-3}
DataLoader:
  Train:
    dataset:
      name: ImageNetDataset
      image_root: /data
      cls_label_path: /lists/train.txt
      delimiter: "\\t"
      transform_ops:
        - RandCropImage: {size: 224}
        - TimmAutoAugment: {config_str: rand-m9-mstd0.5-inc1, prob: 1.0}
        - RandomErasing: {EPSILON: 0.25, sl: 0.02, sh: 1.0/3.0, r1: 0.3, attempt: 10, use_log_aspect: True, mode: pixel}
      batch_transform_ops:
        - OpSampler:
            MixupOperator: {alpha: 0.8, prob: 0.2}
            CutmixOperator: {alpha: 1.0, prob: 0.6}
    sampler: {name: DistributedBatchSampler, batch_size: 128, drop_last: False, shuffle: True}
    loader: {num_workers: 8}
"""


def configuration(folder: Path, text: str) -> Configuration:
    (folder / "their.yaml").write_text(text)
    return Configuration.read(folder / "their.yaml")


def test_a_convolutional_network(tmp_path: Path) -> None:
    c = configuration(tmp_path, CONVNET)
    assert recipe(c, ranks=4) == {
        "model": {"use": "paddle.vision.models.resnet50", "num_classes": 102},
        "dataset": {
            "use": "image_list", "path": "./dataset/flowers/", "train": "train_list.txt", "test": "val_list.txt",
            "size": 176, "resize": 232, "jitter": 0.4, "interpolation": "bicubic",
        },
        "loss": {"use": "cross_entropy", "label_smoothing": 0.1},
        "optimizer": {"use": "momentum", "momentum": 0.9, "weight_decay": 0.00007, "decay_all": True},
        "schedule": {"use": "cosine", "learning_rate": 0.4, "floor": 0.01, "warmup": "5 epochs", "warmup_from": 0.1},
        "strategy": {"use": "data_parallel"},
        "train": {
            "length": "120 epochs", "batch": 256, "seed": 0, "drop_last": True,
            "precision": {"dtype": "float16", "level": "O1", "scale": 128.0},
        },
        "loader": {"num_workers": 4},
        "callbacks": [
            {"use": "console", "every": "10 steps"}, {"use": "metrics"}, {"use": "dashboard"},
            {"use": "evaluate", "every": "1 epoch"},
            {"use": "checkpoint", "every": "5 epochs", "keep": 3, "best": "acc1"},
        ],
    }  # fmt: skip
    assert c.lost == [] and c.differences == [
        "Initial weights are drawn as in paddle.vision; theirs: model.use=ppcls.arch.backbone.ResNet50.",
        "The warm-up begins one step earlier: their first update has rate 0.04.",
        "BatchNorm is over all ranks; as theirs, over each: strategy.sync_batch_norm=false.",
    ]


def test_further_k_are_a_metric(tmp_path: Path) -> None:
    text = CONVNET.replace("topk: [1, 5]", "topk: [1, 3, 102]")
    assert text != CONVNET
    assert recipe(configuration(tmp_path, text), ranks=4)["metrics"] == [{"use": "top_k", "k": [3]}]


def test_a_transformer_with_mixing(tmp_path: Path) -> None:
    c = configuration(tmp_path, TRANSFORMER)
    sections = recipe(c, ranks=8)
    assert sections["model"] == {
        "use": "ppcls.arch.backbone.Swin_own", "class_num": 10, "drop_path_rate": 0.2
    }  # fmt: skip
    assert sections["dataset"] == {
        "use": "image_list", "path": "/data", "train": "/lists/train.txt", "separator": "tab",
        "size": 224, "flip": 0.0, "augment": "rand", "augment_count": 2, "augment_strength": 27, "erase": 0.25,
        "erase_fill": "noise",
    }  # fmt: skip
    assert sections["mix"] == {
        "mixup": 0.8,
        "cutmix": 1.0,
        "probability": 0.8,
        "cutmix_probability": pytest.approx(0.75),
    }
    assert sections["train"] == {"length": "300 epochs", "batch": 2048, "micro_batches": 2, "seed": 0}
    assert sections["ema"] == {"decay": 0.9999}
    assert sections["optimizer"]["groups"] == [
        {"match": "*pos_embed*", "weight_decay": 0}, {"match": "*norm*", "weight_decay": 0}
    ]  # fmt: skip
    assert "decay_all" not in sections["optimizer"]
    assert [each["use"] for each in sections["callbacks"]] == [
        "console",
        "metrics",
        "dashboard",
        "checkpoint",
    ]
    assert "best" not in sections["callbacks"][-1]  # nothing evaluates
    assert c.lost == []


def test_what_their_augmentation_has_and_ours_has_not_is_lost(tmp_path: Path) -> None:
    erasing, augment = "RandomErasing", "TimmAutoAugment"
    text = TRANSFORMER.replace("mode: pixel", "mode: rand")
    text = text.replace("prob: 1.0}", "prob: 1.0, interpolation: lanczos}", 1)
    assert "lanczos" in text and "mode: rand" in text
    c = configuration(tmp_path, text)
    assert recipe(c, ranks=8)["dataset"]["erase"] == 0.25
    assert [key.rpartition("transform_ops.")[2] for each in c.lost for key in each.keys] == [
        f"{erasing}.mode", f"{augment}.interpolation"
    ]  # fmt: skip
    c = configuration(tmp_path, text.replace("lanczos", "bicubic"))
    assert recipe(c, ranks=8)["dataset"]["augment_interpolation"] == "bicubic"


@pytest.mark.parametrize("text", [CONVNET, TRANSFORMER], ids=["convnet", "transformer"])
def test_every_key_is_accounted_for_once(tmp_path: Path, text: str) -> None:
    """Also those that nobody has heard of."""
    c = configuration(tmp_path, text + "Surprise: {depth: [1, 2], name: x}\n")
    recipe(c, ranks=1)
    others = [key for each in (*c.lost, *c.unused) for key in each.keys]
    assert len(others) == len({*others}) and c.carried.isdisjoint(others)
    assert c.carried.union(others) == c.values.keys()
    assert ("Surprise.depth", "Surprise.name") in [each.keys for each in c.lost]


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("use_amp: True, ", "", ("train", "precision"), {"dtype": "float16", "level": "O1", "scale": 128.0}),
        ("use_amp: True", "use_amp: yes", ("train", "precision"), {"dtype": "float16", "level": "O1", "scale": 128.0}),
        ("use_amp: True", "use_amp: off", ("train", "precision"), None),
        ("momentum: 0.9\n", "momentum: 0.9\n  use_nesterov: no\n", ("optimizer", "nesterov"), None),
        ("momentum: 0.9\n", "momentum: 0.9\n  one_dim_param_no_weight_decay: True\n", ("optimizer", "decay_all"), True),
        ("epsilon: 0.1", "epsilon: 1.5", ("loss", "label_smoothing"), None),
        ("Metric:", "EMA: {}\nMetric:", ("ema", "decay"), 0.9999),
        ("learning_rate: 0.4", "learning_rate: 4e-1", ("schedule", "learning_rate"), 0.4),
        (JITTER, "        - RandomErasing: {sl: 0.02}\n" + JITTER, ("dataset", "erase"), 0.5),
        ("CropImage: {size: 176}", "CropImage: {size: 224}", ("dataset", "test_size"), 224),
        (JITTER, "        - AutoAugment:\n" + JITTER, ("dataset", "augment"), "auto"),
        ("    sampler: {name: DistributedBatchSampler, batch_size: 64, drop_last: True",
         "    sampler: {name: DistributedBatchSampler, batch_size: 64, drop_last: off", ("train", "drop_last"), None),
        ("        - ColorJitter: {brightness: 0.4, contrast: 0.4, saturation: 0.4}\n",
         "      batch_transform_ops:\n        - OpSampler: {MixupOperator: {prob: 0.5}, CutmixOperator: {prob: 0.5}}\n",
         ("mix", "mixup"), 1.0),
    ],
)  # fmt: skip
def test_defaults_and_switches_are_theirs(
    tmp_path: Path, old: str, new: str, key: tuple[str, str], value: Any
) -> None:
    assert old in CONVNET
    section, name = key
    assert (
        recipe(configuration(tmp_path, CONVNET.replace(old, new, 1)), 1).get(section, {}).get(name) == value
    )


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("RandCropImage: {size: 176, interpolation: bicubic, backend: pil}", "ResizeImage: {size: 176}",
         "images are random crops to 176 pixels, of dataset.crop of the area"),
        (JITTER, "        - TimmAutoAugment: {config_str: augmix-m5, prob: 1.0}\n" + JITTER,
         "this augmentation is not on the shelf"),
        ("        - ColorJitter: {brightness: 0.4, contrast: 0.4, saturation: 0.4}\n",
         "      batch_transform_ops: [{MixupOperator: {alpha: 0.2}}, {CutmixOperator: {alpha: 1.0}}]\n",
         "both operators mix each batch there, one after the other"),
        ("class_num: 102", "class_num: 102, Head: {name: FC}", "has no counterpart that is known here"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_lost(tmp_path: Path, old: str, new: str, lost: str) -> None:
    assert old in CONVNET
    c = configuration(tmp_path, CONVNET.replace(old, new, 1))
    recipe(c, 1)
    assert lost in [each.reason for each in c.lost]


ATTRIBUTES = """
Global: {epochs: 20, use_multilabel: True}
Arch: {name: PPLCNet_x1_0, class_num: 26}
Loss:
  Train:
    - MultiLabelLoss: {weight: 1.0, weight_ratio: WEIGHTED, size_sum: True}
Optimizer: {name: Momentum, momentum: 0.9, lr: {name: Cosine, learning_rate: 0.01}}
DataLoader:
  Train:
    dataset:
      name: MultiLabelDataset
      image_root: pa100k/
      cls_label_path: pa100k/train_list.txt
      label_ratio: True
      transform_ops:
        - ResizeImage: {size: [192, 256]}
        - Padv2: {size: [212, 276], pad_mode: 1, fill_value: 0}
        - RandomCropImage: {size: [192, 256]}
        - RandFlipImage: {flip_code: 1}
        - NormalizeImage: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}
    sampler: {name: DistributedBatchSampler, batch_size: 64}
  Eval:
    dataset:
      name: MultiLabelDataset
      transform_ops:
        - ResizeImage: {size: [192, 256]}
Metric:
  Eval:
    - ATTRMetric:
"""


PADDED = """\
        - Padv2: {size: [212, 276], pad_mode: 1, fill_value: 0}
        - RandomCropImage: {size: [192, 256]}
"""


@pytest.mark.parametrize("weighted", ["True", "False"])
def test_lists_of_labels_and_images_that_are_not_square(tmp_path: Path, weighted: str) -> None:
    c = configuration(tmp_path, ATTRIBUTES.replace("WEIGHTED", weighted))
    made = recipe(c, 2)
    assert made["dataset"] == {
        "use": "image_list", "path": "pa100k/", "train": "train_list.txt", "separator": "tab", "labels": 26,
        "size": [256, 192], "pad": 10, "fit": "stretch",
    }  # fmt: skip
    rarity = {"frequencies": "pa100k/train_list.txt"} if weighted == "True" else {}
    assert made["loss"] == {"use": "binary_cross_entropy", **rarity, "over_labels": "sum"}
    assert made["metrics"] == [{"use": "average_precision"}]
    assert made["callbacks"][-1]["best"] == "average_precision"
    assert c.lost == []
    mentioned = {key for each in (*c.lost, *c.unused) for key in each.keys}
    assert mentioned | c.carried == c.values.keys() and not mentioned & c.carried


@pytest.mark.parametrize(
    ("old", "new", "size", "lost"),
    [
        ("Padv2: {size: [212, 276], pad_mode: 1", "Padv2: {size: [212, 276], pad_mode: 0", [256, 192], True),
        ("Padv2: {size: [212, 276]", "Padv2: {size: [212, 296]", [256, 192], True),
        ("        - RandomCropImage: {size: [192, 256]}\n", "", [256, 192], True),
        ("transform_ops:\n        - ResizeImage: {size: [192, 256]}\nMetric", "transform_ops: []\nMetric", [256, 192],
         True),
        (PADDED, "", [256, 192], False),
    ],
)  # fmt: skip
def test_other_crops_of_resized_images_are_lost(
    tmp_path: Path, old: str, new: str, size: Any, lost: bool
) -> None:
    text = ATTRIBUTES.replace("WEIGHTED", "False")
    assert old in text
    c = configuration(tmp_path, text.replace(old, new, 1))
    made = recipe(c, 1)
    assert made["dataset"]["size"] == size and ("fit" in made["dataset"]) == (not lost) == (not c.lost)


def test_theirs_is_width_and_height(tmp_path: Path) -> None:
    c = configuration(tmp_path, CONVNET.replace("size: 176, inter", "size: [176, 88], inter", 1))
    assert recipe(c, 1)["dataset"]["size"] == [88, 176]


EPOCHS, STEPS = 90, 7


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ("name: Cosine, learning_rate: 0.4, eta_min: 0.004",
         lambda left: lr.CosineAnnealingDecay(0.4, left, eta_min=0.004)),
        ("name: Linear, learning_rate: 0.4, end_lr: 0.1, power: 2.0",
         lambda left: lr.PolynomialDecay(0.4, left, end_lr=0.1, power=2.0)),
        ("name: Piecewise, decay_epochs: [30, 60], values: [0.4, 0.04, 0.004]",
         lambda left: lr.PiecewiseDecay([30 * STEPS, 60 * STEPS], [0.4, 0.04, 0.004])),
        ("name: Piecewise, learning_rate: 0.4, decay_epochs: [1], values: [1.0, 0.5]",  # the rate counts
         lambda left: lr.PiecewiseDecay([30 * STEPS, 60 * STEPS], [0.4, 0.04, 0.004])),
        ("name: MultiStepDecay, learning_rate: 0.4, milestones: [10, 20], gamma: 0.5",
         lambda left: lr.MultiStepDecay(0.4, [10 * STEPS, 20 * STEPS], 0.5)),
        ("name: Step, learning_rate: 0.4, step_size: 2.4, gamma: 0.97",
         lambda left: lr.StepDecay(0.4, round(2.4 * STEPS), 0.97)),
        ("name: ConstLR, learning_rate: 0.4", lambda left: 0.4),
    ],
)  # fmt: skip
def test_rates_are_theirs_after_the_warm_up(tmp_path: Path, settings: str, theirs: Any, warmup: int) -> None:
    text = re.sub(r"lr: \{.*\}", f"lr: {{{settings}, warmup_epoch: {warmup}}}", CONVNET).replace(
        "120", str(EPOCHS)
    )
    ours = read_part("schedules", recipe(configuration(tmp_path, text), 1)["schedule"])
    schedule = ours.build(steps=EPOCHS * STEPS, steps_per_epoch=STEPS, batch=64)
    inner = theirs((EPOCHS - warmup) * STEPS)
    for step in range(0, (EPOCHS - warmup) * STEPS, 3):
        schedule.step(warmup * STEPS + step)
        expected = inner
        if not isinstance(inner, float):
            inner.step(step)
            expected = inner()
        tolerance = 1e-9 if "Step," not in settings else 0.04  # 2.4 epochs are 16.8 steps
        assert schedule() == pytest.approx(expected, rel=tolerance), step


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: ResNet50", "name: RecModel", "Arch.name: RecModel: models that are put together there"),
        ("name: ImageNetDataset\n      image_root: ./dataset/flowers/\n      cls_label_path: ./dataset/flowers/train",
         "name: Cifar10\n      cls_label_path: train", "name: Cifar10: only lists of images"),
        ("name: ImageNetDataset\n      image_root: ./dataset/flowers/\n      cls_label_path: ./dataset/flowers/train",
         "name: MultiLabelDataset\n      cls_label_path: train", "CELoss: of lists with several labels MultiLabel"),
        ("CELoss: {weight: 1.0, epsilon: 0.1}", "TripletLoss: {}", "Loss.Train: TripletLoss: only CELoss, Multi"),
        ("name: Momentum", "name: AdamWDL", "Optimizer.name: AdamWDL: one Momentum, SGD, Adam, AdamW or RMSProp"),
        ("name: Cosine", "name: OneCycleLR", "Optimizer.lr.name: OneCycleLR: Cosine, Linear, Piecewise"),
        ("name: Cosine, learning_rate: 0.4", "name: Piecewise, decay_epochs: [1, 2], values: [1.0, 0.5, 0.1]",
         "Optimizer.lr.values: .* each has to be the same share"),
        ("name: 'L2'", "name: 'L1'", "Optimizer.regularizer.name: L1: only L2"),
    ],
)  # fmt: skip
def test_what_has_no_recipe_is_refused_by_its_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in CONVNET
    with pytest.raises(UsageError, match=said):
        recipe(configuration(tmp_path, CONVNET.replace(old, new, 1)), 1)


def test_the_recipe_is_written_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configuration(tmp_path, CONVNET)
    result = import_recipe(tmp_path / "their.yaml", ranks=4, out=Path("mine.yaml"))
    assert result.obstacle == ""
    assert (
        result.lines()[0]
        == "mine.yaml of PaddleClas: 64 keys: 46 carried over, 18 without a counterpart, 0 not honoured"
    )
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith(
        "# their.yaml of PaddleClas, by paddle-dp import.\n#   paddle-dp train mine.yaml --ranks 4\n"
    )
    assert "milestones" not in text and "\ntrain: {length: 120 epochs, batch: 256, " in text
    read = read_recipe(tmp_path / "mine.yaml")
    assert read.train.batch == 256 and read.dataset.config.interpolation == "bicubic"
    with pytest.raises(UsageError, match=r"mine\.yaml exists already: name another file with --out"):
        import_recipe(tmp_path / "their.yaml", ranks=4, out=Path("mine.yaml"))


def test_groups_that_the_model_has_no_parameters_for_are_left_out(tmp_path: Path) -> None:
    text = CONVNET.replace("momentum: 0.9\n", "momentum: 0.9\n  no_weight_decay_name: pos_embed bn1\n")
    configuration(tmp_path, text)
    result = import_recipe(tmp_path / "their.yaml", ranks=4, out=tmp_path / "mine.yaml")
    assert (
        result.obstacle == ""
        and "No parameter of the model needs the group *pos_embed*." in result.lines()[-3]
    )
    assert 'groups: [{match: "*bn1*", weight_decay: 0}]' in (tmp_path / "mine.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (TRANSFORMER.replace("pixel", "rand"), ["--ranks", "2", "--strict"], "is not honoured whole, and --strict"),
        (CONVNET, [], "its batch size is for one card. Say for how many it is written, on all machines: --ranks 4"),
        ("a: 1", ["--ranks", "2"], "has neither Arch, so it is no training configuration of PaddleClas"),
        ("a: [", ["--ranks", "2"], "is no YAML"),
        ("&a {b: *a}", ["--ranks", "2"], "refers to itself, or its aliases make"),
        ("Arch: ResNet50\nDataLoader: {Train: {dataset: {name: x}}}", ["--ranks", "2"], "Arch.name: missing"),
        (CONVNET.replace("0.4, warmup", "[0.4], warmup"), ["--ranks", "2"], "a value is not of the kind that"),
        ("[1]", ["--ranks", "2"], "holds no configuration: its content is a list"),
    ],
)  # fmt: skip
def test_bad_input_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], said: str
) -> None:
    (tmp_path / "their.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "their.yaml"), "--out", str(tmp_path / "mine.yaml"), *options])
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "mine.yaml").exists()


def asymmetric(folder: Path, *replacements: tuple[str, str]) -> Configuration:
    """A training of labels with the asymmetric loss and the ML-Decoder head."""
    text = ATTRIBUTES + DECODER
    changes = [
        ("    - MultiLabelLoss: {weight: 1.0, weight_ratio: WEIGHTED, size_sum: True}\n", LOSS),
        ("Optimizer: {name: Momentum, momentum: 0.9, lr: {name: Cosine, learning_rate: 0.01}}\n", OPTIMIZER),
        ("class_num: 26}", "class_num: 26, use_ml_decoder: True}"), ("      label_ratio: True\n", ""),
    ]  # fmt: skip
    for old, new in (*changes, *replacements):
        assert old in text
        text = text.replace(old, new, 1)
    return configuration(folder, text)


LOSS = "    - MultiLabelAsymmetricLoss: {weight: 1.0, gamma_pos: 0, gamma_neg: 4, clip: 0.05}\n"
OPTIMIZER = (
    "Optimizer: {name: AdamW, epsilon: 1e-8, weight_decay: 1e-4, lr: {name: Cosine, learning_rate: 1e-4}}\n"
)
DECODER = "MLDecoder: {query_num: 26, in_channels: 2048, remove_layers: []}\n"


def test_the_asymmetric_loss_and_the_head_that_is_put_on(tmp_path: Path) -> None:
    c = asymmetric(tmp_path)
    made = recipe(c, 2)
    assert made["loss"] == {
        "use": "asymmetric", "gamma_positive": 0.0, "gamma_negative": 4.0, "margin": 0.05, "over_labels": "sum",
    }  # fmt: skip
    assert made["model"]["use"] == "ppcls.arch.build_model"
    assert made["model"]["config"]["MLDecoder"] == {"query_num": 26, "in_channels": 2048, "remove_layers": []}
    arch = made["model"]["config"]["Arch"]
    assert arch.pop("name") and arch == {"class_num": 26, "use_ml_decoder": True}
    assert made["optimizer"]["epsilon"] == 1e-8 / 64
    assert any("theirs adds up a card's 64" in each for each in c.differences)
    mentioned = {key for each in (*c.lost, *c.unused) for key in each.keys}
    assert mentioned | c.carried == c.values.keys() and not mentioned & c.carried and c.lost == []


def test_settings_of_the_asymmetric_loss(tmp_path: Path) -> None:
    settings = ("clip: 0.05}", "clip: 0.05, disable_focal_loss_grad: False, reduction: mean}")
    made = recipe(asymmetric(tmp_path, settings), 2)
    assert made["loss"]["through_focus"] and "over_labels" not in made["loss"]
    assert made["optimizer"]["epsilon"] == 1e-8
    with pytest.raises(UsageError, match="mean has a recipe, and sum with AdamW"):
        recipe(asymmetric(tmp_path, ("name: AdamW", "name: Momentum")), 2)


def test_adamw_with_a_smaller_epsilon_takes_the_steps_of_a_loss_that_is_added_up() -> None:
    weights = []
    for factor, epsilon in ((64.0, 1e-8), (1.0, 1e-8 / 64)):
        weight = paddle.create_parameter(
            [3], "float64", default_initializer=paddle.nn.initializer.Constant(0.5)
        )
        update = paddle.optimizer.AdamW(0.1, parameters=[weight], epsilon=epsilon, weight_decay=0.01)
        for number in range(5):
            ((weight * paddle.to_tensor([1e-9, 1e-3, number], "float64")).sum() * factor).backward()
            update.step()
            update.clear_grad()
        weights.append(weight.numpy())
    np.testing.assert_allclose(*weights, rtol=1e-12)
