"""LoRA: by its formula; the same in every layout; saved alone, and merged into the weights that it stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly.build import build
from paddle_dp.assembly.entry_points import merge
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint.tensor_file import read_header, read_rows
from paddle_dp.core.lora import A, B, add_low_rank, merge_low_rank
from paddle_dp.errors import CheckpointError, RecipeError, UsageError
from paddle_dp.export.export import export
from paddle_dp.mesh import join
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.model.compiled import compiled
from paddle_dp.plan.layout import Layout, Weight
from paddle_dp.recipe import read_recipe
from paddle_dp.train import state
from tests.house.recipes import small_recipe
from tests.parity import LAYOUTS as TWO_RANKS
from tests.parity import assert_same, train, train_each, truth, weights
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
LORA = "adapter={use: lora, rank: 2, match: ['blocks.[134].*', 'blocks.5.out']}"
# A second Linear's bias is trained, too: what is exempt from the freezing is saved with the adapters.
MORE = (LORA, "optimizer.groups=[{match: 'blocks.2.*.bias', frozen: false}]", "optimizer.clip=0.5")
LAYOUTS = TWO_RANKS | {
    "tokens": "{use: hybrid, tensor: 2, sequence_parallel: true}",
    "recompute": "{use: hybrid, tensor: 2, recompute: full}",
}


def model() -> nn.Layer:
    paddle.seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def test_a_layer_gives_its_output_and_the_thin_product() -> None:
    made, x = model(), paddle.rand([4, 6])
    before = made(x).numpy()
    add_low_rank(made, ["0"], 2, 8.0, seed=1)
    np.testing.assert_array_equal(made(x).numpy(), before)
    layer = made[0]
    assert [layer.lora_A.shape, layer.lora_B.shape] == [[6, 2], [2, 5]] and not hasattr(made[2], A)
    layer.lora_B.set_value(paddle.rand([2, 5]))
    a, b, w, bias = (t.numpy() for t in (layer.lora_A, layer.lora_B, layer.weight, layer.bias))
    np.testing.assert_allclose(layer(x).numpy(), x.numpy() @ (w + 8.0 * a @ b) + bias, rtol=1e-4)
    adapted = made(x).numpy()
    assert merge_low_rank(made) == 1
    assert set(made.state_dict()) == set(model().state_dict())
    np.testing.assert_allclose(made(x).numpy(), adapted, rtol=1e-5, atol=1e-6)
    assert not np.allclose(adapted, before, rtol=1e-3)


def test_a_is_drawn_from_the_seed_and_the_name_alone() -> None:
    def first(seed: int, match: list[str]) -> dict[str, np.ndarray]:
        made = add_low_rank(model(), match, 2, 1.0, seed)
        return {name: p.numpy() for name, p in made.named_parameters() if name.endswith(A)}

    both, second = first(3, ["*"]), first(3, ["2"])
    np.testing.assert_array_equal(both["2.lora_A"], second["2.lora_A"])
    assert not np.array_equal(first(4, ["2"])["2.lora_A"], second["2.lora_A"])
    assert abs(both["0.lora_A"]).max() <= 6**-0.5


@pytest.mark.parametrize(
    ("match", "sentence"),
    [
        ("2.*", r"adapter.match.0: '2.\*' matches no Linear layer. Did you mean '2'\? There are 0, 2."),
        ("1", "adapter.match.0: '1' matches no Linear layer"),
    ],
)
def test_a_pattern_must_match_a_linear(match: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        add_low_rank(model(), [match], 2, 1.0, 0)


def test_a_shared_weight_and_a_second_adapter_are_refused() -> None:
    made = model()
    made.add_sublayer("tied", nn.Linear(6, 5))
    made.tied.weight = made[0].weight
    with pytest.raises(RecipeError, match="'tied' matches tied, whose weight another layer uses, too"):
        add_low_rank(made, ["tied"], 2, 1.0, 0)
    add_low_rank(made, ["2"], 2, 1.0, 0)
    with pytest.raises(UsageError, match="the model has an adapter already"):
        add_low_rank(made, ["2"], 2, 1.0, 0)


RECIPE = small_recipe(
    "length: 6 steps, batch: 50", model="mlp, inputs: 64, hidden: [64, 64], classes: 10", ema="{decay: 0.5}",
    adapter='{use: lora, rank: 1, match: ["body.*", head]}', schedule="constant, learning_rate: 0.02",
    callbacks="[]",
)  # fmt: skip


def file_of(folder: Path, *words: str) -> Any:
    (folder / "recipe.yaml").write_text(RECIPE)
    return read_recipe(folder / "recipe.yaml", [f"output_dir={folder}", *words])


def saved(trainer: Any) -> Path:
    return checkpoints.save(trainer.snapshot(), trainer.run.folder / "checkpoints", trainer.mesh)


def merged(file: Path) -> dict[str, np.ndarray]:
    return {name: read_rows(file, info) for name, info in read_header(file).items()}


def test_only_the_adapter_is_trained_and_saved_and_merged_it_is_the_model(tmp_path: Path) -> None:
    """On weights of another run: fine-tuned, evaluated, resumed, merged, exported."""
    (tmp_path / "base").mkdir()
    base = file_of(tmp_path / "base", "adapter=null", "ema=null")
    pretrained = build(base, join())
    pretrained.fit("4 steps")
    load = f"load.path={saved(pretrained)}"

    recipe = file_of(tmp_path, load)
    trainer = build(recipe, join())
    trainer.fit("4 steps")
    path = saved(trainer)
    kept = checkpoints.load(path)
    assert {n.rpartition(".")[2] for n in kept.names if not n.startswith("optimizer/")} == {A, B}
    assert checkpoints.is_adapter(path)
    now = {name: p.numpy() for name, p in trainer.learner.placed.named_parameters()}
    for name, p in pretrained.learner.placed.named_parameters():
        np.testing.assert_array_equal(now[name], p.numpy(), err_msg=name)
    numbers = trainer.evaluate().numbers

    for ema, word in ((False, "loss"), (True, "ema_loss")):
        merge(
            file_of(tmp_path, load, "strategy.use=single"),
            {"to": str(tmp_path / f"{word}.safetensors"), "ema": ema},
        )
        found = merged(tmp_path / f"{word}.safetensors")
        assert set(found) == {name for name, _ in pretrained.learner.placed.named_parameters()}
        plain = build(
            file_of(tmp_path / "base", "adapter=null", "ema=null", f"output_dir={tmp_path / word}"), join()
        )
        plain.learner.model.set_state_dict({name: paddle.to_tensor(value) for name, value in found.items()})
        assert plain.evaluate().numbers["loss"] == pytest.approx(numbers[word], rel=1e-5)

    with pytest.raises(
        CheckpointError, match=r"holds an adapter without the weights .* Merge them first: paddle-dp merge"
    ):
        build(file_of(tmp_path, f"load.path={path}"), join())
    with pytest.raises(
        UsageError,
        match=r"train\.batch was 50 and is 25\..* paddle-dp merge \S+ -o FILE, then load\.path=FILE",
    ):
        build(file_of(tmp_path, load, "train.batch=25"), join(), "newest")

    straight = build(recipe, join())
    straight.fit("6 steps")
    again = build(recipe, join(), "newest")
    again.fit("6 steps")
    for (name, one), (_, other) in zip(
        straight.learner.placed.named_parameters(), again.learner.placed.named_parameters(), strict=True
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=name)
    export(file_of(tmp_path, load, "strategy.use=single"), {"to": str(tmp_path / "export")})

    with pytest.raises(
        CheckpointError, match=r"an adapter that was trained on other weights than these: load\.path"
    ):
        build(file_of(tmp_path), join(), "newest", ["load"])
    with pytest.raises(
        UsageError, match=r"body\.0\.weight was not there and is \[64, 64\]; .* paddle-dp merge"
    ):
        build(file_of(tmp_path, "adapter=null", load), join(), "newest", ["adapter"])
    with pytest.raises(CheckpointError, match="holds an adapter without its base weights"):
        state.load_model(kept, pretrained.learner)


def test_an_adapter_on_16_bits_is_merged_into_what_it_was_trained_on(tmp_path: Path) -> None:
    """As level O2 keeps them on an accelerator, where verbs read the same weights in float32."""
    (tmp_path / "base").mkdir()
    pretrained = build(file_of(tmp_path / "base", "adapter=null", "ema=null"), join())
    load, wide = f"load.path={saved(pretrained)}", dict(pretrained.learner.placed.named_parameters())
    low = "train.precision={dtype: bfloat16, level: O2}"
    of_cpu = saved(build(file_of(tmp_path, load, low, "ema=null", f"output_dir={tmp_path / 'cpu'}"), join()))
    trainer = build(file_of(tmp_path, load, low, "ema=null"), join())
    for layer in trainer.learner.model.sublayers():
        if isinstance(layer, nn.Linear):
            layer._to_impl(dtype="bfloat16", include_sublayers=False)
    state.load_model(checkpoints.load(of_cpu), trainer.learner)
    saved(trainer)
    merge(file_of(tmp_path, load, "strategy.use=single"), {"to": str(tmp_path / "merged.safetensors")})
    for name, value in merged(tmp_path / "merged.safetensors").items():
        rounded = wide[name].astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(value, rounded.numpy(), err_msg=name)
    with pytest.raises(CheckpointError, match="an adapter that was trained on other weights than these"):
        merge(file_of(tmp_path, "train.seed=7"), {"to": str(tmp_path / "merged.safetensors")})


def test_a_program_of_the_forward_has_no_hooks_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.compile: an adapter works by hooks on its layers"):
        build(file_of(tmp_path, "train.compile=true"), join())
    with pytest.raises(UsageError, match=r"train\.compile: an adapter works by hooks on its layers"):
        compiled(add_low_rank(model(), ["0"], 2, 1.0, 0), None)


def test_a_script_has_an_adapter_too(tmp_path: Path) -> None:
    data = [(np.full([6], i / 8, "float32"), np.int64(i % 3)) for i in range(8)]
    trainer = Trainer.of(
        model=model(), loss="cross_entropy", train=data,
        optimizer={"use": "sgd", "groups": [{"match": "*lora_B", "lr_scale": 2.0}]},
        batch=4, length="2 steps", folder=tmp_path / "run", callbacks=[],
        adapter={"use": "lora", "match": ["0"], "rank": 2},
    )  # fmt: skip
    assert [n for n, _ in trainer.learner.placed.named_parameters(trainable=True)] == ["0.lora_A", "0.lora_B"]
    trainer.fit()
    assert trainer.learner.model[0].lora_B.numpy().any()


def test_the_memory_of_what_is_frozen_is_its_own_alone() -> None:
    blocks = [[Weight(name="w", size=100, cut=True, frozen=True), Weight(name="a", size=10)]]
    memory = Layout(degrees=Degrees(tensor=2)).memory(blocks, 0)
    assert (memory.parameters, memory.trained) == (60, 10)
    assert (memory.state.parameters, memory.state.gradients, memory.state.optimizer) == (240, 40, 80)


@pytest.mark.long
@pytest.mark.processes
def test_every_layout_trains_the_adapters_of_one_process(tmp_path: Path) -> None:
    one = truth(more=MORE)
    ranks = run_ranks(train_each, 2, str(tmp_path), list(LAYOUTS.values()), more=MORE, timeout=400)
    for found in zip(*ranks, strict=True):
        assert_same(found, one)
    assert all(name.endswith((A, B, "bias")) for name in weights(one["saved"]) if name.startswith("model/"))


@pytest.mark.long
@pytest.mark.processes
def test_an_adapter_is_resumed_in_another_layout(tmp_path: Path) -> None:
    how: dict[str, Any] = {"more": MORE, "timeout": 300}
    run_ranks(train, 2, str(tmp_path), LAYOUTS["tensor"], "4 steps", **how)
    run_ranks(train, 2, str(tmp_path), LAYOUTS["pipeline"], "7 steps", True, **how)
    many = run_ranks(train, 2, str(tmp_path), LAYOUTS["sharding 3"], "10 steps", True, **how)
    one = truth(more=MORE)
    assert_same(many, one | {"rows": one["rows"][7:]})
