"""Any importable class or function as a part."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.part import ErrorContext, read_part, read_settings, settings_of
from paddle_dp.part.call import config_of, resolve

NET = ErrorContext(subject="model Net", prefix="model")


class Net:
    def __init__(self, width: int, act: Any = print, names: list[str] | None = None, *, odd: Tensor = 1):  # noqa: F821
        self.given = (width, act, names, odd)


def opened(first: int = 1, **more: Any) -> dict[str, Any]:
    return {"first": first, **more}


def dataset(split: str, path: str) -> tuple[str, str]:
    return split, path


def schedule(*, steps: int, peak: float) -> tuple[int, float]:
    return steps, peak


def test_a_schedule_is_given_what_it_asks_for() -> None:
    length = {"steps": 90, "steps_per_epoch": 30, "batch": 8}
    given = read_part(
        "schedules", {"use": "paddle.optimizer.lr.StepDecay", "learning_rate": 0.5, "step_size": 2}
    )
    assert given.build(**length)() == 0.5
    assert config_of(opened, "schedules")().build(**length) == {"first": 1, **length}


def test_parameters_are_settings() -> None:
    config = config_of(Net, "models")
    assert [s.name for s in settings_of(config)] == ["width", "act", "names", "odd"]
    assert read_settings(config, {"width": 3, "names": ["a"]}, NET).build().given == (3, print, ["a"], 1)


def test_a_function_that_empties_its_mapping_leaves_the_recipe_as_it_is() -> None:
    """A second model of the same recipe was another one."""

    def head(config: dict[str, Any]) -> tuple[Any, Any]:
        return config.pop("name"), config["layers"].pop()

    config = read_settings(config_of(head, "models"), {"config": {"name": "a", "layers": [1, 2]}}, NET)
    assert [config.build(), config.build()] == [("a", 2)] * 2


def test_mistakes_are_told_as_for_any_part() -> None:
    with pytest.raises(RecipeError) as caught:
        read_settings(config_of(Net, "models"), {"width": "x", "wdth": 1}, NET)
    assert "model.width: 'x' is not a whole number" in str(caught.value)
    assert "model Net has no setting 'wdth'. Did you mean 'width'?" in str(caught.value)


def test_keywords_without_names_take_anything() -> None:
    assert read_settings(config_of(opened, "models"), {"classes": 3}, NET).build() == {
        "first": 1,
        "classes": 3,
    }


def absolute(outputs: float, targets: float, power: float = 1.0) -> float:
    return abs(outputs - targets) ** power


def test_a_function_of_outputs_and_targets_is_a_loss_itself() -> None:
    config = config_of(absolute, "losses")
    assert read_settings(config, {}, NET).build() is absolute
    cubed = read_settings(config, {"power": 3}, NET).build()
    assert cubed(5, 3) == 8 and cubed.__name__ == "absolute"
    with pytest.raises(RecipeError, match=r"has no setting 'powr'\. Did you mean 'power'"):
        read_settings(config, {"powr": 3}, NET)


@pytest.mark.parametrize("given", [{"outputs": 1}, {"outputs": 1, "targets": 4}])
def test_what_the_training_gives_is_no_setting_of_a_loss(given: dict[str, int]) -> None:
    assert [s.name for s in settings_of(config_of(absolute, "losses"))] == ["power"]
    said = r"loss tests\.part\.test_call\.absolute has no setting 'outputs'\. 'outputs' is given by the training\. "
    with pytest.raises(
        RecipeError, match=said + r"A loss factory takes its settings by name: def make\(\*, …\)"
    ):
        read_part("losses", {"use": "tests.part.test_call.absolute", **given})


def made(*, power: float) -> Any:
    return ("made", power)


def test_what_makes_a_loss_is_called() -> None:
    assert read_settings(config_of(opened, "losses"), {"first": 2}, NET).build() == {"first": 2}
    assert read_settings(config_of(made, "losses"), {"power": 3.0}, NET).build() == ("made", 3.0)
    assert isinstance(read_settings(config_of(Net, "losses"), {"width": 3}, NET).build(), Net)


def test_what_build_is_given_is_no_setting() -> None:
    assert read_settings(config_of(dataset, "datasets"), {"path": "p"}, NET).build("train") == ("train", "p")
    assert read_settings(config_of(schedule, "schedules"), {"peak": 1.0}, NET).build(steps=5) == (5, 1.0)


@pytest.mark.parametrize(
    ("shelf", "make", "given", "settings", "built"),
    [
        ("callbacks", lambda: "nothing", ["run"], {}, "nothing"),
        ("callbacks", lambda *, every=2: every, ["run"], {"every": 3}, 3),
        ("callbacks", lambda *parts, **more: (parts, more), ["run"], {}, (("run",), {})),
        ("callbacks", lambda of=None: of, ["run"], {}, "run"),
        ("datasets", lambda path, split: (path, split), ["test"], {"path": "a"}, ("a", "test")),
        ("datasets", lambda *, split, path: (path, split), ["test"], {"path": "a"}, ("a", "test")),
        ("datasets", lambda *, path, split="train": (path, split), ["test"], {"path": "a"}, ("a", "test")),
        ("datasets", lambda part="train", split=0.8: (part, split), ["test"], {"split": 0.9}, ("test", 0.9)),
        ("callbacks", lambda training, run=None: (training, run), ["run"], {"run": "a"}, ("run", "a")),
        ("datasets", lambda part, path: (path, part), ["test"], {"path": "a"}, ("a", "test")),
        ("adapters", lambda seed, model: (seed, model), ["model", 3], {}, (3, "model")),
        ("adapters", lambda net, number: (net, number), ["model", 3], {}, ("model", 3)),
    ],
)
def test_arguments_of_the_training_come_first_or_under_their_names(
    shelf: str, make: Any, given: list[Any], settings: dict[str, Any], built: Any
) -> None:
    assert read_settings(config_of(make, shelf), settings, NET).build(*given) == built


@pytest.mark.parametrize(
    ("shelf", "make", "said"),
    [
        (
            "datasets",
            lambda: None,
            "gets the split, 'train' or 'test', first, and it takes too few arguments",
        ),
        ("datasets", lambda *, size: None, r"it takes too few arguments: def make\(split, …\)"),
        ("datasets", lambda size=100: None, "its first argument is size: int"),
        ("datasets", lambda train=True: None, "its first argument is train: bool"),
        (
            "callbacks",
            lambda every=1.0: None,
            "it gets the run first, and its first argument is every: float",
        ),
        (
            "optimizers",
            type("Own", (), {"__init__": lambda self, parameters: None}),
            "self, learning_rate, parameters",
        ),
        ("adapters", lambda model: None, "it gets model and seed first, and it takes too few arguments"),
    ],
)
def test_a_part_that_cannot_take_the_arguments_of_the_training_is_refused(
    shelf: str, make: Any, said: str
) -> None:
    """A rank raised a bare TypeError; a data set with `train=True` had the same samples for both splits, silently."""
    with pytest.raises(ValueError, match=said):
        config_of(make, shelf)


def test_resolve_reaches_modules_and_what_is_in_them() -> None:
    assert resolve("json.decoder") is sys.modules["json.decoder"]
    assert resolve("json.decoder.JSONDecoder.decode").__name__ == "decode"


def test_a_file_and_the_function_in_it_may_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As paddle.vision.models.alexnet."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/__init__.py").write_text("from .alex import alex\nfrom . import plain")
    (tmp_path / "nets/alex.py").write_text("def alex(): return 1")
    (tmp_path / "nets/plain.py").write_text("class Config: ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("nets.alex")() == 1 and isinstance(resolve("nets.plain"), ModuleType)
    assert resolve("nets.alex.alex")() == 1


@pytest.mark.parametrize(
    ("dotted", "said"),
    [("no_such.thing", "no package or file 'no_such'"), ("json.decoder.Nope", "json.decoder has no 'Nope'")],
)
def test_what_is_not_there(dotted: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        resolve(dotted)


def test_a_package_that_a_module_lacks_is_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        resolve("lacking.Net")


def test_the_working_folder_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_thing.py").write_text("HERE = 1")
    (tmp_path / "wave.py").write_text("raise RuntimeError('hides the standard library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert isinstance(resolve("wave"), ModuleType) and resolve("my_own_thing.HERE") == 1


class Rule:
    """As Paddle's optimizers: `parameters` are tensors, and not the second argument."""

    def __init__(self, learning_rate: float = 0.1, beta: float = 0.9, parameters: Any = None):
        self.given = (learning_rate, beta, parameters)


def rule(learning_rate: float, named_parameters: Any, beta: float = 0.9) -> tuple[float, Any, float]:
    return learning_rate, named_parameters, beta


def test_a_class_that_takes_parameters_is_given_them_without_names() -> None:
    config = config_of(Rule, "optimizers")
    assert [s.name for s in settings_of(config)] == ["beta"]
    named = [("weight", 1), ("bias", 2)]
    assert read_settings(config, {"beta": 0.5}, NET).build(0.3, named).given == (0.3, 0.5, [1, 2])
    with pytest.raises(RecipeError, match=r"has no setting 'learning_rate'"):
        read_settings(config, {"learning_rate": 1.0}, NET)
    plain = read_settings(config_of(rule, "optimizers"), {"beta": 0.5}, NET)
    assert plain.build(0.3, named) == (0.3, named, 0.5)


class OpenRule(Rule):
    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)


class ListRule:
    def __init__(self, learning_rate: float = 0.1, parameter_list: Any = None):
        self.given = (learning_rate, parameter_list)


def test_a_class_with_open_arguments_or_a_list_of_parameters_is_given_tensors() -> None:
    """It got pairs of name and tensor, and failed inside of Paddle."""
    named = [("weight", 1), ("bias", 2)]
    made = read_settings(config_of(OpenRule, "optimizers"), {"beta": 0.5}, NET).build(0.3, named)
    assert made.given == (0.3, 0.5, [1, 2])
    assert config_of(ListRule, "optimizers")().build(0.3, named).given == (0.3, [1, 2])


def test_an_optimizer_of_paddle_is_named_by_its_class() -> None:
    import paddle

    weight = paddle.create_parameter([2], "float32")
    config = config_of(paddle.optimizer.Lamb, "optimizers")
    made = read_settings(config, {"lamb_weight_decay": 0.02}, NET).build(0.3, [("weight", weight)])
    assert made.get_lr() == 0.3 and made._parameter_list == [weight]


def test_paddleclas_gets_the_logger_that_its_models_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imitation of its package: a constructor fails without the logger."""
    for folder in ("ppcls", "ppcls/utils"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "ppcls/utils/logger.py").write_text(
        "import logging\n_logger = None\n"
        "def init_logger(name='ppcls', log_level=logging.INFO):\n"
        "    global _logger\n    _logger = logging.getLogger(name)\n    _logger.setLevel(log_level)\n"
    )
    (tmp_path / "ppcls/nets.py").write_text(
        "from paddle.nn import Linear\nfrom ppcls.utils import logger\n"
        "def Net(class_num=2):\n    logger._logger.warning('lr_mult_list')\n    return Linear(1, class_num)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = read_part("models", {"use": "ppcls.nets.Net", "class_num": 3}).build()
    assert model.weight.shape == [1, 3]
