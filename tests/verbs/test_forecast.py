"""What `paddle-dp check --ranks` says of a recipe is true: by published sizes, and by building a rank's part."""

from pathlib import Path
from typing import Any

import pytest

from paddle_dp.axes import meta_init
from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.plan.bound import Compute, Wire
from paddle_dp.plan.transformer import Transformer
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.units import LinkSpeed
from paddle_dp.verbs.check_screen import forecast
from paddle_dp.verbs.forecast import between, blocks_of, layout_of, sizes_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LARGE = {  # parameters as published (llama, table 2's "6.7B" to the digit), or as Megatron-LM counts them
    "gpt_345m": "354,871,296",
    "gpt_1_3b": "1,315,819,520",
    "llama_7b": "6,738,415,616",
}


def said(name, ranks, rank=None, *overrides):
    return list(forecast(read_recipe(CONFIGS / f"{name}.yaml", overrides), ranks, rank))


@pytest.mark.parametrize("name", LARGE)
def test_large_models_have_their_published_size_and_take_no_memory_here(name):
    assert f"the whole model: {LARGE[name]} parameters" in said(name, 8)[0]


def test_a_part_is_built_as_planned():
    lines = said("gpt_tensor2_pipeline2_data2", 8, 3)
    assert "rank 3 (data 0, pipeline 1, tensor 1) holds 13,984 parameters: blocks 3 to 5 of 6" in lines[1]
    assert "built: 13,984 parameters, as planned" in lines[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "rank", "overrides"),
    [
        ("gpt_345m", 8, 5, ()),
        ("gpt_1_3b", 32, 9, ()),
        ("gpt_6_7b", 8, 7, ()),
        ("gpt_6_7b", 32, 31, ("strategy.tensor=4", "strategy.pipeline=4", "strategy.partition=parameters")),
        ("llama_7b", 32, 17, ("strategy.tensor=4", "strategy.pipeline=2", "strategy.sharding=4")),
    ],
)
def test_parts_of_large_models_are_built_as_planned(name, ranks, rank, overrides):
    assert "as planned" in said(name, ranks, rank, *overrides)[-1]


def test_a_rank_of_stage_3_stores_a_part() -> None:
    layout = ("strategy.sharding=8", "strategy.sharding_stage=3", "strategy.tensor=1")
    lines = said("gpt_6_7b", 8, None, *layout, "strategy.sequence_parallel=false")
    assert "rank 0 (sharding 0) stores 1/8 of 6,864,642,048 parameters: " in lines[1]


def test_bytes_are_those_of_the_optimizer_and_the_precision():
    lines = said("large_classifier", 2)
    assert lines[1] == "rank 0 (tensor 0) holds 32,033,088 parameters: blocks 0 to 2 of 3"
    assert lines[2] == "weights 128 MB, gradients 128 MB, optimizer 256 MB: 513 MB in all"
    low = said(
        "large_classifier", 2, None, "train.precision={dtype: bfloat16, level: O2}", "optimizer.use=sgd"
    )
    assert low[2] == "weights 64.1 MB, gradients 64.1 MB, optimizer 128 MB: 256 MB in all"
    averaged = said("large_classifier", 2, None, "ema={decay: 0.999}")
    assert averaged[2] == "weights 128 MB, gradients 128 MB, optimizer and averages 384 MB: 641 MB in all"


def test_low_precision_is_narrow_on_accelerators_and_float32_where_it_is_emulated():
    precision = "train.precision={dtype: bfloat16, level: O2}"
    both = [said("llama_tiny", 2, None, precision, f"train.device={device}") for device in ("auto", "cpu")]
    assert both[0][-1] == (
        "that is for accelerators: CPUs emulate low precision in float32; train.device=cpu plans for them"
    )
    assert both[1] == said("llama_tiny", 2, None, "train.device=cpu")


def test_what_a_step_sends_and_how_long_it_lasts_at_least():
    """Ψ = 4·102,016 bytes twice 3/4 over a ring; 6 ms of compute, of which 2 are forward."""
    recipe = read_recipe(CONFIGS / "digits_mlp.yaml")
    wire = Wire(link=LinkSpeed.parse("1 Gbit/s"), compute=Compute.from_seconds(6e-3))
    whole = int(said("digits_mlp", 4)[0].split()[-2].replace(",", ""))
    lines = list(forecast(recipe, 4, wire=wire))[-2:]
    took = 1e3 * 4 * whole * 3 / 2 / 125e6
    assert (
        lines[0]
        == f"a step sends {4e-3 * whole * 3 / 2:.3g} kB: data {4e-3 * whole * 3 / 2:.3g} kB of gradients"
    )
    assert lines[1].startswith(
        f"over 1 Gbit/s that takes {took:.3g} ms: a step that computes for 6 ms lasts {2 + took:.3g} ms at"
    )
    assert f"{6 + took:.3g} ms where nothing is sent meanwhile" in lines[1]


ACTIVATIONS = "a step sends activations, which are counted for transformers only"


def test_activations_are_counted_for_transformers_and_their_heads():
    recipe = read_recipe(CONFIGS / "llama_tiny.yaml")
    layout = layout_of(recipe, 2)
    found = between(recipe, layout)
    model = recipe.model.config
    assert found is not None and found.attention == 2 + 2 * model.kv_heads / model.heads
    wide = read_recipe(CONFIGS / "llama_tiny.yaml", [f"model.head_width={3 * model.width // model.heads}"])
    apart = between(wide, layout)
    assert apart is not None and apart.attention == 3 * found.attention and apart.numbers == found.numbers
    assert found.numbers == recipe.train.batch // layout.degrees.dp_size * model.length * model.width
    assert said("large_classifier", 2)[-1] == ACTIVATIONS


def test_a_step_sends_the_tokens_of_its_data_and_not_all_that_the_model_could_read() -> None:
    """A folder of Llama 3.2 has a length of 131,072, and 512 tokens of data sent 256 times as much."""
    lengths = ("model.length=16", "model.length=131072")
    plain, long = (said("llama_tiny", 2, None, "strategy.tensor=2", length) for length in lengths)
    assert plain == long and any("of activations" in line for line in plain)


def test_sizes_are_those_of_the_data_and_of_the_settings() -> None:
    """Heads of another width than `width` / `heads` made them a stranger's, whose length and MLP were guessed."""
    recipe = read_recipe(CONFIGS / "llama_tiny.yaml", ["model.head_width=24", "model.length=64"])
    blocks = blocks_of(recipe)
    sizes: dict[str, Any] = {"depth": 4, "width": 32, "hidden": 96, "vocab": 64, "length": 16, "tables": 2}
    sizes |= {"heads": 4, "kv_heads": 2, "head_width": 24}
    assert sizes_of(recipe, blocks) == Transformer(matrices=3, **sizes)
    other = [*blocks, blocks[1]]  # of no transformer that the formula knows
    assert sizes_of(recipe, other) == Transformer(matrices=2, **sizes)


@pytest.mark.long
def test_a_rank_of_cut_convolutions_is_built_with_the_parameters_that_were_computed():
    lines = said(
        "resnet18_random", 2, 1, "strategy.use=hybrid", "strategy.tensor=2", "model.small_images=true"
    )
    assert lines[1].startswith("rank 1 (tensor 1) holds 5,") and lines[-1].startswith("built: 5,")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_layout_is_checked_with_one_build_of_the_model(monkeypatch, device):
    """It was built four times under hybrid with train.device=auto: each takes seconds for a large model."""
    recipe, built = read_recipe(CONFIGS / "gpt_tensor2_pipeline2_data2.yaml", [f"train.device={device}"]), []
    build = Recipe.build_model
    monkeypatch.setattr(Recipe, "build_model", lambda recipe: built.append(recipe) or build(recipe))
    layout_of(recipe, 8)
    assert len(built) == 1


def test_a_strategy_without_degrees_is_data_alone():
    assert "2 ranks: data 2; the whole model" in said("digits_mlp", 2)[0]


def test_compressed_gradients_are_fewer_bytes():
    """The mlp's matrices are 64 × 256, 256 × 256 and 256 × 10: factors of 2 columns each, the biases whole."""
    compress = ["none", "float16", "power_sgd rank 2"]
    model = "model={use: mlp, inputs: 64, hidden: [256, 256], classes: 10}"
    lines = [
        said("digits_mlp", 2, None, f"strategy={{use: data_parallel, compress: {c}}}", model)
        for c in compress
    ]
    whole = 4 * (64 * 256 + 256 * 256 + 256 * 10 + 522)
    factors = 4 * (2 * (320 + 512 + 266) + 522)
    for found, size in zip(lines, (whole, whole / 2, factors), strict=True):
        assert found[-1] == f"a step sends {size / 1e3:.3g} kB: data {size / 1e3:.3g} kB of gradients"
    # What each rank owes, kept and made anew: of all in float32 and twice on its way; of the matrices three times.
    assert f"errors of compression {3 * whole / 1e6:.3g} MB" in lines[1][-2] and "errors" not in lines[0][-2]
    assert f"errors of compression {3 * 4 * (64 * 256 + 256 * 256 + 256 * 10) / 1e6:.3g} MB" in lines[2][-2]


def test_gradients_that_are_rounded_are_half_the_bytes():
    both = [
        said("digits_mlp", 2, None, f"strategy={{use: hybrid, reduce_dtype: {dtype}}}")[-1]
        for dtype in ("float32", "bfloat16")
    ]
    whole, half = (float(line.split()[3]) for line in both)
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_one_process_holds_all_copies_on_a_cpu_and_each_device_one():
    """Ψ = 4 bytes of each of the mlp's 85,002 numbers; AdamW has twice as much, once."""
    psi = 4 * (64 * 256 + 256 * 256 + 256 * 10 + 522)
    on_cpu = said("digits_replicas", 1, None, "train.device=cpu", "strategy.count=3")
    assert on_cpu[-1].startswith(
        f"its 3 copies: weights {3e-6 * psi:.3g} MB, gradients {3e-6 * psi:.3g} MB, optimizer {2e-3 * psi:.3g} kB, "
        "activations (estimate) "
    )
    apart = said("digits_replicas", 1, None, "strategy.count=3")
    own = f"weights {1e-3 * psi:.3g} kB, gradients {1e-3 * psi:.3g} kB"
    first = f"the first copy's device: {own}, optimizer {2e-3 * psi:.3g} kB, activations (estimate) "
    assert apart[-3].startswith(first)
    forward = apart[-3].removeprefix(first).partition(":")[0]
    assert apart[-2].startswith(f"2 further devices: each {own}, activations (estimate) {forward}: ")
    assert apart[-1:] == [
        f"a step copies {2e-3 * psi:.3g} kB of weights there, and {2e-3 * psi:.3g} kB of gradients back",
    ]


def test_each_server_and_a_worker_are_described():
    lines = said("digits_parameter_server", 4, None, "strategy.servers=2")
    assert [line.split(" holds")[0] for line in lines[1:7:2]] == [
        "rank 0 (server 0)", "rank 1 (server 1)", "rank 2 (worker 0)",
    ]  # fmt: skip
    assert all("received gradients" in line for line in lines[2:5:2]) and "received" not in lines[6]
    late = said("digits_parameter_server", 3, None, "strategy={use: parameter_server, mode: async}")
    assert "on their way from and to the workers" in late[2]


def test_a_rank_holds_and_sends_its_branches():
    """Each tower: 64 × 256 + 256 × 256 + 256 × 16 weights and 528 biases; 16 numbers of 128 samples leave it. A shared
    one is on both ranks, and of its gradients as much travels."""
    apart = said("siamese_digits", 2, 1, "model.shared=false")
    assert apart[0] == "2 ranks: branches 2; the whole model: 173,088 parameters"
    assert apart[1] == "rank 1 (branches 1) holds 86,544 parameters"
    assert apart[-2] == f"a step sends {128 * 16 * 4 / 1e3:.3g} kB: branches 8.19 kB of activations"
    assert apart[-1].startswith("built: 86,544 parameters, as planned")
    shared = said("siamese_digits", 2)
    assert shared[1] == "rank 0 (branches 0) holds 86,544 parameters"
    assert shared[-1].endswith("branches 346 kB of gradients, branches 8.19 kB of activations")


def test_more_ranks_than_branches_are_refused_with_what_to_do():
    with pytest.raises(
        UsageError, match=r"over=3: there are branches for 2 ranks, .* set strategy\.over=2, and"
    ):
        said("siamese_digits", 3, None, "strategy.over=3")


def test_a_strategy_for_cpus_only_is_forecast_for_them():
    assert "2 ranks" in said("siamese_digits", 2)[0] and "1 rank" in said("digits_replicas", 1)[0]
    lines = said("digits_mlp", 2, None, "strategy={use: data_parallel, exchange: pushed}")
    assert lines[0].endswith("is for CPUs only: train.device=auto must find no accelerator")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["strategy={use: local_sgd}", "loss={use: contrastive}"], "each rank learns alone"),
        (["strategy={use: async_average}", "loss={use: contrastive}"], "each rank learns alone"),
        (["strategy={use: async_average}", "dataset.reading=scatter"], "take shares as they come"),
        (["strategy={use: parameter_server}", "dataset.reading=scatter"], "is a server, which reads nothing"),
        (
            ["strategy={use: parameter_server}", "train.compile=true"],
            "before servers have dealt the parameters",
        ),
    ],
)
def test_what_ranks_cannot_do_together_is_said_before_there_are_ranks(words, why):
    with pytest.raises(UsageError, match=why):
        said("digits_mlp", 2, None, *words)


def test_what_cannot_be_is_said(monkeypatch):
    with pytest.raises(UsageError, match="tensor 3 does not divide the model's classes"):
        said("large_classifier", 3, None, "strategy.tensor=3")
    with pytest.raises(UsageError, match="--build 8: give a rank from 0 to 7"):
        said("gpt_tensor2_pipeline2_data2", 8, 8)
    monkeypatch.setitem(meta_init.UNCUT_PARAMETERS, "rowwise", ("weight", "bias"))  # counted as whole
    with pytest.raises(
        PaddleDPError, match="the `cuts` and `blocks` of gpt do not describe all of its layers"
    ):
        said("gpt_tensor2_pipeline2_data2", 8, 3)


def test_padding_is_compared_with_the_first_sample():
    plain = "strategy.use=data_parallel"
    first = said("gpt_tiny", 1, None, plain, "loader.pad={targets: {length: 999, value: -100}}")[0]
    assert first.startswith("the first sample, padded: int64[") and first.endswith("target int64[999]")
    with pytest.raises(
        UsageError, match=r"no array of a sample is called 'targetz'\. Did you mean 'targets'"
    ):
        said("gpt_tiny", 1, None, plain, "loader.pad={targetz: {length: 999}}")


def test_padded_data_are_read_once(monkeypatch):
    """They were built again for the operators of a model that is no transformer."""
    recipe = read_recipe(CONFIGS / "digits_mlp.yaml", ["loader.pad={inputs: {length: 64}}"])
    kind, built = type(recipe.dataset.config), []
    build = kind.build
    monkeypatch.setattr(kind, "build", lambda config, split: built.append(split) or build(config, split))
    first, *lines = forecast(recipe, 1)
    assert first.startswith("the first sample, padded: ") and "activations" in " ".join(lines)
    assert built == ["train"]
