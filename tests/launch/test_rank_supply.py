"""How many ranks an attempt takes: what is offered, what the recipe can be trained on, and who was lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job, LaunchPlan
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.rank_supply import RankSupply, choose
from paddle_dp.launch.restarts import AttemptResult

CPU = Machine(cores=4)
ON = ", 3 are running: saving a checkpoint, then going on with 4"


def pairs_only(ranks: int) -> str:
    """As tensor: 2 refuses."""
    return "" if ranks % 2 == 0 else f"tensor 2 does not divide {ranks} ranks"


def supply(run: Path, ranks: int = 4, least: int | None = 2, obstacle=lambda ranks: "", **more) -> RankSupply:
    job = Job(recipe=Path("r.yaml"), ranks=ranks, least_ranks=least, **more.pop("job", {}))
    plan = LaunchPlan(job=job, machine=more.pop("here", CPU), ranks=ranks, devices=more.pop("devices", ()))
    return RankSupply(plan=plan, run=run, obstacle=obstacle, **more)


PLAN = supply(Path()).plan


def fails(rank: int, plan: LaunchPlan = PLAN, saved: int | None = None, step: int = 10) -> AttemptResult:
    cause = Failure(rank=rank, kind="SIGKILL", message="ended by SIGKILL", exit_status=137)
    return AttemptResult(attempt=Path("a"), status=137, cause=cause, step=step, saved=saved, plan=plan)


@pytest.mark.parametrize(
    ("offers", "least", "least_ranks", "obstacle", "chosen"),
    [
        ([(0, 4)], 1, 1, lambda n: "", [(0, 4)]),
        ([(0, 3)], 1, 1, pairs_only, [(0, 2)]),
        ([(0, 4), (2, 4)], 1, 4, lambda n: "", [(0, 4), (2, 4)]),
        ([(0, 4), (1, 3)], 1, 1, lambda n: "", [(0, 3), (1, 3)]),  # as many on each
        ([(0, 4), (1, 1)], 1, 1, lambda n: "", [(0, 4)]),  # more ranks on fewer nodes
        ([(0, 4), (1, 4), (2, 4)], 1, 4, lambda n: "" if n != 12 else "12 is no", [(0, 4), (1, 4)]),
        ([(0, 1), (1, 1), (2, 1)], 2, 1, pairs_only, [(0, 1), (1, 1)]),
    ],
)
def test_the_most_ranks_that_can_train_it(offers, least, least_ranks, obstacle, chosen):
    assert choose(offers, least, least_ranks, obstacle) == chosen


def test_too_few_are_refused_with_the_reason():
    with pytest.raises(UsageError, match="there are 1 ranks to be had now, and 2 are the least"):
        choose([(0, 1)], 1, 2, lambda n: "")
    with pytest.raises(UsageError, match="On 3: tensor 2 does not divide 3 ranks"):
        choose([(0, 3)], 1, 3, pairs_only)


def test_without_a_span_nothing_changes(tmp_path):
    (tmp_path / "ranks").write_text("1")
    fixed = supply(tmp_path, least=None)
    assert fixed.next([fails(1), fails(1)]) is fixed.plan and fixed.resize(fixed.plan) == ""


def test_the_file_takes_ranks_away_and_gives_them_back(tmp_path):
    file, some = tmp_path / "ranks", supply(tmp_path)
    plan = some.next()
    assert plan.ranks == 4 and some.resize(plan) == ""
    file.write_text(" 3\n")
    why = f"{file} allows 3 ranks, 4 are running: saving a checkpoint, then going on with 3"
    assert some.resize(plan) == why
    plan = some.next()
    assert plan.ranks == 3 and some.shortage(plan).startswith(f"3 of at most 4 ranks: {file} has 3")
    assert some.resize(plan) == ""
    file.write_text("9")
    assert some.resize(plan) == f"4 ranks can be had now{ON}"


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("three", "'three', which is no number"),
        ("-1", "'-1', which is no number"),
        ("²", "'²', which is no number"),
        ("\x00", "'\\x00', which is no number"),
        ("1", "1, fewer than --ranks 2:4 allows"),
        ("0", "0, fewer than --ranks 2:4 allows"),
    ],
)
@pytest.mark.parametrize("before", [None, 2, 9])
def test_what_cannot_be_followed_is_told_once_and_the_number_before_it_stays(
    tmp_path, capsys, word, wrong, before
):
    file, some = tmp_path / "ranks", supply(tmp_path)
    if before is not None:
        file.write_text(f"{before}\n")
    plan, most = some.next(), min(before or 4, 4)
    file.write_text(f"{word}\n")
    assert [some.next().ranks, some.announce_next().ranks, some.resize(plan)] == [most, most, ""]
    told = f"{file} has {wrong}: still at most {most}."
    assert capsys.readouterr().err.count(told) == 1
    file.write_text("")  # the shell has opened it, and has not written yet
    assert some.next().ranks == most
    file.write_text("3")
    assert some.next().ranks == 3
    file.write_text(word)
    assert some.next().ranks == 3 and "still at most 3" in capsys.readouterr().err
    file.unlink()
    assert some.next().ranks == 4


@pytest.mark.parametrize("word", ["", "three"])
def test_what_is_no_number_before_the_start_does_not_limit(tmp_path, word):
    (tmp_path / "ranks").write_text(word)
    assert supply(tmp_path).next().ranks == 4


def test_fewer_than_the_least_do_not_start_and_do_not_stop_those_that_run(tmp_path):
    some = supply(tmp_path)
    (tmp_path / "ranks").write_text("1")
    assert some.resize(some.plan) == ""
    with pytest.raises(UsageError, match="there are 1 ranks to be had now, and 2 are the least"):
        some.next()


def test_a_device_that_is_not_visible_any_more_is_left_out(tmp_path):
    here = [Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))]
    some = supply(tmp_path, here=here[0], devices=("0", "1", "2", "3"), machine=lambda: here[0])
    assert some.next().devices == ("0", "1", "2", "3")
    here[0] = replace(here[0], devices=("0", "2", "3"))
    plan = some.next()
    assert (plan.ranks, plan.devices) == (3, ("0", "2", "3"))
    assert "GPU 1 is not there" in some.shortage(plan)
    here[0] = replace(here[0], devices=("0", "1", "2", "3"))
    assert some.resize(plan) == f"4 ranks can be had now{ON}"
    here[0] = replace(here[0], devices=("1", "2", "3"))
    assert some.resize(plan) == f"GPU 1, 2, 3 can be had now{ON.replace('with 4', 'with 3')}"


def test_only_the_devices_that_were_given_are_used(tmp_path):
    here = Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))
    some = supply(
        tmp_path, 2, 1, job={"devices": (1, 3)}, here=here, devices=("1", "3"), machine=lambda: here
    )
    assert some.next().devices == ("1", "3")


def test_the_rank_that_fails_first_twice_in_a_row_is_left_out(tmp_path):
    some = supply(tmp_path)
    assert some.next([fails(2)]).ranks == 4
    assert some.next([fails(2), fails(1)]).ranks == 4
    assert some.next([fails(2), fails(1), fails(1)]).ranks == 3
    assert "rank 1 was the first to fail 2 times in a row" in some.shortage(some.next())
    assert some.next([fails(2), fails(1), fails(1), fails(1)]).ranks == 3  # another rank has this number now
    assert some.next([fails(2), *[fails(1)] * 4]).ranks == 2


def test_a_node_counts_its_own_ranks_alone(tmp_path):
    first, second = supply(tmp_path), supply(tmp_path)
    plan = replace(first.plan, ranks=3, nodes=2)
    assert not first.note_lost([fails(4, plan)] * 2)
    assert second.note_lost([fails(4, replace(plan, node=1))] * 2)
    assert (first.lost, second.lost) == ([], ["4"])


@pytest.mark.parametrize(("rank", "lost"), [(5, ["1"]), (7, ["3"])])
def test_the_device_that_is_left_out_is_the_one_the_attempt_had(tmp_path, rank, lost):
    """A failed GPU may be gone: its successor in today's list was left out, or the node's launcher ended."""
    here = [Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))]
    some = supply(tmp_path, here=here[0], devices=here[0].devices, machine=lambda: here[0])
    plan = replace(some.plan, nodes=2, node=1)
    here[0] = replace(here[0], devices=("0", "2", "3"))
    assert some.note_lost([fails(rank, plan)] * 2) and some.lost == lost
    assert not some.note_lost([fails(rank, replace(plan, devices=plan.devices[:1]))] * 4)


def test_the_device_of_a_single_node_is_the_one_the_attempt_had_too(tmp_path):
    here = [Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))]
    some = supply(tmp_path, here=here[0], devices=here[0].devices, machine=lambda: here[0])
    plan = some.announce_next()
    here[0] = replace(here[0], devices=("0", "2", "3"))
    assert some.announce_next([fails(1, plan)] * 2).devices == ("0", "2", "3") and some.lost == ["1"]


@pytest.mark.parametrize(("ranks", "lost"), [((1, 1), []), ((1, 1, 1), ["2"]), ((1, 0), ["1"])])
def test_a_device_is_counted_whatever_its_rank_is_now(tmp_path, ranks, lost):
    """GPU 2, which had failed once, was left out for GPU 1's failure before the resize; GPU 1 was not."""
    here = [Machine(cores=4, kind="gpu", devices=("0", "1", "2", "3"))]
    some = supply(tmp_path, here=here[0], devices=here[0].devices, machine=lambda: here[0])
    history = [fails(ranks[0], some.announce_next())]
    here[0] = replace(here[0], devices=("1", "2", "3"))
    for rank in ranks[1:]:
        history.append(fails(rank, some.announce_next(history)))
    some.announce_next(history)
    assert some.lost == lost


def test_a_rank_number_that_was_another_nodes_counts_for_neither(tmp_path):
    """The second of three nodes has left: its number 4 is the third one's."""
    some = supply(tmp_path)
    plans = [replace(some.plan, nodes=3, node=2), replace(some.plan, nodes=2, node=1)]
    assert not some.note_lost([fails(4, plan) for plan in plans]) and not some.lost


def test_no_rank_is_left_out_for_an_error_of_all_ranks_or_the_end_of_the_launcher(tmp_path):
    some, alike = supply(tmp_path), Failure(rank=2, kind="SIGKILL", message="ended by SIGKILL")
    everywhere = replace(fails(1), consequences=[alike])
    cause = Failure(rank=0, kind="launcher", message="Paddle's launcher ended")
    assert some.next([everywhere, everywhere]).ranks == 4
    assert some.next([replace(fails(0), cause=cause)] * 2).ranks == 4 and not some.lost


def test_a_rank_that_fails_after_new_checkpoints_stays(tmp_path):
    assert supply(tmp_path).next([fails(1, saved=20), fails(1, saved=40)]).ranks == 4


def test_a_plugin_is_asked_for_its_devices_before_each_attempt(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("paddle_dp.launch.machine.ask_paddle.cache_clear", lambda: asked.append(0))
    here = Machine(cores=4, kind="npu", devices=("0", "1"))
    some = supply(tmp_path, 2, 1, here=here, devices=("0", "1"), machine=lambda: here)
    some.resize(some.announce_next())
    some.announce_next()
    assert len(asked) == 2  # it takes more than a second: not while ranks are at work
