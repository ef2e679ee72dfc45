"""LoRA in PEFT's format: written by `export --hf --adapter`, read by `adapter.load`; what differs is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.assembly.build import build
from paddle_dp.checkpoint import TensorShard, load, peft
from paddle_dp.checkpoint.other_names import names_of
from paddle_dp.checkpoint.source import SafetensorsFile
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.core import lora
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.export.hugging_face import export
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import read_recipe, write_recipe
from tests.house.programs import run_python
from tests.house.recipes import small_recipe
from tests.house.training import trained
from tests.ranks import run_ranks

SIZES = "vocab: 20, width: 16, depth: 2, heads: 4, length: 8"
LLAMA = f"{{use: llama, {SIZES}, kv_heads: 2, hidden: 24, head_width: 6, bias: qkv}}"
LORA = "adapter: {use: lora, rank: 3, alpha: 7.5, match: ['*.q', '*.v', 'blocks.2.down']}"
MODELS = {
    "llama": (LLAMA, LORA),
    "gpt": (f"{{use: gpt, {SIZES}}}", "adapter: {use: lora, rank: 2, match: ['*.qkv', 'blocks.1.up']}"),
    "bert": (
        f"{{use: bert, {SIZES}, segments: 2, tied: true}}",
        "adapter: {use: lora, rank: 2, match: ['*.qkv']}",
    ),
    "ernie": (
        f"{{use: bert, {SIZES}, segments: 4, tasks: 3, tied: true, family: ernie}}",
        "adapter: {use: lora, rank: 2, match: ['*.qkv', '*.up']}",
    ),
    "ernie4_5": (
        f"{{use: llama, {SIZES}, kv_heads: 2, hidden: 24, rope_interleaved: true, tied: true}}",
        LORA,
    ),
    "mlp": (
        "{use: mlp, inputs: 8, hidden: [5], classes: 20}",
        "adapter: {use: lora, rank: 2, match: [head]}",
    ),
}


def text_of(model: str, out: Path, more: str) -> str:
    return small_recipe(
        "length: 2 steps, batch: 4", more, model=model, schedule="constant, learning_rate: 0.1",
        dataset="random_tokens, vocab: 20, length: 8, samples: 8, test_samples: 4", strategy="single",
        callbacks="[{use: checkpoint}]", output_dir=str(out),
    )  # fmt: skip


def recipe(folder: Path, out: str, model: str = LLAMA, more: str = "") -> Any:
    file = folder / f"{out}.yaml"
    file.write_text(text_of(model, folder / out, more))
    return read_recipe(file)


def tuned(folder: Path, model: str = LLAMA, more: str = LORA) -> Any:
    """A run's recipe with its checkpoint of an adapter on the weights of the seed, after two steps."""
    made = recipe(folder, "run", model, more)
    build(made, Mesh.alone()).fit()
    return made


def factors(recipe_of_run: Any) -> dict[str, np.ndarray]:
    """A and B of a new training."""
    state = build(recipe_of_run, Mesh.alone()).learner.placed.state()
    return {name: tensor.numpy() for name, tensor in state.items() if name.endswith((lora.A, lora.B))}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter of LLAMA; `run` is next to it."""
    folder = tmp_path_factory.mktemp("peft")
    export(tuned(folder, more=f"{LORA}\nema: {{decay: 0.5}}"), {"to": str(folder / "hf"), "adapter": True})
    return folder / "hf"


def test_a_module_has_its_published_name_and_form(written: Path) -> None:
    assert (lora.A, lora.B) == (peft.A, peft.B)
    assert sorted(file.name for file in written.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "export.json",
    ]  # fmt: skip
    config = json.loads((written / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 7.5)
    assert config["target_modules"] == ["model.layers.1.mlp.down_proj", "q_proj", "v_proj"]
    assert config["task_type"] == "CAUSAL_LM" and config["fan_in_fan_out"] is False
    file = SafetensorsFile(written / "adapter_model.safetensors")
    saved = load(written.parent / "run/checkpoints/step-00000002")
    assert len(file.names) == 10 and file.from_torch
    for ours, theirs in (
        ("blocks.1.q", "layers.0.self_attn.q_proj"),
        ("blocks.2.down", "layers.1.mlp.down_proj"),
    ):
        for factor in (lora.A, lora.B):
            array = file.read(f"base_model.model.model.{theirs}.{factor}.weight")
            np.testing.assert_array_equal(array.T, saved.read(f"model/{ours}.{factor}"))
            assert np.abs(array).max() > 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "bert" else name
        for name in MODELS
        if name != "mlp"
    ],
)
def test_an_adapter_is_trained_on_where_it_was(tmp_path: Path, name: str) -> None:
    model, adapter = MODELS[name]
    made = tuned(tmp_path, model, adapter)
    export(made, {"to": str(tmp_path / "hf"), "adapter": True})
    again = recipe(tmp_path, "again", model, f"adapter: {{use: lora, load: {tmp_path / 'hf'}}}")
    assert again.adapter.config.rank == made.adapter.config.rank
    assert again.adapter.config.alpha == made.adapter.config.alpha
    saved = load(tmp_path / "run/checkpoints/step-00000002")
    there = factors(again)
    assert set(there) == {n.removeprefix("model/") for n in saved.names if n.startswith("model/")}
    for tensor, value in there.items():
        np.testing.assert_array_equal(value, saved.read(f"model/{tensor}"))
    if name == "gpt":  # theirs has all of q, then k, then v; ours one head after the other
        file = SafetensorsFile(tmp_path / "hf/adapter_model.safetensors")
        theirs = file.read("base_model.model.transformer.h.0.attn.c_attn.lora_B.weight").T
        assert json.loads((tmp_path / "hf/adapter_config.json").read_text())["fan_in_fan_out"] is True
        ours = there["blocks.1.qkv.lora_B"]
        np.testing.assert_array_equal(ours.reshape([2, 4, 3, 4])[:, 1], theirs.reshape([2, 3, 4, 4])[:, :, 1])


def test_averages_are_written_in_place_of_weights(written: Path, tmp_path: Path) -> None:
    made = read_recipe(written.parent / "run.yaml")
    export(made, {"to": str(tmp_path / "ema"), "adapter": True, "ema": True})
    saved = load(written.parent / "run/checkpoints/step-00000002")
    array = SafetensorsFile(tmp_path / "ema/adapter_model.safetensors").read(
        "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    )
    np.testing.assert_array_equal(array.T, saved.read("ema/blocks.1.v.lora_B"))
    assert (saved.read("model/blocks.1.v.lora_B") != array.T).any()


def test_a_run_is_read_and_continued_where_rank_and_alpha_are_written(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.symlink_to(written)
    made = recipe(tmp_path, "run", more=f"adapter: {{use: lora, load: {folder}}}")
    build(made, Mesh.alone()).fit("1 step")
    write_recipe(made, tmp_path / "resolved.yaml")
    assert "alpha: 7.5" in (tmp_path / "resolved.yaml").read_text()
    resumed = build(read_recipe(tmp_path / "resolved.yaml"), Mesh.alone(), "newest")
    assert resumed.progress.step == 1
    changed(tmp_path / "other", written, lora_alpha=8)
    folder.unlink()
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match=r"adapter\.alpha: 7\.5 is not that of .*adapter, 8\.0"):
        read_recipe(tmp_path / "resolved.yaml")
    folder.unlink()
    assert read_recipe(tmp_path / "resolved.yaml", tries=False).adapter.config.rank == 3


def changed(to: Path, source: Path, tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A copy of an adapter's folder with other keys, and other tensors (None: without it)."""
    to.mkdir()
    content = json.loads((source / "adapter_config.json").read_text()) | keys
    (to / "adapter_config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    file = SafetensorsFile(source / "adapter_model.safetensors")
    arrays = {name: file.read(name) for name in file.names} | (tensors or {})
    shards = {n: TensorShard.full(n, a, "float32") for n, a in arrays.items() if a is not None}
    write_tensors(to / "adapter_model.safetensors", shards, {"format": "pt"})
    return to


Q = "base_model.model.model.layers.0.self_attn.q_proj"
ONES = np.ones((3, 16), "float32")


@pytest.mark.parametrize(
    ("tensors", "keys", "said"),
    [
        ({}, {"peft_type": "IA3", "use_dora": True}, "has peft_type 'IA3': lora reads 'LORA' only$"),
        ({}, {"use_dora": True}, "has use_dora true, which lora does not know"),
        ({}, {"use_rslora": True}, "has use_rslora true, which lora does not know"),
        ({}, {"rank_pattern": {"q_proj": 4}}, "has rank_pattern.q_proj 4, which lora does not know"),
        ({}, {"alpha_pattern": {"q_proj": 4}}, "has alpha_pattern.q_proj 4, which"),
        ({}, {"bias": "lora_only"}, "has bias 'lora_only': lora has 'none' only"),
        ({}, {"lora_bias": True}, "has lora_bias true, which lora does not know"),
        ({}, {"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({}, {"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({}, {"r": 0}, "has r 0, which is no rank"),
        ({}, {"r": ...}, "has r None, which is no rank"),
        ({}, {"lora_alpha": "16"}, "has lora_alpha '16', which is no number"),
        ({}, {"r": 2}, r"blocks.1.q.lora_A, there .*q_proj.lora_A.weight, is \[16, 3\] there and \[16, 2\] here"),
        ({f"{Q}.lora_A.weight": None}, {}, "q_proj.lora_B.weight, which is A or B of no .* lacks its counterpart"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": ONES}, {}, "embed_tokens.lora_embedding_A, which"),
        ({"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": ONES}, {}, "layers.7.* of no Linear layer"),
    ],
)  # fmt: skip
def test_what_a_lora_here_cannot_be_is_refused(
    written: Path, tmp_path: Path, tensors: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    changed(tmp_path / "other", written, tensors, **keys)
    with pytest.raises(UsageError, match=said):
        recipe(tmp_path, "run", more=f"adapter: {{use: lora, load: {tmp_path / 'other'}}}")


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("{use: lora, load: '{}', match: ['*.q']}", r"adapter\.match: load names the layers"),
        ("{use: lora, load: '{}', rank: 8}", r"adapter\.rank: 8 is not that of .*hf, 3"),
        ("{use: lora, load: '{}/none'}", r"adapter\.load: .*none: there is no such folder"),
        ("{use: lora, load: '{}/..'}", r"adapter\.load: .*: there is no adapter_config\.json in it"),
        ("{use: lora}", "adapter.match: is empty: name the Linear layers"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(
    written: Path, tmp_path: Path, adapter: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        recipe(tmp_path, "run", more=f"adapter: {adapter.replace('{}', str(written))}")


def test_an_adapter_is_no_model_to_load(written: Path, tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", more=f"load: {{path: {written}}}")
    with pytest.raises(CheckpointError, match=r"holds a LoRA of PEFT's: give its base model here"):
        build(made, Mesh.alone())


def test_three_different_a_are_not_one(tmp_path: Path) -> None:
    model, adapter = MODELS["bert"]
    export(tuned(tmp_path, model, adapter), {"to": str(tmp_path / "hf"), "adapter": True})
    file = SafetensorsFile(tmp_path / "hf/adapter_model.safetensors")
    key = "base_model.model.bert.encoder.layer.0.attention.self.key.lora_A.weight"
    assert (file.read(key) == file.read(key.replace("key", "query"))).all()
    changed(tmp_path / "other", tmp_path / "hf", {key: file.read(key) * 2})
    with pytest.raises(
        UsageError, match=r"key\.lora_A\.weight and .* differ, and this model has one layer for all"
    ):
        recipe(tmp_path, "again", model, f"adapter: {{use: lora, load: {tmp_path / 'other'}}}")


def test_what_is_no_lora_alone_is_not_written(tmp_path: Path) -> None:
    recipe(tmp_path, "run", more=LORA)
    plain = recipe(tmp_path, "plain")
    build(plain, Mesh.alone()).fit()
    with pytest.raises(UsageError, match=r"--adapter: .*plain.* holds no adapter"):
        export(plain, {"to": str(tmp_path / "hf"), "adapter": True})
    groups = "{use: adamw, groups: [{match: 'blocks.3.norm.*', frozen: false}]}"
    file = tmp_path / "head.yaml"
    text = (tmp_path / "run.yaml").read_text().replace("{use: adamw}", groups)
    file.write_text(text.replace(str(tmp_path / "run"), str(tmp_path / "head")))
    head = read_recipe(file)
    build(head, Mesh.alone()).fit()
    with pytest.raises(
        UsageError, match=r"has trained blocks\.3\.norm\.weight, too, which are no part of a LoRA"
    ):
        export(head, {"to": str(tmp_path / "hf"), "adapter": True})
    assert head.adapter is not None and not (tmp_path / "hf").exists()
    vit = recipe(tmp_path, "vit", "{use: vit, image: 8, patch: 4, classes: 5, width: 16, depth: 1, heads: 2}")
    with pytest.raises(
        UsageError, match=r"modules of this model are called .* by the version of transformers"
    ):
        peft.peft_origins(names_of(vit.model.build()), ["blocks.1.qkv"])


def test_every_layout_begins_with_the_loaded_adapter(written: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").symlink_to(written)
    text = text_of(LLAMA, tmp_path, f"adapter: {{use: lora, load: {tmp_path}/hf}}")
    words = ["train.micro_batches=2", "callbacks=[]"]
    [alone] = run_ranks(trained, 1, text, str(tmp_path / "one"), *words, until="1 step")
    saved = load(written.parent / "run/checkpoints/step-00000002")
    for axis in ("tensor", "pipeline"):
        layout = f"strategy={{use: hybrid, {axis}: 2}}"
        many = run_ranks(trained, 2, text, str(tmp_path / axis), *words, layout, until="1 step")
        begun = load(many[0]["begun"])
        names = [name for name in begun.names if "lora" in name]
        assert names == [name for name in load(alone["begun"]).names if "lora" in name] and len(names) == 10
        for name in names:
            np.testing.assert_array_equal(begun.read(name), saved.read(name), err_msg=axis)
        for rank in many:
            np.testing.assert_allclose(rank["rows"], alone["rows"], rtol=1e-5, err_msg=axis)


PEFT = """
import sys, json
import numpy as np, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model

base, adapter, out = sys.argv[1:4]
kind = json.load(open(f"{base}/config.json"))["architectures"][0]
model = getattr(transformers, kind).from_pretrained(base).eval()
if len(sys.argv) > 4:
    torch.manual_seed(0)
    settings = json.loads(sys.argv[4])
    task = "CAUSAL_LM" if kind.endswith(("CausalLM", "LMHeadModel")) else None
    model = get_peft_model(model, LoraConfig(**settings, task_type=task)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(adapter)
else:
    model = PeftModel.from_pretrained(model, adapter).eval()
    loaded = sum(1 for name, p in model.named_parameters() if "lora_B" in name and p.abs().max() > 0)
    assert loaded == sum(1 for name, p in model.named_parameters() if "lora_B" in name), "some are not loaded"
tokens = torch.arange(16).reshape(2, 8)
with torch.no_grad():
    np.save(out, model(tokens).logits.numpy())
"""


def scores(made: Any) -> np.ndarray:
    model = build(made, Mesh.alone()).learner.model
    model.eval()
    return model(paddle.arange(16).reshape([2, 8])).numpy()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("peft", "transformers")),
    reason="peft and transformers are not installed",
)
@pytest.mark.parametrize("name", ["llama", "gpt", "ernie4_5", "ernie"])
def test_peft_computes_the_same(tmp_path: Path, name: str) -> None:
    """In both directions: what peft has made and what it has read."""
    model, adapter = MODELS[name]
    base = recipe(tmp_path, "base", model)
    build(base, Mesh.alone()).fit()
    export(base, {"to": str(tmp_path / "model")})
    (tmp_path / "run.py").write_text(PEFT)

    def run(*words: object) -> np.ndarray:
        run_python(tmp_path / "run.py", *map(str, words), timeout=200)
        return np.load(tmp_path / "out.npy")

    llama = ["q_proj", "v_proj", "o_proj"]
    targets = {"llama": llama, "gpt": ["c_attn", "c_fc"], "ernie4_5": llama, "ernie": ["dense"]}[name]
    settings = json.dumps({"r": 4, "lora_alpha": 6, "target_modules": targets})
    theirs = run(tmp_path / "model", tmp_path / "theirs", tmp_path / "out.npy", settings)
    load_base = f"load: {{path: {tmp_path / 'base'}}}"
    read = recipe(
        tmp_path, "read", model, f"{load_base}\nadapter: {{use: lora, load: {tmp_path / 'theirs'}}}"
    )
    np.testing.assert_allclose(scores(read), theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    assert np.abs(scores(base) - theirs).max() > 1e-2

    ours = tuned(tmp_path, model, f"{load_base}\n{adapter}")
    export(ours, {"to": str(tmp_path / "ours"), "adapter": True})
    again = recipe(
        tmp_path, "again", model, f"{load_base}\nadapter: {{use: lora, load: {tmp_path / 'ours'}}}"
    )
    theirs = run(tmp_path / "model", tmp_path / "ours", tmp_path / "out.npy")
    np.testing.assert_allclose(scores(again), theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
