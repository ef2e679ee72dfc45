"""`paddle-dp plan`: the screen, the object and the recipe of a plan agree, and `check` takes what it chooses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.errors import UsageError
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.error_bars import STAGE3
from paddle_dp.plan.ranking import PlannedLayout
from paddle_dp.plan.transformer import Transformer
from paddle_dp.recipe import read_recipe
from paddle_dp.text import amount, duration
from paddle_dp.verbs.check_screen import forecast
from paddle_dp.verbs.forecast import layout_of
from paddle_dp.verbs.layout_plan import RecipePlan, numerics_of, rank_numbers, start_command, write_chosen
from paddle_dp.verbs.plan_screen import PlanScreen
from tests.plan.test_probe import probe as measured_probe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = CONFIGS / "llama_7b.yaml"
SHRUNK = ("model.depth=6", "train.batch=64", "train.micro_batches=2", "train.length=1000 steps")


@cache
def planned(
    *settings: str, ranks: str = "8", device: str = "a100-80", price: float | None = None
) -> RecipePlan:
    return RecipePlan.make(SMALL, [*SHRUNK, *settings], rank_numbers(ranks), DEVICES[device], price)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `paddle-dp plan` says on stderr; it must end with status 2."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `paddle-dp plan` prints; it must end with status 0."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("64", [64]), ("1..8", [1, 2, 4, 8]), ("3..20", [3, 6, 12, 20]), ("8,12, 8", [8, 12]),
        ("1..2,6", [1, 2, 6]),
    ],
)  # fmt: skip
def test_numbers_of_cards(text: str, numbers: list[int]) -> None:
    assert rank_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "8..4", "-4", "1-8", "1...8", "four", "8,", "2.5", "9999"])
def test_other_numbers_of_cards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--ranks .*(1\.\.64: 1, 2, 4|up to 4096 cards)"):
        rank_numbers(text)


def test_the_screen_has_100_columns_and_what_the_object_has() -> None:
    plan = planned(price=2.0)
    lines, fields = [*PlanScreen(plan).lines()], plan.as_fields()
    assert max(map(len, lines)) <= 100
    chosen = fields["rankings"][0]["chosen"]
    named = next(line for line in lines if line.startswith("→"))
    assert chosen["layout"] in named and f"{1000 * chosen['seconds']:.3g} ms" in named
    cost = next(line for line in lines if "card-hours" in line)
    assert f"{float(format(chosen['low'] * 1000 / 3600 * 8, '.3g')):g} to" in cost and "price" in cost
    assert json.loads(json.dumps(fields)) == json.loads(json.dumps(fields, allow_nan=False))


def test_several_numbers_get_a_line_each_with_their_efficiency() -> None:
    plan = planned(ranks="1..8")
    lines = [*PlanScreen(plan).lines()]
    rows = [line for line in lines if re.match(r" *[1248]  [\d.]+ m?s ", line)]
    assert len(rows) == 4 and max(map(len, lines)) <= 100
    first, last = (ranking.chosen for ranking in (plan.rankings[0], plan.rankings[-1]))
    assert first is not None and last is not None
    assert f" {first.seconds / 8 / last.seconds:.0%} " in rows[-1]


def test_layouts_without_a_rank_have_the_published_span_or_none() -> None:
    plan = planned("model.depth=24", ranks="16")
    spans = {True: r" +[\d.]+ … [\d.]+ m?s: ", False: r" +[\d.]+ m?s at least: "}
    shown = [line for line in PlanScreen(plan).lines() if re.match("|".join(spans.values()), line)]
    rows = plan.rankings[0].unforetold
    assert len(shown) == len(rows) > 1
    for line, row in zip(shown, rows, strict=True):
        like_published = row.choice.stage == 3 and row.choice.degrees.sequence == 1
        assert re.match(spans[like_published], line), line
        assert row.low / row.seconds == pytest.approx(STAGE3[0] if like_published else 1.0)
    assert {row.choice.stage == 3 for row in rows} == {True, False}


TRANSFORMERS = [
    ("llama_7b", 16), ("llama_7b", 64), ("gpt_6_7b", 8), ("gpt_345m", 4), ("llama_tiny", 2), ("bert_data2", 2),
    ("vit_digits", 2),
]  # fmt: skip
TRACED = [("resnet50_imagenet", 8), ("digits_mlp", 2), ("resnet50_pipeline", 2, "model.depth=18")]


COSTLY = [("llama_7b", 64), ("gpt_6_7b", 8), ("resnet50_imagenet", 8)]  # go the ways of those beside them


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long) if case in COSTLY else case
        for case in (*TRANSFORMERS, *TRACED)
    ],
    ids=str,
)
def test_the_chosen_recipe_is_written_and_check_takes_it_and_prints_its_bytes(
    case: tuple[Any, ...], tmp_path: Path
) -> None:
    """`check` printed up to 2.3 times as many: it counted scores, and GPT's MLP for every model."""
    name, ranks, *words = case
    file = CONFIGS / f"{name}.yaml"
    plan = RecipePlan.make(file, words, [ranks], DEVICES["a100-80"])
    path = write_chosen(plan, file, words, tmp_path / "new")
    recipe = read_recipe(path)
    chosen = plan.rankings[0].chosen
    assert chosen is not None
    layout = layout_of(recipe, ranks)
    assert (layout.degrees, layout.recompute) == (chosen.choice.degrees, chosen.choice.recompute)
    assert recipe.train.micro_batches == chosen.choice.micro_batches
    with pytest.raises(UsageError, match="exists: name another folder"):
        write_chosen(plan, file, words, tmp_path / "new")
    lines = [*forecast(recipe, ranks)]
    assert f"{ranks} ranks: {layout}" in lines[0]
    sizes = next(line for line in lines if line.startswith("weights"))
    assert sizes.endswith(f": {amount(chosen.memory.total)} in all"), sizes
    has_attention = isinstance(plan.planner.model, Transformer)
    assert ("flash attention" in sizes) == (plan.planner.numerics.flash and has_attention)


SIZES = ("model.width=2048", "model.heads=16", "model.kv_heads=16", "model.length=2048")
WIDE = ("train.precision=bfloat16", *SIZES)


def test_packed_documents_take_a_mask_and_longer() -> None:
    """Flash attention keeps 2·samples·length² bytes of it in each block, on each tensor rank, and skips no tile."""
    plain, packed = (
        RecipePlan.make(CONFIGS / "llama_packed.yaml", (*WIDE, data), [2], DEVICES["a100-80"])
        for data in ("dataset={use: random_tokens, vocab: 256, length: 2048}", "dataset.length=2048")
    )
    (first, second) = (plan.rankings[0].current for plan in (plain, packed))
    assert isinstance(first, PlannedLayout) and isinstance(second, PlannedLayout)
    assert second.memory.total - first.memory.total == 4 * second.choice.micro * 2 * 2048**2  # 4 blocks
    assert second.seconds > first.seconds


def test_nothing_is_written_where_nothing_fits(tmp_path: Path) -> None:
    plan = RecipePlan.make(SMALL, (), [1], DEVICES["v100-16"].__class__(**vars(DEVICES["a100-40"])))
    assert plan.rankings[0].chosen is None
    assert any("none of the" in line for line in PlanScreen(plan).lines())
    with pytest.raises(UsageError, match="no layout of 1 card fits"):
        write_chosen(plan, SMALL, (), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [SMALL, "--device", "a1000"],
            "--device a1000: there is no data sheet of that name. Did you mean 'a100",
        ),
        ([SMALL, "--ranks", "1-64"], "--ranks 1-64: give a number of cards"),
        ([SMALL, "--ranks", "8", "--price", "0"], "--price 0: give the price"),
        ([SMALL, "--ranks", "8", "--price", "nan"], "--price nan: give the price"),
        ([SMALL, "--ranks", "8", "--price", "$2.5"], "--price $2.5: give the price"),
        ([SMALL, "--ranks", "8", "16"], "several numbers of one option are one word: 8,16"),
        ([SMALL, "--ranks", "8", "--gpus", "8"], "Here that is --ranks N for a number"),
        ([SMALL, "--device", "v100,a100"], "a plan is of one kind of card"),
        ([SMALL, "--ranks", "8", "--node", "0"], "--node 0: give 1 or more"),
        ([SMALL, "--ranks", "8", "--link", "fast"], "--link: 'fast' is not a"),
        ([SMALL, "--ranks", "1..8", "--write", "new"], "--write new writes one recipe"),
        ([SMALL, "--device", "v100"], "--device v100-32 has no products of bfloat16"),
        ([SMALL, "train.precision=float64"], "train.precision=float64: no data sheet"),
        ([SMALL, "train.device=cpu"], "train.device=cpu: data sheets are of accelerators"),
        ([CONFIGS / "digits_local_sgd.yaml"], "strategy.use=local_sgd: a plan knows the steps of single"),
        (
            [CONFIGS / "digits_mlp.yaml", "dataset={use: cifar}"],
            "model mlp cannot be planned: the first sample, whose shape it needs, cannot be read: dataset.path",
        ),
        ([CONFIGS / "llama_tiny_lora.yaml"], "adapter: a plan counts the products"),
    ],
)
def test_mistakes_are_met_at_the_door(
    words: list[str | Path], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *map(str, words))


def test_a_slower_network_takes_longer() -> None:
    fast = planned(ranks="16").rankings[0].ranked[0].seconds
    slow_device = replace(DEVICES["a100-80"], node_link=1e9)
    slow = RecipePlan.make(SMALL, SHRUNK, [16], slow_device).rankings[0].ranked[0].seconds
    assert slow > 1.2 * fast


def test_a_recipe_in_epochs_has_no_hours() -> None:
    lines = [*PlanScreen(planned("train.length=2 epochs")).lines()]
    assert any("no hours: they need a length in steps, and this is 2 epochs" in line for line in lines)


def test_a_measured_machine_is_planned_with_its_own_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "probe.json"
    measured_probe().write(file)
    words = [str(CONFIGS / "gpt_tiny.yaml"), "--measured", str(file)]
    assert "2 ranks of EPYC (measured)" in shown(capsys, *words, "--ranks", "2")
    beyond = refused(capsys, *words, "--ranks", "4")
    assert "the links of one machine with 2 ranks" in beyond and "--link" in beyond
    assert "4 ranks of EPYC" in shown(capsys, *words, "--ranks", "4", "--link", "10 Gbit/s")
    assert "train.device=cpu" in refused(capsys, words[0], "train.device=cpu")
    shown(
        capsys, *words, "--ranks", "2", "train.device=cpu", "train.precision=bfloat16"
    )  # emulated in float32
    measured_probe(ranks=1).write(file)
    assert "measure with --ranks 2" in refused(capsys, *words, "--ranks", "2")


def test_a_measured_card_is_planned_in_its_number_format_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "probe.json"
    measured_probe(kind="gpu", dtype="float32").write(file)
    words = (str(CONFIGS / "gpt_tiny.yaml"), "--measured", str(file), "--ranks", "2")
    assert "products of float32, and this recipe computes in bfloat16" in refused(
        capsys, *words, "train.precision=bfloat16"
    )


def test_the_layout_that_is_chosen_is_not_tight_where_another_of_its_rank_is_not() -> None:
    ranking = planned("model.depth=32", "train.batch=2048", ranks="64").rankings[0]
    first = [row for row in ranking.ranked if row.rank == 1]
    assert ranking.chosen is not None and not ranking.chosen.tight
    assert any(row.tight for row in first), "else the test shows nothing"


@pytest.mark.parametrize(
    ("ranks", "node", "options"),
    [
        (8, 8, "--ranks 8"),
        (6, 8, "--ranks 6"),
        (64, 8, "--ranks 8 --nodes 8 --master HOST:PORT --node-rank R"),
        (12, 8, "--ranks 6 --nodes 2 --master HOST:PORT --node-rank R"),
        (11, 8, "--ranks 1 --nodes 11 --master HOST:PORT --node-rank R"),
    ],
)
def test_the_command_starts_the_ranks_of_a_node(ranks: int, node: int, options: str) -> None:
    assert start_command(Path("a b.yaml"), ranks, node) == f"paddle-dp train 'a b.yaml' {options}"


def test_a_written_recipe_has_its_forecast_and_its_command(tmp_path: Path) -> None:
    plan = planned("model.depth=32", "train.batch=2048", ranks="16")
    path = write_chosen(plan, SMALL, [*SHRUNK, "model.depth=32", "train.batch=2048"], tmp_path)
    chosen, lines = plan.rankings[0].chosen, path.read_text().splitlines()
    assert chosen is not None
    assert lines[0].startswith(
        f"# Planned for 16 cards a100-80: {duration(chosen.seconds)} a step (8 of 10 published runs of other software: "
    )
    assert lines[1].endswith(f"paddle-dp train {path} --ranks 8 --nodes 2 --master HOST:PORT --node-rank R")


def test_a_number_without_layouts_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, str(SMALL), "--ranks", "67", "--png", "absent.png")
    assert "--ranks 67: no layout" in text and "Nearest: 66 and 68" in text
    assert not Path("absent.png").exists()


def test_a_recipe_that_cannot_run_on_so_many_says_why() -> None:
    lines = " ".join(PlanScreen(planned("train.batch=64", "train.micro_batches=64", ranks="8")).lines())
    assert "the recipe as it is cannot run on so many: 64 micro-batches on 8 shares" in lines


def test_the_network_between_nodes_is_on_the_screen() -> None:
    assert PlanScreen(planned(ranks="8")).network() == ""
    assert "8 cards in a node, 1600 Gbit/s from node to node" in "\n".join(
        PlanScreen(planned(ranks="16")).lines()
    )


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "gradient"),
    [
        ("{dtype: bfloat16, level: O2}", "null", 2),
        ("{dtype: bfloat16, level: O2}", "float32", 4),
        ("bfloat16", "null", 4),
        ("bfloat16", "bfloat16", 2),
    ],
)
def test_a_plan_sends_gradients_as_the_layout_does(precision: str, reduce_dtype: str, gradient: int) -> None:
    strategy = f"strategy={{use: hybrid, reduce_dtype: {reduce_dtype}}}"
    recipe = read_recipe(SMALL, [*SHRUNK, strategy, f"train.precision={precision}"])
    assert numerics_of(recipe, recipe, DEVICES["a100-80"]).gradient == gradient


def own_layout(*settings: str) -> PlannedLayout:
    """The recipe's own layout on 8 cards, of data alone."""
    row = planned("strategy={use: hybrid, recompute: full}", *settings).rankings[0].current
    assert isinstance(row, PlannedLayout)
    return row


def test_the_average_of_the_weights_has_its_bytes() -> None:
    """`check` and `plan` left it out: 4 bytes of each parameter that a rank updates."""
    elements = sum(weight.size for block in planned().planner.blocks for weight in block)
    more = own_layout("ema={decay: 0.999}").memory.total - own_layout().memory.total
    assert more == 4 * elements


def test_muons_iterations_are_products() -> None:
    adamw, muon = own_layout(), own_layout("optimizer={use: muon, iterations: 3}")
    square, sides = 4096, ([4096] * 4, [11008] * 3)
    flops = 6 * 3 * sum(4 * square**2 * side + 2 * square**3 for same in sides for side in same)
    assert muon.seconds - adamw.seconds == pytest.approx(flops / (0.8 * 156e12))


def test_muons_products_are_those_of_convolutions_too_and_not_the_head_s() -> None:
    muon = "optimizer={use: muon, iterations: 3}"
    plan = RecipePlan.make(CONFIGS / "digits_convnet.yaml", (muon,), [2], DEVICES["a100-80"])
    sides = ((9, 32), (64, 288), (64, 576))
    assert plan.planner.numerics.update_flops == 3 * sum(4 * m * m * n + 2 * m**3 for m, n in sides)


def test_groups_that_freeze_nothing_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """They were refused as a model that is trained in part."""
    assert own_layout("optimizer.groups=[{match: blocks.1, lr_scale: 0.5}]") == own_layout()
    frozen = refused(capsys, str(SMALL), "optimizer.groups=[{match: blocks.1, frozen: true}]")
    assert "optimizer.groups, frozen: a plan counts the products of a model that is trained whole" in frozen


def test_a_mixture_of_packed_documents_has_their_mask() -> None:
    packed = "{use: packed_texts, length: 2048}"
    rows = [
        RecipePlan.make(CONFIGS / "llama_packed.yaml", (*WIDE, f"dataset={data}"), [2], DEVICES["a100-80"])
        .rankings[0]
        .current
        for data in (packed, f"{{use: mixture, sources: [{packed}, {packed}]}}")
    ]
    assert rows[0] == rows[1]


def test_a_batch_that_grows_reads_fewer_tokens() -> None:
    """The screen counted whole batches from the first step on."""
    ramp = "train.batch_ramp={start: 16, increment: 16, every: 100 steps}"  # 16, 32, 48, then 64
    plain, grown = (
        next(line for line in PlanScreen(planned(*words)).lines() if " tokens: " in line)
        for words in ((), (ramp,))
    )
    assert f"{1000 * 64 * 2048:.3g} tokens" in plain
    assert f"{(100 * (16 + 32 + 48) + 700 * 64) * 2048:.3g} tokens" in grown
    (low, high), (less, same) = (
        re.findall(r"([\d.]+) to ([\d.]+) hours", line)[0] for line in (plain, grown)
    )
    assert float(less) == pytest.approx(0.85 * float(low), rel=0.01) and same == high


def test_several_numbers_in_epochs_say_that_there_are_no_hours() -> None:
    screen = " ".join(PlanScreen(planned("train.length=2 epochs", ranks="1..8", price=2.0)).lines())
    assert (
        "no hours, so no price: they need a length in steps, and this is 2 epochs: add train.length='N"
        in screen
    )


def test_a_tight_layout_and_more_than_the_whole_efficiency_are_explained() -> None:
    """On few cards llama_7b recomputes, so more of them are more than as many times as fast."""
    large = RecipePlan.make(
        Path("configs/llama_7b.yaml"), ["train.precision=float16"], [4, 8], DEVICES["v100-32"]
    )
    screen = " ".join(" ".join(PlanScreen(large).lines()).split())
    assert "tensor 4!" in screen and "! tight: a measured peak" in screen
    assert "More than 100 %: more cards have room for a faster layout." in screen


def test_long_trainings_are_in_days_and_say_what_they_leave_out() -> None:
    large = RecipePlan.make(Path("configs/llama_7b.yaml"), [], [64], DEVICES["a100-80"])
    screen = " ".join(" ".join(PlanScreen(large).lines()).split())
    assert "969 to 1,150 hours (40 to 48 days)" in screen
    assert "of steps alone, without evaluation, checkpoints and failures: LLaMA took" in screen


def test_a_slow_network_is_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(SMALL), *SHRUNK, "--ranks", "16", "--link")
    assert " in a node, 0.3 Gbit/s from node to node" in shown(capsys, *words, "300 Mbit/s")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plans").write_text("")
    for folder in (tmp_path / "plans", tmp_path / "plans" / "new"):
        text = refused(capsys, str(SMALL), *SHRUNK, "--ranks", "8", "--write", str(folder))
        assert f"--write {folder}: a file has this name" in text


def test_a_measured_machine_is_the_device_and_its_nodes_need_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "probe.json"
    measured_probe().write(file)
    words = [str(CONFIGS / "gpt_tiny.yaml"), "--measured", str(file), "--ranks", "2"]
    assert "are two devices" in refused(capsys, *words, "--device", "h100")
    assert "add --link" in refused(capsys, *words, "--node", "1")
    assert "on 2 ranks" in shown(capsys, *words, "--node", "1", "--link", "1 Gbit/s")


def test_compressed_gradients_are_not_described() -> None:
    """The recipe as it is stood there with the seconds of whole gradients."""
    plan = planned("strategy={use: data_parallel, compress: bfloat16}")
    assert plan.rankings[0].current is None and "strategy.compress" in plan.reasons[8]
    assert "strategy.compress" in " ".join(PlanScreen(plan).lines())


def test_the_strategy_s_settings_stay_and_those_that_hybrid_lacks_are_named(tmp_path: Path) -> None:
    """`strategy.use=hybrid` alone emptied the group: the plan and the written recipe had BatchNorm over all ranks."""
    file = tmp_path / "resnet.yaml"
    text = (CONFIGS / "digits_resnet18.yaml").read_text()
    strategies = (
        "{use: data_parallel, sync_batch_norm: false, check_every: 7 steps, compress: bfloat16}",
        "{use: data_parallel, check_every: null}",
    )
    plans, written = [], []
    for number, strategy in enumerate(strategies):
        file.write_text(re.sub("(?m)^strategy: .*", f"strategy: {strategy}", text))
        plans.append(RecipePlan.make(file, (), [8], DEVICES["a100-80"]))
        written.append(write_chosen(plans[-1], file, (), tmp_path / str(number)))
    assert [plan.planner.numerics.sync_norms for plan in plans] == [False, True]
    local, synchronized = (read_recipe(path).strategy for path in written)
    assert (local.config.sync_batch_norm, str(local.config.check_every)) == (False, "7 steps")
    assert synchronized.config.sync_batch_norm and synchronized.config.check_every is None
    lacks = 'has no setting strategy.compress="bfloat16": left out'
    for place in (written[0].read_text(), "\n".join(PlanScreen(plans[0]).lines())):
        assert lacks in place
    assert plans[0].as_fields()["lacking"] == ['strategy.compress="bfloat16"']
    assert not plans[1].lacking and "no setting" not in written[1].read_text()
