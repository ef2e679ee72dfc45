"""Models under the names of Hugging Face's transformers: without torch, from files that are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.axes.meta_init import size_of
from paddle_dp.checkpoint import TensorShard
from paddle_dp.checkpoint.matching import outlook
from paddle_dp.checkpoint.other_names import HUGGING_FACE, names_of, origins_of
from paddle_dp.checkpoint.source import source
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.part import find
from paddle_dp.recipe import Load, read_recipe, write_recipe
from paddle_dp.recipe.hf_config import file_in, read, settings_of, written
from tests.house.recipes import small_recipe
from tests.house.weights import assert_read

SMALL = {"width": 16, "depth": 2, "heads": 4}
WORDS = {"vocab": 20, "length": 8, **SMALL}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", WORDS),
    "gpt tied": ("gpt", {**WORDS, "tied": True, "hidden": 24}),
    "llama": ("llama", {**WORDS, "hidden": 24, "kv_heads": 2, "epsilon": 1e-6}),
    "llama tied": (
        "llama",
        {**WORDS, "hidden": 24, "tied": True, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_base": 5e5},
    ),
    "llama biases": ("llama", {**WORDS, "hidden": 24, "kv_heads": 2, "bias": "qkvo", "head_width": 6}),
    "qwen2": ("llama", {**WORDS, "hidden": 24, "kv_heads": 2, "bias": "qkv", "tied": True}),
    "qwen3": ("llama", {**WORDS, "hidden": 24, "kv_heads": 2, "qk_norm": True, "head_width": 128}),
    "ernie4_5": ("llama", {**WORDS, "hidden": 24, "head_width": 6, "rope_interleaved": True, "tied": True}),
    "bert": ("bert", {**WORDS, "segments": 2}),
    "bert tied": ("bert", {**WORDS, "segments": 2, "tied": True, "hidden": 24, "epsilon": 1e-12}),
    "ernie": ("bert", {**WORDS, "segments": 4, "tasks": 3, "tied": True, "family": "ernie"}),
    "ernie relu": ("bert", {**WORDS, "segments": 2, "activation": "relu", "family": "ernie"}),
    "vit": ("vit", {"image": 8, "patch": 4, "channels": 1, "classes": 5, "pool": "class", **SMALL}),
}


def text_of(use: str, folder: Path, more: str = "") -> str:
    return small_recipe(
        "length: 1 epoch, batch: 8",
        model=f"{use}, from: {folder}{more}",
        dataset="random_tokens, vocab: 20, length: 8",
    )


def config(name: str) -> Any:
    use, settings = MODELS[name]
    return find("models", use)(**settings)


def folder_of(name: str, folder: Path) -> paddle.nn.Layer:
    """Writes a model's folder as Hugging Face's libraries do; returns the model."""
    model = config(name).build()
    found: dict[str, np.ndarray] = {}
    for ours, origin in origins_of(names_of(model).names[HUGGING_FACE]).items():
        found |= origin.written(model.state_dict()[ours].numpy())
    shards = {key: TensorShard.full(key, array, "float32") for key, array in found.items()}
    write_tensors(folder / "model.safetensors", shards, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written(config(name))))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_every_tensor_and_comes_back(name: str, tmp_path: Path) -> None:
    model = folder_of(name, tmp_path)
    assert set(names_of(model).names[HUGGING_FACE]) == set(model.state_dict())
    assert_read(tmp_path, model)
    use = MODELS[name][0]
    found = settings_of(read(tmp_path), find("models", use), use, None)
    default = {"hidden": None} if "hidden" not in MODELS[name][1] else {}  # theirs says 4 × width
    assert find("models", use)(**{**found, **default}) == config(name)


def test_a_head_of_gpt_is_where_transformers_has_it(tmp_path: Path) -> None:
    model = folder_of("gpt", tmp_path)
    theirs = source(tmp_path).read("transformer.h.1.attn.c_attn.weight")  # [inputs, q | k | v]
    ours = model.state_dict()["blocks.2.qkv.weight"].numpy()
    q, k, v = np.split(theirs, 3, axis=1)
    for head in range(4):
        for number, part in enumerate((q, k, v)):
            at = (3 * head + number) * 4
            np.testing.assert_array_equal(ours[:, at : at + 4], part[:, 4 * head : 4 * head + 4])


def test_the_model_inside_and_masks_of_old_versions(tmp_path: Path) -> None:
    """GPT2Model has no "transformer.", and old versions saved the causal mask."""
    model = folder_of("gpt tied", tmp_path)
    opened = source(tmp_path)
    arrays = {name.removeprefix("transformer."): opened.read(name) for name in opened.names}
    arrays["h.0.attn.bias"] = np.ones((1, 1, 8, 8), "float32")
    shards = {key: TensorShard.full(key, array, "float32") for key, array in arrays.items()}
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path / "model.safetensors", shards)
    lines = outlook(source(tmp_path), model, Load(path="x"))
    assert "of the model without its head" in lines[0]
    assert lines[1].split()[:2] == ["loaded", str(len(model.state_dict()))] and "h.0.attn.bias" in lines[2]


def recipe_at(folder: Path, use: str, more: str = "") -> Path:
    file = folder / "r.yaml"
    file.write_text(text_of(use, folder, more))
    return file


def test_a_recipe_takes_its_sizes_and_its_weights_from_a_folder(tmp_path: Path) -> None:
    folder_of("llama tied", tmp_path)
    recipe = read_recipe(recipe_at(tmp_path, "llama", ", length: 6"))
    assert recipe.model.settings["rope_scaling"] == "llama3" and recipe.model.settings["length"] == 6
    assert recipe.load is not None and recipe.load.path == str(tmp_path)
    assert (
        read_recipe(recipe_at(tmp_path, "llama"), ["load={path: other, strict: false}"]).load.path == "other"
    )  # type: ignore[union-attr]


def test_null_asks_for_random_weights(tmp_path: Path) -> None:
    """It was ignored. In a run's own recipe.yaml null is the default, written out."""
    folder_of("llama tied", tmp_path)
    file = recipe_at(tmp_path, "llama")
    assert read_recipe(file, ["load=null"]).load is None
    file.write_text(f"{file.read_text()}load: null\n")
    assert read_recipe(file).load is None
    write_recipe(read_recipe(file), resolved := tmp_path / "resolved.yaml")
    load = read_recipe(resolved, [f"model.from={tmp_path}"]).load
    assert load is not None and load.path == str(tmp_path)
    assert read_recipe(resolved, [f"model.from={tmp_path}", "load=null"]).load is None


def changed(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: v for key, v in {**content, **keys}.items() if v is not ...}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, r"r\.yaml:2: model\.from: config\.json has hidden_act 'gelu': llama has 'silu'"),
    ({"mlp_bias": True}, "config.json has mlp_bias true, which llama does not know"),
    ({"attention_bias": "q"}, "config.json has attention_bias 'q': llama has False, True"),
    ({"sliding_window": 4096}, "has sliding_window 4096, which llama does not know"),
    ({"head_dim": 5}, "heads: 4 are 5 wide, and rotary positions need an even width: choose another head_width"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "has rope_scaling.rope_type 'yarn': llama has default, linear"),
    ({"quantization_config": {"bits": 4}}, "has quantization_config.bits 4, which"),
    ({"model_type": "bert"}, "has model_type 'bert', and llama reads 'llama', 'mistral', 'qwen2', 'qwen3' and "
     "'ernie4_5' only: use bert"),
    ({"model_type": "ernie4_5_moe", "moe_k": 2}, "has model_type 'ernie4_5_moe', and llama reads"),
    ({"model_type": "ernie4_5", "rope_theta": ...}, "has no rope_theta, and a ernie4_5 has another default"),
    ({"model_type": "ernie4_5", "use_bias": True}, "has use_bias true, which llama does not know"),
    ({"model_type": "ernie4_5", "compression_ratio": 2.0}, "has compression_ratio 2.0: llama has null or 1 only"),
    ({"model_type": "ernie4_5", "hidden_dropout_prob": 0.1}, "has hidden_dropout_prob 0.1, which llama does not"),
    ({"model_type": "qwen3_moe", "num_experts": 8}, r"config\.json has model_type 'qwen3_moe', and llama reads"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "has use_sliding_window true: llama has false only"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "has layer_types .*sliding"),
    ({"model_type": "qwen2", "num_key_value_heads": ...}, "has no num_key_value_heads, and a qwen2 has another"),
    ({"model_type": "mistral", "sliding_window": 4096}, "has sliding_window 4096, which llama does not know"),
    ({"model_type": "mistral"}, "has no sliding_window, and a mistral has another default"),
    ({"alibi": True}, "has alibi true, which llama does not know"),
    ({"rope_interleaved": True}, "has rope_interleaved true, which llama does not know"),
    ({"fuse_attention_qkv": True}, "has fuse_attention_qkv true, which llama does not know"),
    ({"use_long_sequence_strategies": True}, "has use_long_sequence_strategies true, which llama"),
    ({"rope_scaling": None, "rope_scaling_type": "ntk"}, "has rope_scaling.rope_type 'ntk': llama has"),
    ({"vocab_size": ...}, "config.json has no vocab_size"),
    ({"num_attention_heads": 3, "head_dim": None}, r"heads: 3 does not divide width 16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        *(("llama tied", *row) for row in REFUSED),
        ("ernie", {"hidden_act": "gelu_new"}, "has hidden_act 'gelu_new': bert has gelu, relu"),
        ("ernie", {"task_id": 1}, "has task_id 1, which bert does not know"),
        ("ernie", {"fuse": True}, "has fuse true, which bert does not know"),
        ("ernie", {"model_type": "ernie_m"}, "has model_type 'ernie_m', and bert reads 'bert' and 'ernie' only"),
        ("bert", {"use_task_id": True}, "has use_task_id true, which bert does not know"),
        ("gpt", {"model_type": "gpt"}, "has activation_function 'gelu_new': gpt has 'gelu' only"),
        ("gpt", {"model_type": "gpt", "activation_function": "gelu", "normalize_before": False},
         "has normalize_before false: gpt has true only"),
        ("gpt", {"model_type": "gpt", "activation_function": "gelu", "fuse_attention_qkv": True},
         "has fuse_attention_qkv true, which gpt does not know"),
    ],
)  # fmt: skip
def test_what_ours_cannot_be_is_refused_by_name(
    tmp_path: Path, name: str, keys: dict[str, Any], said: str
) -> None:
    folder_of(name, tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(RecipeError, match=said):
        read_recipe(recipe_at(tmp_path, MODELS[name][0]))


def test_another_kind_of_model_is_one_sentence(tmp_path: Path) -> None:
    """Its other keys are all unlike ours, too: there were fourteen sentences."""
    folder_of("gpt", tmp_path)
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe_at(tmp_path, "llama"))
    assert len(caught.value.mistakes) == 1 and "use gpt" in str(caught.value)


PADDLE_NLP = {  # what PaddleNLP 2.8.1 and PaddleFormers 0.4.1 write of a Llama, beside its sizes
    "alibi": False, "fuse_attention_ffn": False, "fuse_attention_qkv": False, "long_sequence_init_args": {},
    "fuse_sequence_parallel_allreduce": False, "long_sequence_strategy_name": None, "no_recompute_layers": None,
    "paddlenlp_version": "2.8.1", "paddleformers_version": "0.4.1", "pp_recompute_interval": 1,
    "recompute_granularity": "full", "rope_scaling_factor": 1.0, "rope_scaling_type": None, "seq_length": 2048,
    "sequence_parallel": False, "tensor_parallel_output": True, "use_fused_rms_norm": True, "use_fused_rope": True,
    "use_recompute": False, "virtual_pp_degree": 1, "use_flash_attention": True, "tensor_parallel_degree": 2,
    "immediate_clear_past_key_value": False, "use_last_token_for_generation": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"is_llama_config": True, "rope_interleaved": False}, id="SmolLM2"),
        pytest.param({"model_type": "mistral", "sliding_window": None, "head_dim": 4}, id="Mistral"),
        pytest.param({**PADDLE_NLP, "rope_scaling": None}, id="PaddleNLP"),
    ],
)
def test_what_is_a_llama_is_read_as_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder_of("llama", tmp_path)
    before = read_recipe(recipe_at(tmp_path, "llama")).model.settings
    changed(tmp_path, **keys)
    assert read_recipe(recipe_at(tmp_path, "llama")).model.settings == before


ERNIE_NLP = {  # the keys that PaddleNLP 2.8.1 writes of an ERNIE, without its sizes
    "attention_probs_dropout_prob": 0.1, "fuse": False, "initializer_range": 0.02, "pad_token_id": 0,
    "paddlenlp_version": None, "pool_act": "tanh", "task_id": 0, "tie_word_embeddings": ...,
    "position_embedding_type": ...,
}  # fmt: skip
OF_TASKS: list[tuple[dict[str, Any], tuple[str, int, str]]] = [
    ({}, ("gelu", 3, "ernie")),
    ({"use_task_id": False}, ("gelu", 0, "ernie")),
    ({"task_type_vocab_size": ...}, ("gelu", 3, "ernie")),
    ({"use_task_id": ..., "task_type_vocab_size": 5, "hidden_act": "relu"}, ("relu", 0, "ernie")),
    ({"use_task_id": False, "model_type": "bert"}, ("gelu", 0, "bert")),
]
SWITCHES = ("bias", "qk_norm", "head_width")


@pytest.mark.parametrize(
    ("name", "keys", "names", "values"),
    [
        ("llama", {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False, "head_dim": ...},
         SWITCHES, ("qkv", False, None)),
        ("llama", {"model_type": "qwen3", "layer_types": ["full_attention"] * 2, "head_dim": ...},
         SWITCHES, (None, True, 128)),
        ("llama", {"model_type": "qwen3", "attention_bias": True, "head_dim": 4, "max_window_layers": 2},
         SWITCHES, ("qkvo", True, None)),
        ("llama", {"model_type": "mistral", "sliding_window": None, "head_dim": 6}, SWITCHES, (None, False, 6)),
        # of PaddleNLP
        ("llama", {"rope_scaling": None, "rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
         ("rope_scaling", "rope_factor"), ("linear", 4.0)),
        # and much that says nothing of the model
        ("llama", {"bos_token_id": 1, "use_cache": True, "sliding_window": None, "attention_bias": False,
                   "transformers_version": "4.40", "rope_scaling": None, "rope_theta": ..., "head_dim": 4,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "num_key_value_heads": ...},
         ("rope_base", "rope_scaling", "kv_heads"), (7.0, None, 4)),
        *(("ernie", {**ERNIE_NLP, **keys}, ("activation", "tasks", "family", "tied"), (*values, True))
          for keys, values in OF_TASKS),
    ],
)  # fmt: skip
def test_keys_are_the_settings_of_a_family(
    tmp_path: Path, name: str, keys: dict[str, Any], names: tuple[str, ...], values: tuple[Any, ...]
) -> None:
    folder_of(name, tmp_path)
    changed(tmp_path, **keys)
    settings = read_recipe(recipe_at(tmp_path, MODELS[name][0])).model.settings
    assert tuple(settings[name] for name in names) == values


GPT_NLP = {  # the config.json that PaddleNLP 2.8.1 writes of a GPT
    "architectures": ["GPTForCausalLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eol_token_id": 3,
    "eos_token_id": 7, "fuse_attention_ffn": False, "fuse_attention_qkv": False, "hidden_activation": "gelu",
    "fuse_sequence_parallel_allreduce": False, "fused_softmax_with_triangular": False, "hidden_dropout_prob": 0.1,
    "hidden_size": 16, "ignore_index": 0, "initializer_range": 0.02, "intermediate_size": 24, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8, "model_type": "gpt", "normalize_before": True, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_partitions": 1, "pad_token_id": 0, "paddlenlp_version": None,
    "recompute_granularity": "full", "scale_qk_coeff": 1.0, "seq_length": 1024, "sequence_parallel": False,
    "tensor_parallel_degree": 1, "tensor_parallel_output": True, "type_vocab_size": 2, "use_fast_layer_norm": False,
    "use_fused_dropout_add": False, "use_fused_linear": False, "virtual_pp_degree": 1, "vocab_size": 20,
}  # fmt: skip


def sizes_of(use: str, folder: Path) -> dict[str, Any]:
    return settings_of(read(folder), find("models", use), use, None, file_in(folder))


def test_a_gpt_of_paddle_nlp_is_read_by_its_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_NLP))
    wanted = {**WORDS, "hidden": 24, "dropout": 0.1, "tied": True}
    assert sizes_of("gpt", tmp_path) == wanted
    (tmp_path / "config.json").write_text(json.dumps({**GPT_NLP, "layer_norm_eps": 1e-3}))
    assert sizes_of("gpt", tmp_path) == wanted  # as in PaddleNLP, whose norms do not read the key


OLD_ERNIE = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": "relu",
    "max_position_embeddings": 8, "intermediate_size": 24, "type_vocab_size": 2, "pad_token_id": 0,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        {"init_class": "ErnieForMaskedLM", "init_args": [{**OLD_ERNIE, "init_class": "ErnieModel"}]},
        {"init_class": "ErnieModel", **OLD_ERNIE},
        {"init_class": "ErnieModel", "init_args": [], **OLD_ERNIE},
        {"model_type": "ernie", "architectures": ["ErnieForMaskedLM"], **OLD_ERNIE},
        {"init_class": "ErnieModel", **OLD_ERNIE, "init_args": [{"hidden_act": "gelu", "vocab_size": 7}]},
    ],
)
def test_an_old_folder_of_paddle_nlp_has_a_call_in_place_of_settings(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    (tmp_path / "model_config.json").write_text(json.dumps(content))
    assert sizes_of("bert", tmp_path) == {
        **WORDS, "hidden": 24, "segments": 2, "epsilon": 1e-12, "tied": True, "dropout": 0.1, "activation": "relu",
        "family": "ernie",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps({**content, **OLD_ERNIE, "hidden_act": "gelu", "init_args": None})
    )
    assert read(tmp_path)["hidden_act"] == "gelu"  # the new file counts


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"init_class": "ErnieGramModel", **OLD_ERNIE}, "model_type 'ErnieGramModel', and bert"),
        ({"init_class": "ErnieModel", "init_args": [20, 16]}, "init_args 20, which has no name"),
        ({"init_class": "GPTModel", **OLD_ERNIE}, "model_type 'gpt', and bert .*: use gpt"),
        ({"init_class": "ErnieModel", "hidden_size": 16}, "no vocab_size"),
        ({"init_class": "ErnieModel", **OLD_ERNIE, "scale": 2}, "scale 2, which bert does not"),
    ],
)
def test_an_old_folder_that_is_another_model_is_refused(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    (tmp_path / "model_config.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=rf"model_config\.json has {said}"):
        read_recipe(recipe_at(tmp_path, "bert"))


QWEN = {
    "vocab_size": 151936,
    "max_window_layers": 24,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@pytest.mark.parametrize(
    ("parameters", "sizes", "keys"),
    [
        pytest.param(494_032_768, (896, 24, 14, 2, 4864), {"model_type": "qwen2", **QWEN}, id="Qwen2.5-0.5B"),
        pytest.param(
            596_049_920, (1024, 28, 16, 8, 3072), {"model_type": "qwen3", "head_dim": 128, **QWEN}, id="Qwen3-0.6B"
        ),
        pytest.param(
            134_515_008, (576, 30, 9, 3, 1536),
            {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True, "rope_interleaved": False},
            id="SmolLM2-135M",
        ),
        pytest.param(
            7_248_023_552, (4096, 32, 32, 8, 14336),
            {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None}, id="Mistral-7B-v0.3",
        ),
        pytest.param(
            360_748_032, (1024, 18, 16, 2, 3072),
            {
                "model_type": "ernie4_5", "vocab_size": 103424, "head_dim": 128, "rms_norm_eps": 1e-5,
                "rope_theta": 5e5, "use_bias": False, "tie_word_embeddings": True,
            },
            id="ERNIE-4.5-0.3B",
        ),
        pytest.param(
            117_986_368, (768, 12, 12, None, 3072),
            {
                "model_type": "ernie", "vocab_size": 40000, "max_position_embeddings": 2048, "type_vocab_size": 4,
                "use_task_id": True,
            },
            id="ernie-3.0-base-zh",
        ),
    ],
)  # fmt: skip
def test_a_published_model_has_its_number_of_parameters(
    tmp_path: Path, parameters: int, sizes: tuple[int, ...], keys: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**dict(zip(KEYS, sizes, strict=True)), **keys}))
    use = "bert" if keys["model_type"] == "ernie" else "llama"
    assert size_of(find("models", use)(**sizes_of(use, tmp_path)).build) == parameters


@pytest.mark.parametrize(
    ("settings", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"bias": "qkvo"}, "LlamaForCausalLM"),
        ({"bias": "qkv"}, "Qwen2ForCausalLM"),
        ({"qk_norm": True}, "Qwen3ForCausalLM"),
        ({"rope_interleaved": True}, "Ernie4_5ForCausalLM"),
    ],
)
def test_the_switches_choose_the_class_that_is_written(settings: dict[str, Any], architecture: str) -> None:
    config = written(find("models", "llama")(**settings))
    assert config["architectures"] == [architecture] and config["head_dim"] == 32


@pytest.mark.parametrize(
    ("use", "settings", "said"),
    [
        ("llama", {"bias": "qkv", "qk_norm": True}, r"model\.(qk_norm is true|bias is 'qkv'), and Qwen"),
        ("llama", {"bias": "qkv", "rope_interleaved": True}, "true, and Qwen2ForCausalLM has false only"),
        ("bert", {"segments": 2, "tasks": 3}, r"model\.tasks is 3, and BertForMaskedLM has 0 only"),
        ("bert", {}, r"model\.segments is 0, and BertForMaskedLM has 1 at least"),
        ("vit", {"pool": "mean"}, r"model\.pool is 'mean', and ViTForImageClassification has 'class' only"),
    ],
)  # fmt: skip
def test_settings_that_no_class_of_theirs_has_are_refused(
    use: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        written(find("models", use)(**settings))


@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_what_layer_norm_does_not_take_is_refused_at_the_door(name: str) -> None:
    """It loaded, and ended in Paddle's InvalidArgument."""
    with pytest.raises(
        ValueError, match=r"epsilon: 0\.01 is more than paddle\.nn\.LayerNorm takes, which is 0\.001"
    ):
        find("models", name)(epsilon=0.01)


@pytest.mark.parametrize(
    ("make", "use", "said"),
    [
        (lambda at: at.rmdir(), "llama", "there is no such folder"),
        (lambda at: None, "llama", "there is no config.json in it"),
        (lambda at: (at / "config.json").write_text("{"), "llama", r"config\.json is not JSON"),
        (lambda at: (at / "config.json").write_text("[]"), "llama", "is not a group of settings"),
        (lambda at: (at / "config.json").write_text("{}"), "mlp", "mlp has no table of Hugging Face's sizes"),
    ],
)  # fmt: skip
def test_a_folder_that_is_none_is_named(tmp_path: Path, make: Any, use: str, said: str) -> None:
    (tmp_path / "hf").mkdir()
    make(tmp_path / "hf")
    file = tmp_path / "r.yaml"
    file.write_text(text_of(use, tmp_path / "hf"))
    with pytest.raises(RecipeError, match=said):
        read_recipe(file)


VERSIONS: dict[str, dict[str, str]] = {
    "bert tied": {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    "vit": {
        "encoder.layer": "layers", "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VERSIONS)
def test_names_of_other_versions_are_known(name: str, tmp_path: Path) -> None:
    model = folder_of(name, tmp_path)
    opened, shards = source(tmp_path), {}
    for theirs in opened.names:
        other = theirs
        for old, new in VERSIONS[name].items():
            other = other.replace(old, new)
        shards[other] = TensorShard.full(other, opened.read(theirs), "float32")
    assert set(shards) != set(opened.names)
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path / "model.safetensors", shards)
    assert_read(tmp_path, model)
