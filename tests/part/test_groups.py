"""Which group sets what for which parameter, and the patterns that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from paddle import nn

from paddle_dp.errors import RecipeError
from paddle_dp.part import read_part
from paddle_dp.part.groups import Choice, ParameterGroup, choose, depth_scales, freeze, named_parameters

NAMES = [
    ("body.0.weight",), ("body.0.bias",), ("body.2.weight",), ("body.2.bias",),
    ("head.weight", "embed.weight"),
]  # fmt: skip


def test_each_setting_comes_from_the_first_group_that_matches_and_has_it() -> None:
    groups = [
        ParameterGroup(match="body.0.*", frozen=True),
        ParameterGroup(match="*.bias", weight_decay=0.0),
        ParameterGroup(match="embed", lr_scale=0.1),
        ParameterGroup(match="*", decay_by_depth=0.75, weight_decay=0.3),
    ]
    assert choose(groups, NAMES) == [
        Choice(frozen=True, decay_by_depth=0.75, weight_decay=0.3),
        Choice(frozen=True, decay_by_depth=0.75, weight_decay=0.0),
        Choice(decay_by_depth=0.75, weight_decay=0.3),
        Choice(decay_by_depth=0.75, weight_decay=0.0),
        Choice(lr_scale=0.1, decay_by_depth=0.75, weight_decay=0.3),
    ]


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (
            [ParameterGroup(match="bodi.*", frozen=True)],
            "optimizer.groups.0.match: 'bodi.*' matches no parameter. Did you mean",
        ),
        (
            [ParameterGroup(match="*", lr_scale=0.1), ParameterGroup(match="head", lr_scale=10.0)],
            "optimizer.groups.1.match: 'head' sets nothing: groups before it set lr_scale for all the 1 parameters",
        ),
    ],
)
def test_a_pattern_without_effect_is_refused(groups: list[ParameterGroup], sentence: str) -> None:
    with pytest.raises(RecipeError) as raised:
        choose(groups, NAMES)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"match": "x"}, "nothing is set for 'x'"),
        ({"match": "x", "frozen": True, "lr_scale": 2.0}, "frozen parameters have no lr_scale"),
        ({"match": "x", "frozn": True}, "Did you mean 'frozen'?"),
        ({"match": "x", "lr_scale": 0}, "optimizer.groups.0.lr_scale"),
    ],
)
def test_a_group_that_cannot_be_meant_is_refused(group: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence.replace("?", r"\?")):
        read_part("optimizers", {"use": "sgd", "groups": [group]})


def test_any_optimizer_takes_groups_and_writes_them_back() -> None:
    group = {"match": "*.bias", "weight_decay": 0.0}
    for use in ("adamw", "lamb", "paddle.optimizer.Adam"):
        part = read_part("optimizers", {"use": use, "groups": [group]})
        assert part.groups == (ParameterGroup(match="*.bias", weight_decay=0.0),)
        assert part.settings["groups"] == [group]
    assert "groups" not in read_part("optimizers", {"use": "sgd"}).settings


def test_decay_by_depth_counts_the_blocks_that_follow() -> None:
    choices = [Choice(decay_by_depth=0.5), Choice(), Choice(decay_by_depth=0.5)]
    assert depth_scales(choices, {0: 0, 1: 1, 2: 2}, 3) == [0.25, None, 1.0]
    with pytest.raises(RecipeError, match="needs the order of the model's blocks"):
        depth_scales(choices, {}, 0)


def model() -> nn.Layer:
    made = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1D(4), nn.BatchNorm1D(4, weight_attr=False, bias_attr=False)
    )
    made.add_sublayer("tied", nn.Linear(3, 4))
    made.tied.weight = made[0].weight
    return made


def test_parameters_have_all_their_names_and_statistics_are_none() -> None:
    names = [names for names, _ in named_parameters(model())]
    assert names == [("0.weight", "tied.weight"), ("0.bias",), ("1.weight",), ("1.bias",), ("tied.bias",)]


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["1"], [True, False]),
        (["1.weight"], [False, False]),
        (["1.weight", "1.bias"], [True, False]),
        (["[012]*"], [True, True]),
    ],
)
def test_a_frozen_batch_norm_keeps_its_statistics(patterns: list[str], frozen: list[bool]) -> None:
    made = model()
    freeze(made, [ParameterGroup(match=pattern, frozen=True) for pattern in patterns])
    assert [bool(made[number]._use_global_stats) for number in (1, 2)] == frozen
    assert made[1].weight.stop_gradient


def test_something_is_left_to_train() -> None:
    with pytest.raises(RecipeError, match="every parameter is frozen, and nothing is left to train"):
        freeze(model(), [ParameterGroup(match="*", frozen=True)])


def test_others_are_frozen_but_for_those_that_a_group_exempts() -> None:
    made = model()
    others = {names[0] for names, _ in named_parameters(made)}
    freeze(made, [ParameterGroup(match="1.*", frozen=False)], others)
    assert {names[0] for names, p in named_parameters(made) if not p.stop_gradient} == {"1.weight", "1.bias"}
    assert not made[1]._use_global_stats
    assert made[2]._use_global_stats
