"""Attempts and failures, the environment, and the recipe with the command that repeats it."""

from __future__ import annotations

import math

from paddle_dp.report.facts import MOST_ROWS, degrees_of, recipe_path
from paddle_dp.report.html_page import Html, command, details, paragraph, section, table
from paddle_dp.report.run_record import RunRecord, begin_seconds, number
from paddle_dp.text import few

_MOST_TEXT = 100_000  # characters of a recipe


def attempts(run: RunRecord) -> Html:
    rows, begun = [], [begin_seconds(attempt) for attempt in run.attempts]
    for index, attempt in enumerate(run.attempts):
        until = begun[index + 1] if index + 1 < len(begun) else math.inf
        causes = [end.cause for end in run.attempt_ends if begun[index] <= end.ended and end.began < until]
        why = next(filter(None, reversed(causes)), attempt.get("why") or "its end was not recorded")
        changes = [f"changed: {few(attempt['changes'], 3)}"] if attempt.get("changes") else []
        date = str(attempt.get("begun")).replace("T", " ").replace("Z", "")
        steps = f"{attempt.get('from')} to {attempt.get('to')}"
        rows.append((index + 1, date, str(attempt.get("ranks")), steps, "; ".join([why, *changes])))
    before = [
        (end.log, f"exit status {end.status}", end.cause)
        for end in run.attempt_ends
        if end.status and not any(start <= end.ended for start in begun)
    ]
    refused = [
        (int(number(line.get("refused_step")) or line["step"]), *(str(line.get(k, "")) for k in ("action", "why")))
        for line in run.events.get("refused", ())
    ]  # fmt: skip
    failures = run.events.get("save_failed", ())
    failed_saves = [(int(line["step"]), str(line.get("message"))) for line in failures]
    has_story = len(rows) > 1 or run.ending[0] != "done"
    plain = paragraph("One attempt, without a restart, a refused update or a failed checkpoint.")
    body = [
        table(("attempt", "began (UTC)", "ranks", "steps", "end"), rows[-MOST_ROWS:] if has_story else ()),
        table(("log", "ended with", "cause, before any update"), before),
        table(("step", "refused update", "reason"), refused[-MOST_ROWS:]),
        table(("step", "checkpoint that could not be written"), failed_saves[-MOST_ROWS:]),
    ]
    body = body if any(body) else [plain]
    state, sentence = run.ending
    # Another callback, such as one with a budget of hours, may let it go on; early_stop would end it at once.
    is_over = state == "done" or (state == "early" and "did not improve in" in sentence)
    if not is_over and run.recipe and (run.folder / "checkpoints").is_dir():
        body += [paragraph("It goes on from its newest checkpoint with:") + _train(run, " --resume")]
    return section("Restarts and failures", *body)


def _train(run: RunRecord, more: str = "") -> Html:
    """The command that trains the run's recipe on as many nodes and ranks; --ranks counts those of one node."""
    text = f"paddle-dp train {recipe_path(run)} --ranks {run.ranks // run.nodes}"
    if run.nodes == 1:
        return command(text + more)
    where = f"Type it on each of the {run.nodes} nodes, with --master HOST:PORT and the node's --node-rank, or start "
    cluster = "it once by the cluster's engine, such as srun, with --nodes auto."
    return command(f"{text} --nodes {run.nodes}{more}") + paragraph(where + cluster)


def environment(run: RunRecord) -> Html:
    attempt, facts = run.attempt, run.last("measured").get("facts") or {}
    rows = [(str(name), str(version)) for name, version in dict(attempt.get("versions") or {}).items()]
    for key, label in (("host", "machine"), ("device", "device")):
        if value := attempt.get(key) or run.last("start").get(key):
            rows.append((label, str(value)))
    hosts = {str(row.get("host")) for row in run.last("measured").get("ranks") or () if isinstance(row, dict)}
    rows += [("machines", few(sorted(hosts), 8))] if len(hosts) > 1 else []
    rows += [("processors", str(facts["cores"]))] if facts.get("cores") else []
    memory, degrees = [size for _, size in run.curve("step", "memory")], degrees_of(run)
    # Lines have rank 0's, which in other layouts may be less than another's, and with servers the most of all ranks.
    of = "rank 0" if degrees is None or degrees.all_read else "a rank"
    rows += [(f"memory of {of}, at most", f"{max(memory) / 2**30:.2f} GB")] if memory else []
    rows += [(str(name), str(value)) for name, value in dict(attempt.get("variables") or {}).items()]
    return section("Environment", table(("", ""), rows))


def recipe(run: RunRecord) -> Html:
    if not run.recipe_text:
        text = "The training was described in Python (Trainer.of): run that script again."
        return section("Recipe", paragraph(text))
    text = run.recipe_text[:_MOST_TEXT] + ("\n…" if len(run.recipe_text) > _MOST_TEXT else "")
    return section(
        "Recipe, and how to repeat this",
        paragraph("The same training again; this run is moved aside, not overwritten:"),
        _train(run),
        details("The full recipe, with every default", command(text)),
    )
