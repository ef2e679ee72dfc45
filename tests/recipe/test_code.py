"""A run keeps the code of its parts, and is evaluated where that code is not."""

import sys

import pytest

from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.recipe import code, foreign_code, read_recipe
from tests.house.recipes import small_recipe

RECIPE = small_recipe(
    "length: 1 epoch, batch: 10", model="MODEL", schedule="constant, learning_rate: 0.1", strategy="single"
)
NET = """
from paddle import nn
import own_words_of_NAME
from tests.house.recipes import small_recipe


class Net(nn.Linear):
    def __init__(self, width: int = 3):
        super().__init__(own_words_of_NAME.SIZE, width)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with a run whose model's code stood in another folder, which is gone."""
    name = tmp_path.name.replace("-", "_")
    home = tmp_path / "home"
    home.mkdir()
    (home / f"net_of_{name}.py").write_text(NET.replace("NAME", name))
    (home / f"own_words_of_{name}.py").write_text("SIZE = 64\n")
    (home / "recipe.yaml").write_text(RECIPE.replace("MODEL", f"net_of_{name}.Net"))
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    read_recipe(home / "recipe.yaml").model.build()
    run = tmp_path / "run"
    run.mkdir()
    kept = code.keep(run)
    (run / "recipe.yaml").write_text((home / "recipe.yaml").read_text())
    for file in list(home.iterdir()):
        if file.is_file():
            file.unlink()
    forget(name)
    sys.path.remove(str(home))
    monkeypatch.chdir(tmp_path)
    yield run, kept, name
    forget(name)


def forget(name):
    for module in [module for module in sys.modules if module.endswith(f"_of_{name}")]:
        del sys.modules[module]


def test_what_was_imported_from_the_working_folder_is_kept(elsewhere):
    run, kept, name = elsewhere
    own = [file.relative_to(run / "code").name for file in kept if name in file.name]
    assert own == [f"net_of_{name}.py", f"own_words_of_{name}.py"]
    assert not any("paddle_dp" in file.parts[-3:] for file in kept)


def test_the_run_is_read_where_the_code_is_not_and_says_so_first(elsewhere):
    run, _, name = elsewhere
    assert foreign_code(run / "recipe.yaml") == [f"run/code/net_of_{name}.py"]
    assert read_recipe(run / "recipe.yaml").model.build().weight.shape == [64, 3]
    again = run.parent / "again"
    again.mkdir()
    copies = code.keep(again)
    assert (again / "code" / f"net_of_{name}.py") in copies
    assert code.keep(run)  # from its own copies
    assert (run / "code" / f"own_words_of_{name}.py").read_text() == "SIZE = 64\n"


def test_code_that_has_changed_since_is_found(elsewhere):
    run, _, name = elsewhere
    assert code.changed(run / "recipe.yaml") == []
    place = run.parent / f"own_words_of_{name}.py"  # in the working folder, where Python looks first
    copy = run / "code" / place.name
    place.write_bytes(copy.read_bytes())
    assert code.changed(run / "recipe.yaml") == []
    place.write_text("SIZE = 32\n")
    assert code.changed(run / "recipe.yaml") == [(place, copy)]
    (run / "code" / "models").mkdir()
    (run / "code" / "models" / "own.py").write_text("A = 1\n")
    assert code.changed(run / "recipe.yaml") == [(place, copy)]
    (run.parent / "models").mkdir()
    (run.parent / "models" / "own.py").write_text("A = 2\n")
    assert [file.name for file, _ in code.changed(run / "recipe.yaml")] == ["own.py", place.name]


def test_without_the_copies_the_missing_file_is_named(elsewhere):
    run, kept, name = elsewhere
    for file in kept:
        file.unlink()
    with pytest.raises(RecipeError, match=f"no package or file 'net_of_{name}'"):
        read_recipe(run / "recipe.yaml")


@pytest.mark.parametrize("resume", [None, "newest"])
def test_a_users_folder_of_that_name_is_refused_and_a_runs_is_not(tmp_path, resume):
    """A start deleted a user's own folder code/, and all that was in it."""
    tool = tmp_path / "code" / "tool.py"
    code.check_copies(tmp_path, resume)
    tool.parent.mkdir()
    tool.touch()
    with pytest.raises(UsageError, match=r"code is not from a run.* --output-dir DIR"):
        code.check_copies(tmp_path, resume)
    (tmp_path / "checkpoints").mkdir()  # as of a script's run, which keeps no code
    if resume is None:
        code.check_copies(tmp_path, resume)  # it moves aside, as it is
    else:
        with pytest.raises(UsageError, match="code is not from a run"):
            code.check_copies(tmp_path, resume)
    for name, content in (("recipe.yaml", "# Resolved: …\nmodel: …"), ("inputs.json", "{}")):
        (tmp_path / name).write_text(content)
        code.check_copies(tmp_path, resume)
        (tmp_path / name).unlink()


def test_only_the_copies_of_an_earlier_attempt_are_replaced(elsewhere):
    """A resume removes a copy that is not imported any more, and no file of the user's."""
    run, kept, name = elsewhere
    (run / "code" / "tool.py").write_text("mine")
    read_recipe(run / "recipe.yaml").model.build()
    assert code.keep(run) == kept
    forget(name)
    assert not {*kept} & {*code.keep(run)} and (run / "code" / "tool.py").read_text() == "mine"
    assert not any(file.exists() for file in kept if name in file.name)


def test_own_models_are_kept_and_found_behind_those_of_the_working_folder(tmp_path, monkeypatch):
    home, run, other = (tmp_path / word for word in ("home", "run", "other"))
    for folder in (home / "models", run, other / "models"):
        folder.mkdir(parents=True)
    text = "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    def build(self):\n"
    text += "        return 'WHOSE'\n"
    (home / "models" / "kept_one.py").write_text(text.replace("WHOSE", "mine"))
    (other / "models" / "another.py").write_text(text.replace("WHOSE", "other"))
    (home / "recipe.yaml").write_text(RECIPE.replace("MODEL", "kept_one"))
    monkeypatch.chdir(home)
    assert read_recipe(home / "recipe.yaml").model.build() == "mine"
    code.keep(run)
    (run / "recipe.yaml").write_text((home / "recipe.yaml").read_text())
    monkeypatch.chdir(other)
    assert foreign_code(run / "recipe.yaml") == [str(run / "code" / "models" / "kept_one.py")]
    assert read_recipe(run / "recipe.yaml").model.build() == "mine"
    assert read_recipe(run / "recipe.yaml", ("model.use=another",)).model.build() == "other"
