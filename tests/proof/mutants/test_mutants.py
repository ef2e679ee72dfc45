"""The blind mutants: what is drawn, that a mutant is in the ranks, that the proof sees one, that the list is sound."""

from types import SimpleNamespace

import numpy as np
import pytest

from paddle_dp.checkpoint import TensorShard
from paddle_dp.proof.trace_files import Trace
from tests.proof.mutants.exam import Exam, drawn
from tests.proof.mutants.recipes import RECIPES
from tests.proof.mutants.recorded import digests, only_rounding
from tests.proof.mutants.reviewed import CLASSES, Entry, Reviewed, write
from tests.proof.mutants.side import mutable_files, put_in
from tests.proof.mutants.sites import ROOT, sites
from tests.proof.mutants.suite import suite_files
from tests.proof.sheets import write_sheet
from tests.proof.zoo.case import Setting
from tests.ranks import run_ranks

SAMPLER, LEARNER = "paddle_dp/data/sampler.py", "paddle_dp/learner/learner.py"


def of_file(file):
    return sites(file, (ROOT / file).read_text())


def the_site(file, function, mutation):
    found = [site for site in of_file(file) if site.function == function and site.mutation == mutation]
    assert len(found) == 1, [site.mutation for site in of_file(file) if site.function == function]
    return found[0]


def test_a_draw_hangs_on_the_seed_alone_and_hardly_on_the_pool():
    pool = of_file(SAMPLER)
    ten = list(drawn(pool, 10, "1"))
    assert len(set(ten)) == 10
    assert list(drawn(reversed(pool), 10, "1")) == ten
    assert list(drawn(pool, 10, "2")) != ten
    assert len({*ten} & {*drawn([site for site in pool if site != ten[0]], 10, "1")}) == 9


def test_what_refuses_tells_or_annotates_is_no_site():
    source = '''
def f(x: list[int] = [1], y=2):
    """Docstring."""
    if x > 1:
        raise ValueError(f"{x + 1}")
    heartbeat.enter("forward", 1)
    z: tuple[int, 3] = x[1:]
    return z
'''
    assert [site.mutation for site in sites("a.py", source)] == [
        "slice from: 1: → 1 + 1:", "constant+1: 1: → 2:", "constant-1: 1: → 0:"
    ]  # fmt: skip


CUT = ("cut", "constant+1: number + 1 → number + 2")


def cut_with_a_mutant(number=None):
    from paddle_dp.data import sampler

    if number is not None:
        put_in(SAMPLER, number)
    return sampler.cut(8, 1, 4)


def test_a_mutant_is_in_the_rank_that_it_was_put_into_alone():
    assert run_ranks(cut_with_a_mutant, 1, the_site(SAMPLER, *CUT).number) == [[2, 6]]
    assert run_ranks(cut_with_a_mutant, 1) == [[2, 4]]


@pytest.mark.long  # .ci/run examines mutants of each commit
def test_the_exam_tells_a_killer_from_what_changes_nothing(tmp_path):
    exam = Exam("mlp", Setting("mlp", 2, ("train.batch=10",)), tmp_path)
    known = {site for site, _ in exam.sites}
    wrong = next(
        s for s in known if s.function == "BatchRunner._factor" and s.mutation.endswith(" * divisor")
    )
    row = exam.judge(wrong, shared=True, seed="")
    assert (row.outcome, row.bits) == ("different", "differ")
    assert row.in_file is not None
    assert "gradient" in row.said
    cached = next(
        s
        for s in known
        if s.function == "BatchRunner._gradient_of" and s.mutation.startswith("constant+1: len")
    )
    row = exam.judge(cached, shared=True, seed="")
    assert (row.outcome, row.bits, row.in_file) == ("same", "equal", None)


def traced(folder, factor=1.0, kind="gradient", samples=8, dtype="float64", output=0.0):
    numbers = {f"{kind}|1|w": TensorShard.full(f"{kind}|1|w", factor * np.arange(1.0, 9.0))}
    row = {"loss": factor, "samples": samples, "empty": False, "shares": [samples], "read": [[0, [1]]]}
    outputs = {"output|1|body.1#0": np.full((8, 2), output)}
    write_sheet(folder, "own", 0, numbers, {"rows": [row], "dtype": dtype}, output=outputs)
    return Trace.read(folder, "own", 1)


def test_rounding_is_told_from_what_is_wrong(tmp_path):
    clean = traced(tmp_path / "clean")
    assert only_rounding(clean, traced(tmp_path / "rounded", 1 + 1e-12))
    assert not only_rounding(clean, traced(tmp_path / "wrong", 1 + 1e-6))
    assert not only_rounding(clean, traced(tmp_path / "read", samples=7))
    assert not only_rounding(clean, traced(tmp_path / "other", kind="probe"))
    assert not only_rounding(clean, None)
    low = traced(tmp_path / "low", dtype="bfloat16")
    assert only_rounding(low, traced(tmp_path / "lower", 1.01, dtype="bfloat16"))


def test_outputs_of_layers_alone_are_no_difference(tmp_path):
    """They say where a difference begins: no verdict hangs on them."""
    traces = [traced(tmp_path / str(output), output=output) for output in (1.0, 2.0)]
    sides = [SimpleNamespace(facts={}, trace={"own": trace}.get) for trace in traces]
    assert only_rounding(*traces)
    assert digests(sides[0]) == digests(sides[1])


def test_the_list_of_survivors_is_sound_and_nothing_in_it_is_gone():
    entries = Reviewed.read().entries
    named = [(entry.key, recipe) for entry in entries for recipe in entry.recipes or RECIPES]
    assert len({*named}) == len(named), "a mutant is twice in the list for one recipe"
    for entry in entries:
        assert entry.kind in CLASSES, entry
        assert entry.why.endswith(".") and len(entry.why) > 20, f"a reason is a sentence: {entry}"
        assert {*entry.recipes} <= {*RECIPES}, entry
    stale = [f"{entry.file}: {entry.text}: {entry.mutation}" for entry in entries if entry.stale]
    assert not stale, (
        f"these lines are gone: python tools/mutants.py --forget drops them\n{chr(10).join(stale)}"
    )


def test_a_list_that_is_written_is_the_list_that_is_read(tmp_path):
    site = the_site(SAMPLER, *CUT)
    words = {"file": site.file, "function": site.function, "text": site.text, "mutation": site.mutation}
    entry = Entry(**words, kind="not exercised", why="A reason.", recipes=("data",))
    write([entry], tmp_path / "list.jsonl")
    assert Reviewed.read(tmp_path / "list.jsonl").entries == (entry,)
    assert not entry.stale
    assert Entry(**{**words, "text": "gone"}, kind="speed", why="A reason.").stale


def test_every_file_that_may_be_mutated_has_tests():
    assert not [file for file in mutable_files() if not suite_files(file)]
    assert str(suite_files("paddle_dp/core/dropout/masks.py")[0]) == "tests/core/dropout/test_masks.py"
