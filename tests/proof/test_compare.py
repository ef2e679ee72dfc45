"""The statistic: how far two sides are apart, in units of one process's own noise."""

import numpy as np
import pytest

from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.proof.compare import TraceComparison
from paddle_dp.proof.first_difference import DifferenceSearch
from paddle_dp.proof.tolerance import EPS, LARGEST_R, undetermined
from paddle_dp.proof.trace_files import SCORE, Trace, key_of
from tests.proof.sheets import write_sheet

GRADIENT = np.linspace(1.0, 2.0, 8)
FACTS = {"rows": [], "divergence": None, "recorded": [1], "copy_groups": {}, "noise": {}}


def run(folder, name="wide", dtype="float64", noise=1e-15, rank=0, cut=None, rows=(), **values):
    """A run of one rank whose quantities are `values`, by kind; `noise` is the same for each element."""
    shards = {}
    for kind, value in values.items():
        number = key_of(kind, 1, "" if kind == "loss" else "w")
        array = np.asarray(value, "float64")
        shards[number] = (
            TensorShard(number, cut[0], cut[1], array) if cut else TensorShard.full(number, array)
        )
    most = {number: np.full(shard.array.shape, noise, "float32") for number, shard in shards.items()}
    facts = {
        "dtype": dtype, "rows": list(rows), "order": [], "divergence": None, "recorded": [1], "copy_groups": {},
        "noise": {number: float(np.linalg.norm(array)) for number, array in most.items()},
    }  # fmt: skip
    write_sheet(folder, name, rank, shards, facts, noise=most)
    return Trace.read(folder, name, rank + 1)


@pytest.fixture
def part(tmp_path):
    def make(many, one=None, turns=True, has_float64=False, **more):
        one = one or {"gradient": GRADIENT}
        sides = run(tmp_path / "one", **more, **one), run(tmp_path / "many", **more, **many)
        float64_trace = run(tmp_path / "truth", **one) if has_float64 else None
        return TraceComparison(*sides, float64_trace=float64_trace, turns=turns)

    return make


def test_equal_sides_are_the_same(part):
    found = part({"gradient": GRADIENT})
    assert found.same
    assert found.summaries[0].worst.r == 0


def test_a_difference_as_large_as_the_noise_is_the_same_and_eight_times_the_noise_is_not(part):
    assert part({"gradient": GRADIENT + 7.9e-15}).same
    assert not part({"gradient": GRADIENT + 8.2e-15}).same


def test_a_thousandth_of_one_gradient_shows_in_float64(part):
    assert part({"gradient": GRADIENT * 1.001}).summaries[0].worst.r > 1e9


def test_no_noise_at_all_still_leaves_a_unit_in_the_last_place(part):
    assert part({"gradient": GRADIENT * (1 + 2.0**-52)}, noise=0.0).same


@pytest.mark.parametrize(("one", "many"), [({"gradient": GRADIENT}, {}), ({}, {"gradient": GRADIENT})])
def test_a_gradient_that_only_one_side_has_is_a_difference(part, one, many):
    loss = {"loss": [1.0]}
    found = part(many | loss, one | loss)
    assert not found.same
    assert found.distances[0].missing == ("one" if many else "many")


@pytest.mark.parametrize("missing", ["loss", "score"])
def test_a_number_that_ranks_lack_in_a_step_that_they_read_is_a_difference(tmp_path, missing):
    step = {"read": [[0, [0, 1]]], "shares": [2], "samples": 2, "collected": True}
    values = {"loss": [2.0], "score": [0.5]}
    numbers = {"loss": 2.0, "gradient_norm": 1.0, f"{SCORE}w": 0.5}
    one = run(tmp_path / "one", rows=[numbers | step], **values)
    less = {"loss": None} | {name: value for name, value in numbers.items() if not name.startswith(missing)}
    kept = {kind: value for kind, value in values.items() if kind != missing}
    found = TraceComparison(one, run(tmp_path / "read", rows=[less | step], **kept))
    first = DifferenceSearch(found, {"data": 2}).first()
    assert not found.same and first.kind == missing
    assert "is there on one process, and on no rank" in first.sentence
    assert not TraceComparison(one, run(tmp_path / "none", rows=[step | {"loss": None}])).same
    assert TraceComparison(one, run(tmp_path / "not read", rows=[step | {"collected": False}])).same


def test_copies_of_a_weight_that_differ_between_ranks_are_a_difference(part):
    """One process is compared with one copy, which may be right."""
    found = part({"gradient": GRADIENT})
    found.candidate.facts["copy_groups"] = {key_of("gradient", 1, "w"): [[0], [1]]}
    assert found.same  # a gradient that only its owner needs
    row = {"loss": None, "read": [[0, [0, 1]]], "shares": [2]}
    for side in found.sides:
        side.facts["rows"] = [row, row]
    for step, condition in ((1, "with equal gradients, "), (2, "")):
        found.candidate.facts["copy_groups"] = {key_of("weight", step, "w"): [[0], [1]]}
        first = DifferenceSearch(found, {"data": 2}).first()
        assert not found.same and (first.kind, first.step) == ("update", step)
        assert f"step {step}: {condition}rank 0 and rank 1 hold different weights" in first.sentence


@pytest.mark.parametrize("value", [np.inf, np.nan, -1e30])
def test_what_is_constant_in_a_buffer_hides_nothing(tmp_path, value):
    """Of a mask, or of slots that are not filled yet: any distance of its other numbers, and of others, was allowed."""

    def side(folder, number, other):
        keys = key_of("buffer", 1, "slots"), key_of("buffer", 1, "other")
        arrays = dict(zip(keys, (np.array([value, number, value]), np.array([other])), strict=True))
        facts = FACTS | {"dtype": "float64"}
        shards = {key: TensorShard.full(key, array) for key, array in arrays.items()}
        write_sheet(tmp_path / folder, "wide", 0, shards, facts)
        return Trace.read(tmp_path / folder, "wide", 1)

    one = side("one", 3.0, 2.0)
    assert TraceComparison(one, side("same", 3.0 + 2.0**-50, 2.0)).same
    assert not TraceComparison(one, side("inside", 3.001, 2.0)).same
    assert not TraceComparison(one, side("beside", 3.0, 2.001)).same


@pytest.mark.parametrize("kind", ["gradient", "update", "state", "statistic"])
def test_an_infinity_on_both_sides_excuses_no_other_element(part, kind):
    infinite = np.array([*GRADIENT, np.inf])
    wrong = infinite * 1.001
    assert part({kind: infinite}, {kind: infinite}).same
    assert not part({kind: wrong}, {kind: infinite}).same


def test_a_large_held_out_number_hides_no_other(tmp_path):
    """A perplexity of 1e12 allowed a held-out loss to be off by 7."""

    def side(folder, loss):
        numbers = {"loss": loss, "perplexity": 1e12}
        shards = {
            (key := key_of("evaluation", 0, name)): TensorShard.full(key, np.array([number]))
            for name, number in numbers.items()
        }
        facts = FACTS | {"dtype": "float32"}
        write_sheet(tmp_path / folder, "own", 0, shards, facts | {"evaluated": 100})
        return Trace.read(tmp_path / folder, "own", 1)

    assert TraceComparison(side("one", 27.6), side("same", 27.6 + 1e-6)).same
    assert not TraceComparison(side("one", 27.6), side("many", 27.7)).same


def test_a_gradient_whose_noise_has_no_bound_shows_no_fault(part):
    """It was left out where the smallest fault that shows is sought, and nothing of it was judged."""
    assert part({"gradient": GRADIENT * 2}, noise=np.inf).shows["w"] == np.inf
    nothing = {"gradient": np.zeros(8)}
    assert part(nothing, nothing, noise=1e-15).shows["w"] == 0


def test_a_frozen_weight_may_not_move_by_one_bit(part):
    frozen = {"frozen": np.zeros(3)}
    assert part(frozen, frozen).same
    assert not part({"frozen": [0.0, 1e-300, 0.0]}, frozen).same


def test_a_large_frozen_weight_hides_nothing(tmp_path):
    """Each parameter is measured with its own noise, not with the length of the whole model."""
    one = {"gradient": GRADIENT, "frozen": np.zeros(2), "weight": np.full(2, 3e4), "update": np.full(8, 1e-3)}
    many = one | {"update": np.zeros(8)}
    assert not TraceComparison(run(tmp_path / "one", **one), run(tmp_path / "many", **many)).same


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_same_infinity_on_both_sides_is_equal_and_on_one_side_is_not(part, value):
    broken = GRADIENT.copy()
    broken[3] = value
    assert part({"gradient": broken}, {"gradient": broken}).same
    assert not part({"gradient": broken}).same
    assert not part({"gradient": GRADIENT}, {"gradient": broken}).same


def test_elements_without_a_true_gradient_are_judged_apart_and_hide_nothing(part):
    """Under Adam they move by the whole learning rate, hither or thither; the others must not get away with it."""
    gradient = np.concatenate([GRADIENT, np.full(4, 1e-16)])
    honest = np.concatenate([GRADIENT, np.full(4, -1e-16)])
    assert part({"gradient": honest}, {"gradient": gradient}).same
    found = part({"gradient": honest}, {"gradient": gradient}).distances[0]
    assert found.undetermined == pytest.approx(4 / 12)
    honest[:8] *= 1 + 1e-12
    assert not part({"gradient": honest}, {"gradient": gradient}).same


def test_what_is_nothing_on_both_sides_is_not_undetermined():
    assert not undetermined(np.zeros(3), np.zeros(3)).any()
    assert undetermined(np.full(3, 1e-9), np.full(3, 1e-9)).all()


def test_a_zero_gradient_that_becomes_large_is_a_difference(part):
    nothing = {"gradient": np.full(4, 1e-16)}
    assert not part({"gradient": np.full(4, 1e-3)}, nothing).same


def test_slices_of_several_ranks_make_one_quantity(tmp_path):
    one = run(tmp_path / "one", gradient=GRADIENT)
    for rank, shard in enumerate((GRADIENT[:4], GRADIENT[4:])):
        many = run(tmp_path / "many", rank=rank, gradient=shard, cut=((8,), (4 * rank,)))
    assert many.cut(key_of("gradient", 1, "w"))
    assert TraceComparison(one, many).same


def test_running_statistics_are_judged_and_buffers_by_their_own_row(part):
    seven = {"statistic": [7.0], "buffer": [7.0]}
    found = part({"statistic": [0.8], "buffer": [7.0]}, seven)
    assert {kind.kind: kind.worst.same for kind in found.summaries} == {"statistic": False, "buffer": True}


def test_a_unit_that_turned_over_in_the_first_batch_alone_is_no_fault(part):
    """A fault is in every batch: then the least r is large, too."""
    one, off = {"gradient": GRADIENT, "probe": GRADIENT}, GRADIENT * 1.01
    turned = part({"gradient": off, "probe": GRADIENT}, one, noise=1e-5)
    assert turned.same
    assert turned.turned["w"] > 1e3
    assert not part({"gradient": off, "probe": off}, one, noise=1e-5).same


@pytest.mark.parametrize(
    ("off", "has_float64", "same"), [(0.3, True, True), (0.3, False, False), (0.5, True, False)]
)
def test_a_turn_may_be_larger_where_float64_is_compared_too(part, off, has_float64, same):
    """A ReLU that switches behind 4 pixels is a quarter of a bias' gradient (shufflenet_v2_x0_25)."""
    one = {"gradient": GRADIENT, "probe": GRADIENT}
    many = {"gradient": GRADIENT * (1 + off), "probe": GRADIENT}
    assert part(many, one, noise=1e-4, has_float64=has_float64).same == same


@pytest.mark.parametrize(
    ("turns", "noise", "first", "same"),
    [(True, 1e-5, 1.0, True), (False, 1e-5, 1.0, False), (True, 1e-7, 1.0, False), (True, 1e-5, 1.01, False)],
)
def test_a_unit_that_turned_over_in_the_only_probe_is_no_fault_if_the_first_batch_has_none(
    part, turns, noise, first, same
):
    """`verify --steps 2` of PaddleClas's GhostNet was DIFFERENT: it has one probe, in which ReLUs switched."""
    one = {"gradient": GRADIENT, "probe": GRADIENT}
    many = {"gradient": GRADIENT * first, "probe": GRADIENT * 1.01}
    assert part(many, one, noise=noise, turns=turns).same == same


@pytest.mark.parametrize(
    ("turns", "noise", "loss"), [(False, 1e-5, 1.0), (True, 1e-7, 1.0), (True, 1e-5, 1.1)]
)
def test_nothing_turned_over_in_a_smooth_model_nor_far_beyond_the_noise_nor_beside_a_fault(
    part, turns, noise, loss
):
    """A sentence on a ReLU stood above DIFFERENT, of a model without one."""
    one = {"gradient": GRADIENT, "probe": GRADIENT, "loss": 1.0}
    many = {"gradient": GRADIENT * 1.01, "probe": GRADIENT, "loss": loss}
    found = part(many, one, noise=noise, turns=turns)
    assert not found.same and not found.turned


@pytest.mark.parametrize(
    ("noise", "one", "shows"),
    [
        (1e-15, GRADIENT, 1e-14),
        (0.01, GRADIENT, 0.05),
        (1e-3, GRADIENT * 1e-3, 8 / 1.5),
        (1e-17, np.full(8, 1e-17), 9.5e-10),  # no true gradient: of the model's it is nothing
    ],
)
def test_the_fault_that_shows_is_counted_in_the_noise(tmp_path, noise, one, shows):
    whole, most = np.full(8, 1.0 / 8**0.5), np.full(8, noise, "float32")
    arrays = {key_of("gradient", 1, "w"): one, key_of("gradient", 1, "other"): whole}
    floors = {key_of("gradient", 1, "w"): most}
    norms = {number: float(np.linalg.norm(array)) for number, array in floors.items()}
    facts = FACTS | {"dtype": "float64", "noise": norms}
    shards = {number: TensorShard.full(number, array) for number, array in arrays.items()}
    write_sheet(tmp_path, "wide", 0, shards, facts, noise=floors)
    trace = Trace.read(tmp_path, "wide", 1)
    found = TraceComparison(trace, trace).shows
    assert found["w"] == pytest.approx(shows, rel=0.1)
    assert found["other"] < 1e-14


def test_an_update_stands_beside_what_one_process_makes_of_the_ranks_gradients(tmp_path):
    """To the last places of its arithmetic, whatever noise gradients have; a sign that rounding turned is no excuse."""
    one = run(tmp_path / "one", noise=1e-3, gradient=GRADIENT, update=GRADIENT)
    again = run(tmp_path / "again", update=-GRADIENT)
    for update, same in ((-GRADIENT, True), (-GRADIENT * (1 + 1e-14), False), (GRADIENT, False)):
        many = run(tmp_path / "many", gradient=GRADIENT, update=update)
        assert TraceComparison(one, many, replayed=again).same is same


def test_float32_allows_its_own_noise(part):
    assert part({"gradient": GRADIENT * (1 + 4 * EPS["float32"])}, dtype="float32", noise=0.0).same
    assert not part(
        {"gradient": GRADIENT * (1 + 2 * LARGEST_R * EPS["float32"])}, dtype="float32", noise=0.0
    ).same
