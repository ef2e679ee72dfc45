"""How a training ended, and what was proven of it: the first sections of a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from html import escape
from statistics import median

from paddle_dp.report.facts import (
    MOST_ROWS,
    STATES,
    component_name,
    degrees_of,
    main_scores,
    recipe_path,
    sample_count,
    timespan,
)
from paddle_dp.report.html_page import Html, command, details, note, paragraph, section, table, tiles
from paddle_dp.report.run_record import RunRecord, number
from paddle_dp.text import CAN_DIFFER, plural

# The headline ---------------------------------------------------------------------------------------------------------


def headline(run: RunRecord) -> Html:
    state, sentence = run.ending
    shown, kind = STATES[state]
    body = [
        f'<p class="quiet">paddle_dp · report of one training</p><h1>{escape(run.name)}</h1>',
        f'<p><span class="state {kind}">{shown}</span></p>',
        paragraph(_story(run)),
        note(sentence, kind) if state != "done" else "",
        tiles([*_score_tiles(run), *_tiles(run)]),
        *(note(text, "warn") for text in run.notes),
    ]
    return "\n".join(body)


def _story(run: RunRecord) -> str:
    """A few sentences: the model, its data, how long on which ranks, and the samples of its scores."""
    keys = ("model", "dataset", "loss", "optimizer")
    model, dataset, loss, optimizer = (component_name(run.recipe.get(key)) for key in keys)
    samples, test_samples, degrees = sample_count(run, "train"), sample_count(run, "test"), degrees_of(run)
    named = f"The model {model} was trained on the data set {dataset}"
    trained = named if model else "A script's model was trained"
    trained += f" ({samples:,} samples)" if samples else ""
    train = run.recipe.get("train")
    batch = train.get("batch") if isinstance(train, dict) else None
    steps = plural(run.step, "update") + (f" of {batch} samples" if batch else "")
    ranks = "one process" if run.ranks == 1 else f"{run.ranks} ranks" + (f" ({degrees})" if degrees else "")
    device = run.last("start").get("device") or run.attempt.get("device")
    machine = ", ".join([ranks, *([str(device)] if device else [])])
    duration = f", in {timespan(run.seconds)}" if run.seconds else ""
    sentences = [f"{trained}: {steps} on {machine}{duration}."]
    sentences += [f"Loss: {loss}, optimizer: {optimizer}."] if loss and optimizer else []
    if not run.events.get("evaluated"):
        sentences.append("It was not evaluated on held-out samples.")
    elif evaluated := int(number(run.last("evaluated").get("held_out")) or test_samples):
        is_all = evaluated >= test_samples
        count = f"all {evaluated:,}" if is_all else f"{evaluated:,} of the {test_samples:,}"
        sentences.append(f"Scores are over {count} held-out samples, which it did not learn from.")
    return " ".join(sentences)


def _score_tiles(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    for name in main_scores(run)[:2]:
        points, best = run.curve("evaluated", name), run.best(name)
        if not points or best is None:
            continue
        limits = run.bounds(name, points[-1][1])
        more = [f"with 95 % confidence {limits[0]:.3g} to {limits[1]:.3g}"] if limits else []
        is_last = best[1] == points[-1][1]
        more += ["the best of all evaluations" if is_last else f"best {best[1]:.4g} at step {best[0]:.0f}"]
        yield f"held-out {name}", f"{points[-1][1]:.4g}", "; ".join(more)


def _tiles(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    if losses := run.curve("step", "loss"):
        yield "training loss", f"{losses[-1][1]:.4g}", f"{losses[0][1]:.4g} at step {losses[0][0]:.0f}"
    total = run.last("start").get("total_steps") or run.certificate.get("steps")
    epochs = max((number(lines[-1].get("epoch")) or 0 for lines in run.events.values() if lines), default=0)
    done = f"{run.step:,} of {total:,}" if type(total) is int and total else f"{run.step:,}"
    yield "updates", done, plural(int(epochs), "complete epoch")
    if run.seconds:
        speeds = [speed for _, speed in run.curve("step", "samples_per_second")]
        yield "time", timespan(run.seconds), f"{median(speeds):,.0f} samples/s (median)" if speeds else ""
    proven = "proven" if run.attempt.get("verdict") else "one process" if run.ranks == 1 else "not proven"
    yield "same as one process?", proven, "see «What was proven»"


# What was proven ------------------------------------------------------------------------------------------------------


def proof(run: RunRecord) -> Html:
    attempt, folder = run.attempt, run.folder
    sentence = attempt.get("proof")
    if attempt.get("verdict"):
        since = f"; these are the updates since step {attempt.get('from')}" if len(run.attempts) > 1 else ""
        proven = str(sentence or "paddle-dp verify compared just this training with one process")
        body = [note(f"Proven: {proven}{since}.", "good")]
    elif isinstance(sentence, str):
        body = [note(f"The proof, when the training ended: {sentence}", "warn")]
    elif run.ranks == 1:
        body = [
            paragraph("One process trained it: this is the result that others are compared with."),
            command(f"paddle-dp verify {recipe_path(run)} --ranks 2") if run.recipe else "",
        ]
    elif "proof" not in attempt:
        body = [note("Not proven: the training left no verdict on record.", "warn")]
    elif run.recipe:
        body = [note("Not proven: this strategy learns something else than one process, on purpose.", "warn")]
    else:
        script = "paddle-dp verify compares recipes, and this training is a script's."
        body = [note(f"Not proven: {script}", "warn")]
    body.append(paragraph(_PROVEN, "quiet"))
    differences = attempt.get("differences") or ()
    for difference in differences:
        kind = "Can differ from" if difference.endswith(CAN_DIFFER) else "Not as on"
        body.append(note(f"{kind} one process: {difference.removesuffix(CAN_DIFFER)}", "warn"))
    if run.certificate:
        data = [
            (split, facts.get("samples", ""), str(facts.get("digest", ""))[:12])
            for split, facts in dict(run.certificate.get("data") or {}).items()
        ]
        saved = [row for each in run.attempts for row in each.get("saved") or ()]
        digests = [(row["step"], str(row.get("model"))[:12]) for row in saved]
        replay = " --replay 1" if run.certificate.get("replay") else ""
        content = [
            table(("data", "samples", "digest"), data),
            table(("checkpoint of step", "digest of its weights"), digests[-MOST_ROWS:]),
            paragraph("Compare the checkpoints with these digests, and train a part again on one process:"),
            command(f"paddle-dp certificate {shlex.quote(str(folder))}{replay}"),
        ]
        body.append(details("The certificate: data, weights, and how to check them", *content))
    return section("What was proven", *body)


_PROVEN = (
    "Proven means: the first steps of this recipe, code and data, on as many ranks, were computed on one process, too, "
    "and every gradient and update was equal but for rounding."
)
