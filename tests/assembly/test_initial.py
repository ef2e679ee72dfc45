"""A training that begins with the weights of an earlier one: what is meant, what fits, in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle import nn

from models import gpt
from paddle_dp.assembly.build import build
from paddle_dp.assembly.initial import match
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import load, merge
from paddle_dp.checkpoint.other_names import HUGGING_FACE, names_of, origins_of
from paddle_dp.checkpoint.source import SafetensorsFile, source
from paddle_dp.errors import CheckpointError, PaddleDPError, UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Load, read_recipe
from tests.checkpoint.test_other_names import written
from tests.house.datasets import Samples
from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, trained
from tests.ranks import run_ranks

HERE = {"backbone.0.weight": (8, 4), "backbone.0.bias": (4,), "head.weight": (4, 3), "head.bias": (3,)}
THERE = {"backbone.0.weight": (8, 4), "backbone.0.bias": (4,), "head.weight": (4, 9), "old.bias": (2,)}


def text_of(strategy: str, seed: int, vocab: int, more: str) -> str:
    return small_recipe(
        f"length: 2 steps, batch: 8, seed: {seed}", more, strategy=strategy,
        model=f"gpt, vocab: {vocab}, width: 32, depth: 4, heads: 4, length: 16",
        dataset=f"random_tokens, vocab: {vocab}, length: 16, samples: 16, test_samples: 8",
        callbacks="[{use: checkpoint, best: loss}, {use: evaluate}]",
    )  # fmt: skip


def recipe(
    folder: Path, out: str, more: str = "", strategy: str = "{use: single}", seed: int = 1, vocab: int = 32
) -> Any:
    path = folder / f"{out}.yaml"
    path.write_text(text_of(strategy, seed, vocab, more))
    return read_recipe(path, [f"output_dir={folder / out}"])


def test_what_fits_and_what_does_not() -> None:
    found = match(THERE, HERE, Load(path="x", strict=False))
    assert found.loaded == ("backbone.0.bias", "backbone.0.weight")
    assert (found.other, found.left_over, found.initial) == (("head.weight",), ("old.bias",), ("head.bias",))


@pytest.mark.parametrize("pattern", ["backbone.*", "backbone", "backbone.0"])
def test_a_pattern_or_a_layer_says_what_is_meant(pattern: str) -> None:
    found = match(THERE, HERE, Load(path="x", only=(pattern,)))
    assert len(found.loaded) == 2 and not (found.other or found.left_over or found.initial)


@pytest.mark.parametrize(
    ("there", "wanted", "words"),
    [
        (THERE, {"only": ("bakbone.*",)}, r"'bakbone\.\*' matches nothing in x\. Did you mean 'backbone\.0'\?"),
        (THERE, {"only": ("head", "old")}, r"'old' matches nothing in this model"),
        (THERE, {}, r"head\.weight is \[4, 9\] there and \[4, 3\] here; old\.bias is only there; head\.b"),
        (THERE, {"only": ("head",), "strict": False}, r"only 0 of the 15 numbers that are meant fit"),
        ({"head.bias": (3,)}, {"strict": False}, r"only 3 of the 51 numbers that are meant fit.*load\.on"),
    ],
)  # fmt: skip
def test_what_is_refused(there: dict[str, tuple[int, ...]], wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        match(there, HERE, Load(path="x", **wanted))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("first")
    build(recipe(folder, "run"), Mesh.alone()).fit()
    return folder / "run"


def weights(learner: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in learner.placed.state().items()}


@pytest.mark.parametrize("which", ["run", "step", "best", "checkpoint", "merged"])
def test_all_words_for_a_source(
    first: Path, tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {
        "run": first, "step": first / "2", "best": first / "best",
        "checkpoint": first / "checkpoints/step-00000002", "merged": tmp_path / "merged.safetensors",
    }[which]  # fmt: skip
    if which == "merged":
        merge(first / "checkpoints/step-00000002", path)
    trainer = build(recipe(tmp_path, "new", f"load: {{path: {path}}}", seed=2), Mesh.alone())
    saved = load(first / "checkpoints/step-00000002")
    for name, value in weights(trainer.learner).items():
        np.testing.assert_array_equal(value, saved.read(f"model/{name}"))
    assert trainer.progress.step == 0 and "loaded" in capsys.readouterr().out
    if which == "run":
        trainer.fit()
        again = build(recipe(tmp_path, "new", f"load: {{path: {path}}}", seed=2), Mesh.alone(), "newest")
        assert again.progress.step == 2 and "weights from" not in capsys.readouterr().out


def test_a_part_of_it_for_fine_tuning(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"load: {{path: {first}, only: ['blocks.1.*', 'blocks.2.*'], strict: false}}"
    before = weights(build(recipe(tmp_path, "plain", seed=2, vocab=40), Mesh.alone()).learner)
    after = weights(build(recipe(tmp_path, "new", more, seed=2, vocab=40), Mesh.alone()).learner)
    saved = load(first / "checkpoints/step-00000002")
    for name, value in after.items():
        meant = name.startswith(("blocks.1.", "blocks.2."))
        np.testing.assert_array_equal(value, saved.read(f"model/{name}") if meant else before[name])
    assert "only blocks.1.*, blocks.2.*" in capsys.readouterr().out


def test_a_script_gives_it_as_a_path_or_as_a_recipe_does(tmp_path: Path) -> None:
    ones = Samples(4, lambda i: (np.ones(4, "float32"), np.int64(i % 2)))

    def trainer(folder: Path, **given: Any) -> Trainer:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        loss, schedule = {"use": "cross_entropy"}, {"use": "constant", "learning_rate": 0.1}
        return Trainer.of(
            model=model, loss=loss, optimizer="sgd", schedule=schedule, train=ones, batch=2, length="1 epochs",
            folder=folder, callbacks=["checkpoint"], **given,
        )  # fmt: skip

    trainer(tmp_path / "old").fit()
    saved = load(tmp_path / "old/checkpoints/step-00000002")
    for given in (tmp_path / "old", {"path": str(tmp_path / "old"), "only": ["0", "1.bias"]}):
        for name, value in weights(trainer(tmp_path / "new", load=given).learner).items():
            if isinstance(given, Path) or name != "1.weight":
                np.testing.assert_array_equal(value, saved.read(f"model/{name}"))
    with pytest.raises(UsageError, match=r"load has no setting 'onyl'\. Did you mean 'only'"):
        trainer(tmp_path / "new", load={"path": "x", "onyl": []})


def test_another_model_is_named(first: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is \[32, 32\] there and \[40, 32\] here"):
        build(recipe(tmp_path, "new", f"load: {{path: {first}}}", vocab=40), Mesh.alone())
    with pytest.raises(CheckpointError, match=r"load\.path: there is no .*nowhere"):
        build(recipe(tmp_path, "new", "load: {path: nowhere}"), Mesh.alone())


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match="makes no sense"):
        source(tmp_path / "weights.safetensors")


def test_any_box_of_a_safetensors_file(first: Path, tmp_path: Path) -> None:
    merge(first / "checkpoints/step-00000002", tmp_path / "merged.safetensors")
    opened = SafetensorsFile(tmp_path / "merged.safetensors")
    saved = load(first / "checkpoints/step-00000002")
    name = next(name for name in opened.names if len(opened.shape(name)) == 2)
    np.testing.assert_array_equal(opened.read(name, (3, 2), (5, 4)), saved.read(f"model/{name}")[3:8, 2:6])


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "{use: data_parallel}"),
        (2, "{use: hybrid, tensor: 2}"),
        (2, "{use: hybrid, pipeline: 2}"),
        (2, "{use: hybrid, sharding: 2, sharding_stage: 3}"),
        (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
    ],
)
def test_any_layout_begins_with_them(first: Path, tmp_path: Path, ranks: int, strategy: str) -> None:
    text = text_of("single", 2, 32, f"load: {{path: {first}}}")
    one = run_ranks(trained, 1, text, str(tmp_path / "one"), "callbacks=[]")
    many = run_ranks(trained, ranks, text, str(tmp_path / "many"), "callbacks=[]", f"strategy={strategy}")
    begun, saved = load(Path(many[0]["begun"])), load(first / "checkpoints/step-00000002")
    for name in saved.names:
        if name.startswith("model/"):
            np.testing.assert_array_equal(begun.read(name), saved.read(name))
    for found in many:
        np.testing.assert_allclose(found["rows"], one[0]["rows"], rtol=1e-5)
    assert json.dumps(many[0]["rows"])


TIED = {"blocks.0.token.weight", "blocks.3.out.weight"}


def tied_weights(texts: dict[str, str], folder: str) -> dict[str, Any]:
    """In a rank: for each recipe the sums of the names of GPT's tied weight here, after a step, or the error."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            trainer = build_trainer(text, f"{folder}/{len(found)}")
            found[name] = [
                float(x.numpy().sum()) for n, x in trainer.learner.placed.state().items() if n in TIED
            ]
            trainer.fit()
        except PaddleDPError as error:
            found[name] = str(error)
    return found


def test_a_tied_weight_is_one_in_every_layout(tmp_path: Path) -> None:
    """Of two in a file the last one won on one process, or the head was passed over, silently; a pipeline loaded each
    on its stage, or a selected one on one stage, and blamed the ranks."""
    model = gpt.Config(vocab=32, width=32, depth=2, heads=4, length=16, tied=True).build()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    token, head = state["blocks.0.token.weight"], state["blocks.3.out.weight"] + 1
    theirs: dict[str, np.ndarray] = {}
    for name, origin in origins_of(names_of(model).names[HUGGING_FACE]).items():
        theirs |= origin.written(state[name])
    two = written(tmp_path / "two.safetensors", {"format": "pd"}, **{**state, "blocks.3.out.weight": head})
    one = {name: array for name, array in state.items() if name != "blocks.3.out.weight"}
    files = {
        "two": f"{{path: {two}}}", "two, of Hugging Face's": {**theirs, "lm_head.weight": head},
        "equal, of Hugging Face's": {**theirs, "lm_head.weight": token},
        "one": f"{{path: {written(tmp_path / 'one.safetensors', {'format': 'pd'}, **one)}}}",
        "token selected": f"{{path: {two}, only: [blocks.0.token]}}",
        "head selected": f"{{path: {two}, only: [blocks.3.out]}}",
    }  # fmt: skip
    texts = {}
    for name, content in files.items():
        if isinstance(content, dict):
            file = written(tmp_path / f"{len(texts)}.safetensors", {"format": "pt"}, **content)
            content = f"{{path: {file}}}"
        texts[name] = small_recipe(
            "length: 1 steps, batch: 8, seed: 2", f"load: {content}", strategy="STRATEGY", callbacks="[]",
            model="gpt, vocab: 32, width: 32, depth: 2, heads: 4, length: 16, tied: true",
            dataset="random_tokens, vocab: 32, length: 16, samples: 16, test_samples: 8",
        )  # fmt: skip
    for ranks, strategy in ((1, "single"), (2, "hybrid, pipeline: 2")):
        there = {name: text.replace("STRATEGY", strategy) for name, text in texts.items()}
        for found in run_ranks(tied_weights, ranks, there, str(tmp_path / str(ranks))):
            assert "blocks.0.token.weight and blocks.3.out.weight differ there" in found["two"]
            assert "transformer.wte.weight and lm_head.weight differ there" in found["two, of Hugging Face's"]
            for name in ("equal, of Hugging Face's", "one", "token selected"):
                assert found[name] == pytest.approx([token.sum()] * (2 // ranks), abs=1e-3), name
            assert found["head selected"] == pytest.approx([head.sum()] * (2 // ranks), rel=1e-5)
