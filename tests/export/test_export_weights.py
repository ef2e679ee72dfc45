"""`export --hf`: a run's weights under Hugging Face's or PyTorch's names, and read as weights to begin with again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dp.assembly.build import build
from paddle_dp.checkpoint import load
from paddle_dp.checkpoint.source import SafetensorsFile
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.export.hugging_face import export, tokenizer_files
from paddle_dp.export.target import check_target, new_export
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import read_recipe
from tests.house.recipes import small_recipe

TOKENS = "random_tokens, vocab: 20, length: 8, samples: 8, test_samples: 4"
GPT = "{use: gpt, vocab: 20, width: 16, depth: 2, heads: 4, length: 8, tied: true}"


def recipe(folder: Path, out: str, model: str = GPT, more: str = "") -> Any:
    file = folder / f"{out}.yaml"
    file.write_text(small_recipe(
        "length: 1 step, batch: 4", more, model=model, dataset=TOKENS, strategy="single",
        callbacks="[{use: checkpoint}]", output_dir=str(folder / out),
    ))  # fmt: skip
    return read_recipe(file)


def trained(folder: Path, out: str, **how: str) -> Any:
    made = recipe(folder, out, **how)
    build(made, Mesh.alone()).fit()
    return made


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of GPT, its recipe run.yaml, and what is exported of it, hf."""
    folder = tmp_path_factory.mktemp("begun")
    export(trained(folder, "run"), {"to": str(folder / "hf")})
    return folder


def weights(trainer: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in trainer.learner.placed.state().items()}


def assert_begins_with(read: Any, saved: Any, kind: str = "model") -> None:
    """A recipe's training begins with the weights of a checkpoint."""
    for name, value in weights(build(read, Mesh.alone())).items():
        np.testing.assert_array_equal(value, saved.read(f"{kind}/{name}"))


def test_what_is_exported_is_where_a_training_can_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trained(tmp_path, "run", more="ema: {decay: 0.5}")
    export(made, {"to": str(tmp_path / "hf")})
    assert "28 tensors, for GPT2LMHeadModel" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == [
        "config.json", "export.json", "model.safetensors",
    ]  # fmt: skip
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["model_type"], config["n_embd"], config["tie_word_embeddings"]) == ("gpt2", 16, True)
    saved = load(tmp_path / "run/checkpoints/step-00000001")
    again = recipe(tmp_path, "again", model=f"{{use: gpt, from: {tmp_path / 'hf'}}}")
    assert_begins_with(again, saved)
    export(made, {"to": str(tmp_path / "hf"), "ema": True})  # an older export is replaced
    assert_begins_with(again, saved, "ema")


def tokenizer_in(folder: Path, **config: Any) -> None:
    """Adds a tokenizer with special tokens 17 and 18, and keys of config.json, to a folder."""
    added = [{"id": 17, "content": "<s>"}, {"id": 18, "content": "</s>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"type": "BPE"}}))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "config.json"
    if file.exists():
        content = json.loads(file.read_text()) | config
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 0}, (3, [4, 5], 0)),
        ({"bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ...}, (17, 18, None)),
        ({"bos_token_id": 20, "eos_token_id": [4, 99], "pad_token_id": -1}, (None, None, None)),
    ],
)
def test_the_tokenizer_goes_with_the_model(
    begun: Path, tmp_path: Path, config: dict[str, Any], ids: tuple[Any, ...]
) -> None:
    shutil.copytree(begun / "hf", tmp_path / "hf")
    first = json.loads((tmp_path / "hf/config.json").read_text())
    # Not the class's defaults.
    assert [first[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    tokenizer_in(tmp_path / "hf", **config)
    made = trained(tmp_path, "again", model=f"{{use: gpt, from: {tmp_path / 'hf'}}}")
    export(made, {"to": str(tmp_path / "out")})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "out" / name
        if file.exists() or any(ids):
            content = json.loads(file.read_text())
            assert tuple(content[f"{name}_token_id"] for name in ("bos", "eos", "pad")) == ids


def test_the_data_sets_tokenizer_comes_first(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "own").mkdir()
    for name in ("base", "own"):
        tokenizer_in(tmp_path / name)
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": 9}')
    (tmp_path / "my.json").write_text((tmp_path / "own/tokenizer.json").read_text())
    base = SimpleNamespace(path=str(tmp_path / "base"))

    def files(tokenizer: Any) -> Any:
        data = SimpleNamespace(tokenizer=tokenizer) if tokenizer else SimpleNamespace()
        return tokenizer_files(SimpleNamespace(dataset=SimpleNamespace(config=data), load=base), 20)  # type: ignore[arg-type]

    assert files("bytes").files == {} and files("bytes").ids["eos_token_id"] is None
    own = files(str(tmp_path / "own/tokenizer.json"))
    assert own.folder == tmp_path / "own" and sorted(own.files) == ["tokenizer.json", "tokenizer_config.json"]
    assert files(str(tmp_path / "my.json")).files == {"tokenizer.json": tmp_path / "my.json"}
    assert files(None).ids == {"bos_token_id": 17, "eos_token_id": 9, "pad_token_id": None}
    assert "generation_config.json" in files(None).files


def test_a_run_needs_the_folder_no_more_after_it_began(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun / "hf", tmp_path / "hf")
    made = trained(tmp_path, "begun", model=f"{{use: gpt, from: {tmp_path / 'hf'}, dropout: 0.1}}")
    (tmp_path / "hf").rename(tmp_path / "gone")
    from paddle_dp.recipe import write_recipe

    write_recipe(made, tmp_path / "resolved.yaml")
    resolved = read_recipe(tmp_path / "resolved.yaml")
    assert resolved.model.settings == made.model.settings and resolved.model.settings["width"] == 16
    assert build(resolved, Mesh.alone(), "newest").progress.step == 1


def test_an_adapter_is_added_to_what_it_stands_on(begun: Path, tmp_path: Path) -> None:
    more = f"load: {{path: {begun / 'run'}}}\nadapter: {{use: lora, rank: 2, match: ['*.up']}}"
    tuned = trained(tmp_path, "tuned", more=more)
    export(tuned, {"to": str(tmp_path / "hf")})
    base = load(begun / "run/checkpoints/step-00000001")
    read = recipe(tmp_path, "again", model=f"{{use: gpt, from: {tmp_path / 'hf'}}}")
    again = weights(build(read, Mesh.alone()))
    changed = {name for name, value in again.items() if (value != base.read(f"model/{name}")).any()}
    assert changed == {"blocks.1.up.weight", "blocks.2.up.weight"}


def test_a_model_without_a_table_has_pytorchs_names(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "{model: {use: mlp, inputs: 64, hidden: [5], classes: 10}, dataset: {use: digits}, loss: {use: cross_entropy}, "
        "optimizer: {use: sgd}, train: {length: 1 step, batch: 8}, strategy: {use: single}, "
        f"callbacks: [{{use: checkpoint}}], output_dir: {tmp_path / 'run'}}}"
    )
    made = read_recipe(file)
    build(made, Mesh.alone()).fit()
    export(made, {"to": str(tmp_path / "hf")})
    assert not (tmp_path / "hf/config.json").exists()
    written = SafetensorsFile(tmp_path / "hf/model.safetensors")
    saved = load(tmp_path / "run/checkpoints/step-00000001")
    assert written.from_torch and written.shape("head.weight") == (10, 5)
    np.testing.assert_array_equal(written.read("head.weight").T, saved.read("model/head.weight"))
    again = read_recipe(file, [f"load.path={tmp_path / 'hf'}", f"output_dir={tmp_path / 'again'}"])
    assert_begins_with(again, saved)


def test_a_folder_of_other_files_is_left_alone(begun: Path, tmp_path: Path) -> None:
    made = read_recipe(begun / "run.yaml")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="hf holds something else already"):
        export(made, {"to": str(tmp_path / "hf")})
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["mine.txt"]
    with pytest.raises((UsageError, CheckpointError), match="step 7"):
        export(made, {"to": str(tmp_path / "other"), "checkpoint": "7"})
    assert not (tmp_path / "other").exists()


def test_the_working_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hf/older").mkdir(parents=True)
    (tmp_path / "hf/export.json").write_text("{}")  # an older export, which may be replaced otherwise
    monkeypatch.chdir(tmp_path / "hf/older")
    for folder in (Path(), Path(".."), tmp_path / "hf", Path("/")):
        with pytest.raises(UsageError, match="is the working folder, or holds it"):
            check_target(folder)
    check_target(Path("new"))
    with new_export(Path("../older/../new")) as partial:
        (partial / "export.json").write_text("{}")
        (partial / "model.json").touch()
    new = tmp_path / "hf/new"
    for tools in (".DS_Store", "_opt_cache"):
        (new / tools).touch()
    check_target(new)
    for name in ("serve.py", ".git"):
        (new / name).touch()
        with pytest.raises(UsageError, match=rf"holds something else already \({re.escape(name)}\)"):
            check_target(new)  # which an export would have removed
        (new / name).unlink()
    for foreign in ("[]", '{"files": 1}', "1"):
        (new / "export.json").write_text(foreign)
        with pytest.raises(UsageError, match=r"holds something else already"):
            check_target(new)
