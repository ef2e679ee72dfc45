"""KEY=VALUE laid over a page."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_dp.recipe.read import apply_overrides
from paddle_dp.recipe.yaml_document import YamlDocument, parse

TEXT = """\
strategy: {use: data_parallel, comm_buffer_size: 5 MB}
train: {batch: 32, precision: float16}
milestones: [1, 2]
callbacks: [{use: console, every: 1 step}, {use: metrics}]
loss:
"""


def laid(*overrides: str) -> YamlDocument:
    page = parse(TEXT, "a.yaml")
    apply_overrides(page, overrides)
    return page


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.batch=64", ("train", "batch"), 64),
        ("train.batch = 64", ("train", "batch"), 64),
        ("train.batch=3e-4", ("train", "batch"), 3e-4),
        ("train.batch='64'", ("train", "batch"), "64"),
        ("train.length=3 epochs", ("train", "length"), "3 epochs"),
        ("output_dir=", ("output_dir",), None),
        ("output_dir=runs/a=b", ("output_dir",), "runs/a=b"),
        ("loss.use=cross_entropy", ("loss",), {"use": "cross_entropy"}),
        ("loader.num_workers=2", ("loader",), {"num_workers": 2}),
        ("train={batch: 1}", ("train",), {"batch": 1}),
        ("callbacks=[]", ("callbacks",), []),
        ("callbacks.0.every=5 steps", ("callbacks", 0, "every"), "5 steps"),
        ("callbacks.metrics.every=5 steps", ("callbacks", 1, "every"), "5 steps"),
        ("callbacks.2.use=profile", ("callbacks", 2), {"use": "profile"}),
        ("callbacks.1={use: profile}", ("callbacks", 1), {"use": "profile"}),
        ("metrics.0.use=auc", ("metrics",), [{"use": "auc"}]),
        ("metrics.0={use: auc}", ("metrics",), [{"use": "auc"}]),
        ("milestones.1=5", ("milestones",), [1, 5]),
        ("milestones.2=5", ("milestones",), [1, 2, 5]),
        (
            "strategy.comm_buffer_size=1 MB",
            ("strategy",),
            {"use": "data_parallel", "comm_buffer_size": "1 MB"},
        ),
    ],
)
def test_one_override(override: str, path: tuple[Any, ...], value: Any) -> None:
    page = laid(override)
    assert not page.mistakes
    found = page.values
    for key in path:
        found = found[key]
    assert found == value


@pytest.mark.parametrize("order", [1, -1])
def test_use_replaces_the_whole_part_in_whichever_order(order: int) -> None:
    page = laid(*["strategy.use=hybrid", "strategy.tensor=2"][::order])
    assert page.values["strategy"] == {"use": "hybrid", "tensor": 2}


@pytest.mark.parametrize("order", [1, -1])
def test_a_whole_group_comes_before_its_settings(order: int) -> None:
    page = laid(*["callbacks=[{use: profile}]", "callbacks.profile.steps=3"][::order])
    assert page.values["callbacks"] == [{"use": "profile", "steps": 3}]


def test_the_last_of_two_holds() -> None:
    assert laid("train.batch=1", "train.batch=2").values["train"]["batch"] == 2


def test_mistakes_are_placed_at_the_override() -> None:
    page = laid("train.batch=64", "strategy.use=hybrid")
    assert page.source_line(("train", "batch")) == "override 'train.batch=64'"
    assert page.source_line(("strategy", "tensor")) == "override 'strategy.use=hybrid'"
    assert page.source_line(("strategy", "comm_buffer_size")) == "override 'strategy.use=hybrid'"
    assert page.source_line(("train", "precision")) == "a.yaml:2"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.batch", "override 'train.batch': is not of the form KEY=VALUE, such as train.batch=64"),
        ("=3", "override '=3': is not of the form KEY=VALUE"),
        ("train..batch=3", "is not of the form KEY=VALUE"),
        ("train.batch=[1", "override 'train.batch=[1': this is not YAML"),
        ("train.precision.level=O2", "train.precision is 'float16', which has no settings"),
        ("callbacks.cosole.every=3", "callbacks has no 'cosole' (it has console, metrics). Did you mean 'console'?"),
        ("callbacks.profile.steps=3", "(it has console, metrics). To add one: callbacks.2.use=profile"),
        ("callbacks.3.use=profile", "(it has console, metrics). To add one: callbacks.2.use=NAME"),
        ("callbacks.use=profile", "(it has console, metrics). To add one: callbacks.2.use=NAME"),
        ("milestones.5=1", "milestones has no '5' (it has 2 of them)"),
    ],
)  # fmt: skip
def test_one_mistake(override: str, said: str) -> None:
    page = laid(override)
    assert len(page.mistakes) == 1 and said in str(page.mistakes[0])
    assert page.values == parse(TEXT, "a.yaml").values


def test_one_override_leaves_aliases_of_a_group_alone() -> None:
    page = parse("a: &x {b: 1}\nc: *x\n", "a.yaml")
    apply_overrides(page, ["a.b=2"])
    assert page.values == {"a": {"b": 2}, "c": {"b": 1}}
