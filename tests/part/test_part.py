"""From `use` and settings to a part that can be built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import InstallError, RecipeError
from paddle_dp.part import find, read_part

TINY = '''
"""A tiny module of parts."""
from dataclasses import dataclass
from paddle_dp.units import Every

@dataclass(frozen=True, kw_only=True)
class Config:
    """Says something."""
    width: int = 3
    every: Every | None = Every(5, "steps")
    sizes: tuple[int, ...] = (1, 2)

    def build(self, *given, **named):
        return self.width, given, named

class Layer:
    """As paddle.nn.Layer, which it takes a second to import."""
    __module__ = "paddle.nn"

class Net(Layer):
    def __init__(self, width: int = 3, act=print):
        self.width = width

NUMBER = 3
'''


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tiny_part.py").write_text(TINY)
    (tmp_path / "broken_part.py").write_text("1 / 0")
    (tmp_path / "needs_paddle.py").write_text("import paddle.nn\nclass Net: ...")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("tiny_part", "broken_part", "needs_paddle"):
        sys.modules.pop(name, None)


def refusal(settings: Any, shelf: str = "models") -> str:
    with pytest.raises(RecipeError) as caught:
        read_part(shelf, settings)
    return str(caught.value)


def test_a_part_is_read_and_built() -> None:
    part = read_part("models", {"use": "tiny_part.Config", "width": 4})
    assert (part.shelf, part.name, part.config.width) == ("models", "tiny_part.Config", 4)
    assert part.build(1, split="train") == (4, (1,), {"split": "train"})


def test_its_settings_make_it_again() -> None:
    part = read_part("models", {"use": "tiny_part.Config", "width": 4})
    assert part.settings == {"use": "tiny_part.Config", "width": 4, "every": "5 steps", "sizes": [1, 2]}
    assert read_part("models", part.settings) == part


def test_a_class_keeps_what_was_given_and_its_own_defaults() -> None:
    part = read_part("models", {"use": "tiny_part.Net", "width": 4})
    assert part.settings == {"use": "tiny_part.Net", "width": 4}
    assert part.build().width == 4


def test_a_module_is_known_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_package").mkdir()
    (tmp_path / "tiny_package" / "net.py").write_text(TINY)
    assert read_part("models", {"use": "tiny_package.net"}).config.width == 3


def test_a_part_of_a_shelf() -> None:
    part = read_part("schedules", {"use": "cosine", "learning_rate": 3e-4})
    assert part.config.learning_rate == 3e-4 and part.settings["use"] == "cosine"


def test_a_model_with_fixed_names_is_built_again_and_generated_names_go_on() -> None:
    """An optimizer's states go by name: only what fixes a name may repeat it, and only in another model."""
    part = read_part("models", {"use": "tests.part.fixed_names.FixedNames"})
    names = [[parameter.name for parameter in part.build().parameters()] for _ in range(2)]
    assert names[0][0] == names[1][0] == "fixed_weights"
    assert not set(names[0][1:]) & set(names[1][1:])
    with pytest.raises(ValueError, match="been used"):
        read_part("models", {"use": "tests.part.fixed_names.FixedNames", "twice": True}).build()


def test_an_unknown_part_is_told_with_the_near_miss_and_the_shelf() -> None:
    said = refusal({"use": "cosin", "learning_rate": 1.0}, "schedules")
    assert said.startswith(
        "there is no schedule 'cosin'. Did you mean 'cosine'? On the shelf schedules: constant, "
    )


def test_a_part_is_found_by_another_name_that_its_help_has() -> None:
    for word, part in (("diloco", "local_sgd"), ("EASGD", "async_average"), ("zero", "hybrid")):
        assert f" Perhaps '{part}' is meant: " in refusal({"use": word}, "strategies")
    assert "Perhaps" not in refusal({"use": "model"}, "strategies")  # in the help of several
    assert "Perhaps" not in refusal({"use": "hybird"}, "strategies")  # a slip of the finger


def test_a_file_beside_the_recipe_is_named_with_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cancer.py").write_text("class Config: ...")
    monkeypatch.chdir(tmp_path)
    assert refusal({"use": "cancer"}, "datasets").endswith("by its module: use: cancer.Config.")
    (tmp_path / "cancer.py").write_text("class Cells: ...")
    assert "use: cancer.CLASS" in refusal({"use": "cancer"}, "datasets")


def test_models_without_a_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal({"use": "net"})
    assert "there is no model 'net'." in said and "a folder models/ here or above the recipe" in said
    (tmp_path / "models").mkdir()
    (tmp_path / "models/other.py").touch()
    assert refusal({"use": "MyNet"}).endswith("is named with its module: package.module.MyNet.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("sgd", "optimizer: a part is a group of settings: write optimizer: {use: sgd}"),
        ({}, "optimizer needs 'use', the name of a part on the shelf optimizers: adafactor, "),
        ({"use": 3}, "optimizer needs 'use'"),
        (None, "optimizer needs 'use'"),
        (
            {"use": "sgd", "lr": 0.1},
            "optimizer sgd has no setting 'lr'. In a recipe that is schedule.learning_rate",
        ),
        ({"use": "sgd", "clip": "x"}, "optimizer.clip: 'x' is not a number"),
        ({"use": "sgd", "clip": 1.0, "clip_value": 1.0}, "optimizer.clip_value: give clip"),
    ],
)
def test_a_mistake_in_a_part(settings: Any, said: str) -> None:
    assert refusal(settings, "optimizers").startswith(said)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("tiny_part.NUMBER", "holds no Config"),
        ("tiny_part.Nte", "cannot be imported: tiny_part has no 'Nte'"),
        ("broken_part.Net", "cannot be imported: ZeroDivisionError: division by zero"),
        (
            "nowhere.Net",
            "cannot be imported: no package or file 'nowhere' is installed, on PYTHONPATH or in /",
        ),
        ("..", "cannot be imported"),
    ],
)
def test_what_cannot_be_imported_is_a_mistake_at_use(use: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        find("models", use)
    assert caught.value.mistakes[0].path == ("use",)


def test_ctrl_c_while_a_library_is_imported_is_no_mistake(tmp_path: Path) -> None:
    """Paddle's library in C turned it into an ImportError, "initialization failed", and the command ended with 2."""
    (tmp_path / "broken_part.py").write_text(
        "raise ImportError('initialization failed') from KeyboardInterrupt()"
    )
    with pytest.raises(KeyboardInterrupt):
        find("models", "broken_part.Net")


def test_a_file_of_ones_own_that_is_no_part_and_hides_a_shipped_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone with a models/gpt.py of its own it was said of "model gpt", as if ours had no Config."""
    (tmp_path / "models").mkdir()
    for name in ("gpt", "other"):
        (tmp_path / "models" / f"{name}.py").write_text("class Net: ...")
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
        monkeypatch.delitem(sys.modules, name)
    said = refusal({"use": "gpt", "width": 32})
    assert said.endswith(
        f"model gpt is {tmp_path}/models/gpt.py here, which holds no Config, and hides the model gpt that comes with "
        "paddle_dp: give the file another name, or name a class or function in it (use: models.gpt.CLASS), or give it "
        "a Config"
    )
    assert "other.py here, which holds no Config: name a class" in refusal({"use": "other"})
    for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
        del sys.modules[name]


@pytest.mark.parametrize("use", ["needs_paddle.Net", "paddle.vision.models.resnet18"])
def test_a_missing_paddle_is_told_with_the_command_that_installs_it(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n == "paddle" or n.startswith("paddle.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(InstallError, match=r"pip install -e '\.\[cpu\]'"):
        find("models", use)


def test_a_name_longer_than_a_file_can_have_is_no_name() -> None:
    with pytest.raises(RecipeError, match="there is no optimizer"):
        read_part("optimizers", {"use": "x" * 5000}, "optimizer")
