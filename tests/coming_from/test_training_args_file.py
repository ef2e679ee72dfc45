"""The training_args.bin of Hugging Face's Trainer: its arguments, of classes that are not there, and nothing is run."""

from __future__ import annotations

import collections
import datetime
import enum
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.huggingface import recipe
from paddle_dp.coming_from.importer import import_recipe
from paddle_dp.errors import UsageError
from paddle_dp.unpickle import UnreadObject
from tests.coming_from.models import model_folder, reasons


class SchedulerType(str, enum.Enum):
    COSINE = "cosine"


class Record:
    """Stands for TrainingArguments, AcceleratorConfig and PartialState."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


class Attack:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it was run')",)


def write(file: Path, content: Any, name: str = "training_args/data.pkl") -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
    return file


def saved(file: Path, **values: Any) -> Path:
    """A file as torch.save writes it, with classes that cannot be imported when it is read."""
    module = types.ModuleType("transformers_of_a_test")
    kinds = (Record, SchedulerType)
    before = [kind.__module__ for kind in kinds]
    sys.modules[module.__name__] = module
    for kind in kinds:
        setattr(module, kind.__name__, kind)
        kind.__module__ = module.__name__
    try:
        return write(file, Record(**values))
    finally:
        del sys.modules[module.__name__]
        for kind, name in zip(kinds, before, strict=True):
            kind.__module__ = name


def test_arguments_are_read(tmp_path: Path) -> None:
    file = saved(
        model_folder(tmp_path, "gpt") / "training_args.bin",
        per_device_train_batch_size=4, learning_rate=1e-3, max_steps=20, lr_scheduler_type=SchedulerType.COSINE,
        accelerator_config=Record(split_batches=False, even_batches=True), report_to=["tensorboard"], _n_gpu=1,
        distributed_state=Record(device=None), data_seed=None, names={1, 2},
    )  # fmt: skip
    c = Configuration.read(file)
    assert c.values == {
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 20, "lr_scheduler_type": "cosine",
        "accelerator_config.split_batches": False, "accelerator_config.even_batches": True,
        "report_to": ["tensorboard"], "data_seed": None, "names": [1, 2],
    }  # fmt: skip
    result = import_recipe(file, 2, tmp_path / "mine.yaml")  # the model's config.json is next to it
    assert (
        result.obstacle == "" and "schedule: {use: cosine, learning_rate: 0.001}" in result.recipe.read_text()
    )


class Member:
    """An enumeration's member, as Python 3.11.2 pickles it, or any other call."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_members_by_name_are_read(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "training_args.bin",
        per_device_train_batch_size=4, lr_scheduler_type=Member(getattr, (SchedulerType, "COSINE")),
        fsdp=[Member(getattr, (SchedulerType, "COSINE"))], names=collections.OrderedDict(a=1),
    )  # fmt: skip
    values = Configuration.read(file).values
    assert values["lr_scheduler_type"] == "cosine" and values["fsdp"] == ["cosine"] and values["names.a"] == 1


def test_an_object_that_is_not_read_is_no_default(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "training_args.bin",
        per_device_train_batch_size=4, learning_rate=Member(complex, (1.0, 2.0)),
        neftune_noise_alpha=datetime.timedelta(1), output_dir=Path("a/b"),
    )  # fmt: skip
    c = Configuration.read(file)
    assert None not in c.values.values() and isinstance(c.values["output_dir"], UnreadObject)
    with pytest.raises(
        UsageError, match=r"learning_rate: __builtin__\.complex: an object of this class is not read"
    ):
        recipe(c, 2, model_folder(tmp_path, "gpt"))
    c.values["learning_rate"] = 0.1
    recipe(c, 2, model_folder(tmp_path, "gpt"))
    assert "neftune_noise_alpha" in reasons(c)


def test_a_file_of_an_early_pytorch_is_named(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps({"learning_rate": 1}, protocol=2))
    with pytest.raises(UsageError, match=r"was written by torch\.save before PyTorch 1\.6"):
        Configuration.read(tmp_path / "training_args.bin")


def test_a_pickle_that_expands_is_refused(tmp_path: Path) -> None:
    value: Any = [1, 2]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(UsageError, match="aliases make more than 100,000 values"):
        Configuration.read(write(tmp_path / "training_args.bin", {"per_device_train_batch_size": value}))


def test_nothing_is_run(tmp_path: Path) -> None:
    file = saved(tmp_path / "training_args.bin", per_device_train_batch_size=4, attack=Attack())
    assert Configuration.read(file).values["attack"] == "raise SystemExit('it was run')"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no training_args.bin"),
        (b"\x80\x02}q\x00", "pickle exhausted before seeing STOP"),
        (b"cos\nsystem\n(S'ls'\ntR.", "it holds a str"),
        ([1, 2], "it holds a list"),
        (b"0" * (2**22 + 1), "its pickle is larger than 4 MB"),
        (b"(" * 200_000, "more than 100,000 operations"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Configuration.read(write(tmp_path / "training_args.bin", content))
    assert said in str(caught.value)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no training_args\.bin"):
        Configuration.read(write(tmp_path / "a.bin", b"x", "other.txt"))
    (tmp_path / "b.bin").write_bytes(b"PK\x03\x04" + b"x" * 40)
    with pytest.raises(UsageError, match=r"is no training_args\.bin"):
        Configuration.read(tmp_path / "b.bin")


def test_an_object_that_contains_itself_is_refused(tmp_path: Path) -> None:
    record: dict[str, Any] = {"per_device_train_batch_size": 1}
    record["itself"] = record
    with pytest.raises(UsageError, match="refers to itself"):
        Configuration.read(write(tmp_path / "training_args.bin", record))
