"""Runs beside each other: what differs, and only that; runs of different length and kind; a safe page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddle_dp.cli import main
from paddle_dp.errors import UsageError
from paddle_dp.report.comparison import RunComparison, read_runs, settings_of, write_comparison
from paddle_dp.report.report import write_report
from tests.report import runs
from tests.report.test_report import EVIL, Balanced, good_run


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: of 40 steps with acc1 0.9 of 20 samples, and of 10 steps with 0.95, another width and one rank."""
    short = [
        runs.start(ranks=1),
        *runs.steps(1, 10),
        runs.line("evaluated", 10, acc1=0.95, loss=0.3, held_out=20),
    ]
    facts = runs.certificate(runs.attempt(ranks=1, layout={"data": 1}, to=10))
    recipe = runs.RECIPE.replace("64", "32", 1).replace("name: digits", "name: other")
    second = runs.write(tmp_path / "b", *short, recipe=recipe, certificate=facts,
                        evaluation=runs.evaluation([[10, 0], [1, 9]]))  # fmt: skip
    return good_run(tmp_path / "a"), second


def row(comparison: RunComparison, key: str) -> tuple[str, ...]:
    return next(row[1:] for row in comparison.results if row[0].strip() == key)


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    comparison = read_runs(pair(tmp_path))
    assert comparison.differences == [("model.width", "64", "32")]  # nor name, which differs in every run
    assert ("ranks", "2", "1") in comparison.circumstances and (
        "layout",
        "data 2",
        "–",
    ) in comparison.circumstances
    assert not any(key == "paddle" for key, *_ in comparison.circumstances)


def test_the_end_and_the_best_of_each_run(tmp_path: Path) -> None:
    comparison = read_runs(pair(tmp_path))
    assert row(comparison, "held-out acc1") == ("0.9", "0.95")
    assert row(comparison, "best acc1") == ("0.95 at step 20", "0.95 at step 10")
    assert row(comparison, "best loss") == ("0.4 at step 20", "0.3 at step 10")
    assert row(comparison, "updates") == ("40", "10") and row(comparison, "end")[0] == "finished"
    assert row(comparison, "sent by a rank") == ("40 kB", "10 kB")
    assert comparison.warnings == [
        "acc1: the 95 % intervals of the runs overlap, so the differences may be chance."
    ]


def test_settings_of_callbacks_are_compared_by_name() -> None:
    first = settings_of({"callbacks": [{"use": "console", "every": "1 step"}, {"use": "metrics"}]})
    assert first == {
        "callbacks.console.use": "console", "callbacks.console.every": "1 step", "callbacks.metrics.use": "metrics"
    }  # fmt: skip
    twice = settings_of({"metrics": [{"use": "top_k", "k": [3]}, {"use": "top_k", "k": [4]}]})
    assert twice["metrics.top_k.k"] == "[3]" and twice["metrics.top_k[2].k"] == "[4]"
    assert settings_of({"a": None, "b": True, "c": {}}) == {"a": "null", "b": "true", "c": "{}"}


def test_long_values_are_compared_whole_and_cut_where_they_differ(tmp_path: Path) -> None:
    """Both were cut to the same 120 characters, so "The recipes have the same settings." """
    names = [f"class_{n}" for n in range(40)]
    folders = [
        runs.write(
            tmp_path / label, runs.start(), recipe=f"model: {{use: mlp, names: {json.dumps(list_)}}}\n"
        )
        for label, list_ in (("a", names), ("b", [*names[:30], "other", *names[31:]]), ("c", names))
    ]
    ((key, *shown),) = read_runs(folders).differences
    assert key == "model.names" and len({*shown}) == 2 and shown[0] == shown[2]
    assert "'class_29', 'class_30'" in shown[0] and "'class_29', 'other'" in shown[1]
    assert all(text[0] == text[-1] == "…" and len(text) <= 122 for text in shown)
    write_comparison(read_runs(folders), tmp_path / "c.html")
    assert "have the same settings" not in (tmp_path / "c.html").read_text()
    (tmp_path / "c" / "recipe.yaml").write_text("model: {use: mlp}\n")
    ((_, *shown),) = read_runs([folders[0], folders[2]]).differences
    assert shown == [str(names)[:120] + "…", "–"]


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    (second / "metrics.jsonl").unlink()
    (second / "recipe.yaml").unlink()
    facts = runs.certificate(runs.attempt())
    facts["data"]["test"]["digest"] = "c" * 32
    (second / "certificate.json").write_text(json.dumps(facts))
    warnings = read_runs([first, second]).warnings
    assert [w.split(" ")[0:2] for w in warnings] == [["b", "has"], ["b", "has"], ["The", "held-out"]]
    assert read_runs([first, second]).differences == []  # of one recipe
    runs.write(second, runs.start(), runs.line("evaluated", 9, acc1=0.9, held_out=19),
               certificate=runs.certificate(runs.attempt()))  # fmt: skip
    (sentence,) = read_runs([first, second]).warnings  # of 20 and 19 samples, and nothing on chance
    assert "held-out samples differ" in sentence


def test_the_page_has_a_picture_per_quantity_and_position(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    write_report(first)
    page = tmp_path / "pages" / "compare.html"
    page.parent.mkdir()
    write_comparison(read_runs([first, second]), page)
    text = page.read_text()
    shown = Balanced(text).text
    for title in ("training loss, over steps", "held-out acc1, over samples", "held-out loss, over seconds",
                  "held-out acc1, over bytes sent by a rank", "learning rate, over steps"):  # fmt: skip
        assert title in shown
    assert 'href="../a/report.html"' in text and "../b/report.html" not in text  # b has no report yet


def test_labels_and_settings_are_escaped(tmp_path: Path) -> None:
    first, _ = pair(tmp_path)
    evil = runs.write(tmp_path / "<b>", runs.start(), runs.line("evaluated", 1, **{EVIL: 0.5}),
                      recipe=f"model: {{use: \"{EVIL[:25]}\"}}\n")  # fmt: skip
    write_comparison(read_runs([first, evil]), tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text()
    assert "<script" not in text and "<b>" not in text.replace("<b>0", "")
    Balanced(text)


def test_mistakes_are_told(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    with pytest.raises(UsageError, match="two runs or more"):
        read_runs([first])
    with pytest.raises(UsageError, match="is given twice"):
        read_runs([first, second, first])
    with pytest.raises(UsageError, match="takes the file to write"):
        write_comparison(read_runs([first, second]), second)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_comparison(read_runs([first, second]), tmp_path / "none" / "c.html")
    twins = read_runs([first, runs.write(tmp_path / "x" / "a", runs.start())])
    assert len({*twins.labels}) == 2


def test_the_verbs_print_tables_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair(tmp_path)
    for words in (
        ["compare", str(first), str(second), "--html", str(tmp_path / "c.html")],
        ["report", str(first)],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
    printed = capsys.readouterr().out
    assert "model.width" in printed and "0.95 at step 20" in printed and "may be chance" in printed
    assert printed.endswith(f"{first / 'report.html'}\n") and (tmp_path / "c.html").exists()
