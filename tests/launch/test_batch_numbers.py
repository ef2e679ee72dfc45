"""Numbers of a recipe that depend on its ranks become numbers over all ranks before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.launch import batch_numbers as module
from paddle_dp.launch.batch_numbers import batch_numbers, with_batch_numbers, with_batch_numbers_in_rank
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine
from paddle_dp.part import lazily
from paddle_dp.plan.fullest_rank import USABLE_MEMORY
from paddle_dp.plan.layout import Weight, rank_memories
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.verbs.forecast import activations, fitting, layout_of, sizes_of

ROOT = Path(__file__).resolve().parents[2]
GPT, CONVNET = ROOT / "configs/gpt_tiny.yaml", ROOT / "configs/digits_convnet.yaml"
MLP = ROOT / "configs/digits_mlp.yaml"
AVAILABLE = 4 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without devices and with 4 MiB."""
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind: kind(cores=2)))
    monkeypatch.setattr(module, "available_memory", lambda: AVAILABLE)


@pytest.mark.parametrize(
    ("ranks", "strategy", "batch"),
    [
        (1, "strategy.data=auto", 32),
        (3, "strategy.data=auto", 96),
        (4, "strategy.tensor=2", 64),
        (4, "strategy={use: hybrid, sharding: 2, pipeline: 2}", 64),
        (3, "strategy={use: parameter_server}", 64),  # a server reads nothing
    ],
)
def test_a_batch_per_rank_counts_the_ranks_that_read(ranks: int, strategy: str, batch: int) -> None:
    numbers = batch_numbers(GPT, [strategy, "train.batch=32 per rank", "train.micro_batches=2"], ranks)
    assert numbers.overrides == (f"train.batch={batch}",)
    (remark,) = numbers.remarks
    assert remark.startswith(f"train.batch is {batch}: 32 × ")


def test_several_nodes_have_as_many_ranks_more() -> None:
    assert batch_numbers(GPT, ["train.batch=32 per rank"], 2, nodes=3).overrides == ("train.batch=192",)


def test_without_a_number_of_ranks_a_data_rank_has_its_share_and_nothing_is_refused() -> None:
    """`check` without --ranks took one rank, on which no layout with a tensor axis is legal."""
    settings = ["strategy.tensor=2", "train.batch=8 per rank", "train.micro_batches=auto 1 GB"]
    numbers = batch_numbers(GPT, settings, None)
    assert numbers.overrides == ("train.batch=8", "train.micro_batches=1")
    assert [remark.split()[0] for remark in numbers.remarks] == ["train.batch", "train.micro_batches"]
    assert batch_numbers(GPT, ["train.batch=64"], None) == module.BatchNumbers()
    with pytest.raises(UsageError, match=r"train\.micro_batches='auto 1 GX'"):
        batch_numbers(GPT, ["train.micro_batches=auto 1 GX"], None)


def test_numbers_over_all_ranks_stay_as_they_are() -> None:
    assert batch_numbers(GPT, ["train.batch=64"], 2) == module.BatchNumbers()
    job = Job(recipe=GPT, least_ranks=1, ranks=2)
    assert with_batch_numbers(job) is job


def test_a_job_gets_the_numbers_over_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    job = with_batch_numbers(
        Job(recipe=GPT, overrides=("train.batch=6 per rank", "train.micro_batches=auto"), ranks=2)
    )
    recipe = read_recipe(job.recipe, job.all_overrides)
    assert (recipe.train.batch, recipe.train.micro_batches) == (12, 2)
    assert capsys.readouterr().out.startswith(
        "train.batch is 12: 6 × 2 data ranks\ntrain.micro_batches is 2: "
    )


@pytest.mark.parametrize(
    ("strategy", "cards", "words", "batch"),
    [
        ("{use: parameter_server}", 4, {}, 128),  # on 5 ranks, of which 1 serves without a card
        ("{use: parameter_server, servers: 2}", 4, {"ranks": 4}, 64),
        ("{use: parameter_server}", 4, {"devices": (0, 2)}, 64),
        ("{use: replicas}", 8, {}, 32),  # one rank on two cards
        ("{use: data_parallel}", 4, {}, 128),
    ],
)
def test_ranks_are_counted_as_the_strategy_takes_cards(
    strategy: str, cards: int, words: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Machine(cores=2, kind="gpu", devices=tuple(map(str, range(cards))))
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind: gpus))
    settings = (f"strategy={strategy}", "train.batch=32 per rank")
    job = with_batch_numbers(Job(recipe=GPT, overrides=settings, **words))
    assert job.overrides[2:] == (f"train.batch={batch}",)


def test_a_number_of_ranks_that_may_change_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--ranks MIN:MAX .* write train\.batch and"):
        with_batch_numbers(Job(recipe=GPT, overrides=("train.batch=6 per rank",), least_ranks=1, ranks=2))


def bytes_with(recipe: Recipe, blocks: list[list[Weight]], ranks: int, parts: int) -> float:
    cut = recipe.model_copy(update={"train": replace(recipe.train, micro_batches=parts)})
    layout = layout_of(cut, ranks)
    return max(
        m.total + (activations(cut, sizes_of(cut, blocks), layout, blocks, m) or 0.0)
        for m in rank_memories(blocks, layout)
    )


@pytest.mark.parametrize(
    "strategy",
    [
        "{use: hybrid}",
        "{use: hybrid, pipeline: 2}",
        # The ranks that read are as many as along data.
        pytest.param("{use: hybrid, sharding: 2}", marks=pytest.mark.long),
    ],
)
def test_auto_is_the_smallest_number_that_fits(strategy: str) -> None:
    recipe = read_recipe(GPT, [f"strategy={strategy}", "train.batch=6", "train.micro_batches=1"])
    of_a_rank = 6 // layout_of(recipe, 2).degrees.dp_size
    sequence = [n for n in (1, 2, 3, 6) if n <= of_a_rank]
    with lazily():
        blocks = describe_weights(recipe.build_model())
    needs = [bytes_with(recipe, blocks, 2, parts) for parts in sequence]
    for index, (parts, need) in enumerate(zip(sequence, needs, strict=True)):
        if need < min(needs[:index], default=float("inf")):
            assert fitting(recipe, 2, need * 1.0001 / USABLE_MEMORY)[0] == parts
    with pytest.raises(UsageError, match=r"train\.micro_batches=auto: .* more than 92% of the"):
        fitting(recipe, 2, min(needs) * 0.9999 / USABLE_MEMORY)


def test_the_model_is_built_for_a_number_that_fits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(GPT, ["train.batch=64", "train.micro_batches=1"])
    built, build = list[Any](), Recipe.build_model
    monkeypatch.setattr(Recipe, "build_model", lambda self: built.append(build(self)) or built[-1])
    with pytest.raises(UsageError, match="with as many as there can be"):
        fitting(recipe, 2, 1.0)
    refused = len(built)
    assert fitting(recipe, 2, 1e12)[0] == 1
    assert (refused, len(built) - refused) == (1, 2)


def test_auto_takes_the_memory_of_this_machine_or_an_amount() -> None:
    words = ["train.batch=64"]
    (here,) = batch_numbers(GPT, [*words, "train.micro_batches=auto"], 2).overrides
    (same,) = batch_numbers(GPT, [*words, f"train.micro_batches=auto {AVAILABLE // 2} B"], 2).overrides
    (plenty,) = batch_numbers(GPT, [*words, "train.micro_batches=auto 1 GB"], 2).overrides
    assert (here, plenty) == (same, "train.micro_batches=1")
    assert here != plenty


@pytest.mark.parametrize(
    ("file", "word", "nodes", "sentence"),
    [
        (CONVNET, "auto", 1, "BatchNorm, which model convnet has, takes the statistics of each micro-batch"),
        (GPT, "auto", 2, "how much memory the ranks' devices have is not known here.*'auto 16 GB'"),
        (GPT, "auto lots", 1, r"'auto lots': 'lots' is not a quantity like '25 MB'"),
        (GPT, "auto 0 GB", 1, r"with as many as there can be a rank takes .*, more than 92% of the 0"),
        (GPT, "auto 1 MB", 1, r"with as many as there can be a rank takes .*, more than 92% of the 1\.05 MB"),
    ],
)
def test_what_cannot_be_told_is_refused(file: Path, word: str, nodes: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=rf"^train\.micro_batches=.*{sentence}"):
        batch_numbers(file, [f"train.micro_batches={word}"], 2, nodes)


def test_auto_is_refused_where_what_a_rank_keeps_is_not_known() -> None:
    """An mlp on a tensor axis: its activations counted as none, and one micro-batch fitted always."""
    auto = "train.micro_batches=auto 1 GB"
    assert batch_numbers(MLP, ["strategy={use: hybrid}", auto], 2).overrides == ("train.micro_batches=1",)
    with pytest.raises(UsageError, match="what model mlp keeps for its backward is not known by arithmetic"):
        batch_numbers(MLP, ["strategy={use: hybrid, tensor: 2}", auto], 2)


def test_with_devices_the_amount_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Machine(cores=2, kind="gpu", devices=("0", "1"))
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind: gpus))
    with pytest.raises(UsageError, match="auto 16 GB"):
        batch_numbers(GPT, ["train.micro_batches=auto"], 2)
    assert batch_numbers(GPT, ["train.micro_batches=auto", "train.device=cpu"], 2).overrides


def test_this_machines_memory_is_not_another_machines() -> None:
    """A login node's memory decided on a script for one node: it was refused, or passed and refused there."""
    for kind in ("cpu", "gpu"):
        with pytest.raises(UsageError, match=r"is not known here.*'auto 16 GB'"):
            batch_numbers(GPT, ["train.micro_batches=auto"], 2, 1, kind)
        assert batch_numbers(GPT, ["train.micro_batches=auto 1 GB"], 2, 1, kind).overrides


def test_a_rank_of_another_launcher_knows_the_number_of_ranks() -> None:
    """PADDLE_TRAINERS_NUM counts the ranks of all machines."""
    job = Job(recipe=GPT, overrides=("train.batch=6 per rank", "train.micro_batches=auto 2 MB"))
    there, remarks = with_batch_numbers_in_rank(job, {"PADDLE_TRAINERS_NUM": "3", "PADDLE_NNODES": "3"})
    assert read_recipe(GPT, there.all_overrides).train.batch == 18
    assert remarks[0] == "train.batch is 18: 6 × 3 data ranks" and len(remarks) == 2
    assert with_batch_numbers_in_rank(job, {})[0].overrides[2:3] == ("train.batch=6",)
    plain = Job(recipe=GPT)
    assert with_batch_numbers_in_rank(plain, {"PADDLE_TRAINERS_NUM": "3"}) == (plain, ())
    measured = Job(recipe=GPT, overrides=("train.micro_batches=auto",))
    with pytest.raises(UsageError, match=r"each rank would measure .*'auto 16 GB'"):
        with_batch_numbers_in_rank(measured, {"PADDLE_TRAINERS_NUM": "2"})


@pytest.mark.parametrize(
    "word", ["train.batch=32 per rank", "train.micro_batches=auto", "train.micro_batches=auto 2 GB"]
)
def test_where_ranks_are_not_known_the_recipe_is_refused(word: str) -> None:
    with pytest.raises(RecipeError, match=r"depends on the ranks, which only paddle-dp train, verify, check"):
        read_recipe(GPT, [word])
