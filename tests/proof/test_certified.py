"""`paddle-dp certificate`: what it reads, what it trains again, and that it sees what is not as certified."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_dp.checkpoint import step_name
from paddle_dp.errors import JobError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.proof import certified, retrain
from paddle_dp.proof.certified import BAD, GOOD, Interval, certificate, evenly_spread, judgement
from paddle_dp.train.evaluation import as_json
from tests.house.recipes import small_recipe
from tests.jobs import run_in_forks

RECIPE = small_recipe(
    "length: 12 steps, batch: 64",
    callbacks="[{use: metrics, every: 1 step}, {use: checkpoint, every: 4 steps}]",
)
NAN, INF = float("nan"), float("inf")
LOSSES = [[1, 2.5, 2.5, 1e-7], [2, 2.25, 2.25 + 5e-7, 1e-7]]


@pytest.mark.parametrize(
    ("result", "exact", "same"),
    [
        ({"bits": True, "weights": None, "losses": LOSSES[:1]}, True, True),
        ({"bits": True, "weights": None, "losses": LOSSES}, True, False),
        ({"bits": True, "weights": None, "losses": LOSSES}, False, True),
        ({"bits": False, "weights": [7.9, 1.0, 100.0], "losses": []}, False, True),
        ({"bits": False, "weights": [8.1, 1.0, 100.0], "losses": []}, False, False),
        ({"bits": False, "weights": [7.9, 1.0, 100.0], "losses": []}, True, False),
        ({"bits": None, "weights": None, "losses": [[3, 2.0, 2.01, 1e-3]]}, False, False),
        (
            {"bits": None, "weights": None, "losses": [[3, 2.0, 2.5, 1.0]]},
            False,
            True,
        ),  # chaos proves nothing
        ({"bits": False, "weights": [float("inf"), 1.0, 100.0], "losses": []}, False, False),
        ({"bits": False, "weights": [0.5, 0.0, 0.0], "losses": []}, False, False),  # nothing moved here
        # NaN is a loss like any other: on both sides, or a difference.
        ({"bits": True, "weights": None, "losses": [[1, NAN, NAN, 1e-7]]}, True, True),
        ({"bits": None, "weights": None, "losses": [*LOSSES, [3, NAN, 2.0, 1e-7]]}, False, False),
        ({"bits": None, "weights": None, "losses": [*LOSSES, [3, 2.0, NAN, 1e-7]]}, False, False),
        ({"bits": None, "weights": None, "losses": [*LOSSES, [3, 2.0, INF, 1e-7]]}, False, False),
        # A loss near 0 is no chaos.
        ({"bits": None, "weights": None, "losses": [*LOSSES, [3, 0.5, 1e-9, 1e-7]]}, False, False),
        ({"bits": None, "weights": None, "losses": [*LOSSES, [3, 5e-8, 1e-9, 1e-7]]}, False, True),
        ({"bits": None, "weights": None, "losses": [[3, 0.5, 0.0, 0.0]]}, False, False),
    ],
)
def test_a_distance_is_judged_by_what_rounding_does(result, exact, same):
    assert judgement({"digest": "d", **result}, exact)[0] is same


NOW = {"device": "cpu", "paddle": "3.3.1", "numpy": "2.1.0", "python": "3.12.3"}


@pytest.mark.parametrize(
    ("now", "reasons"),
    [
        (NOW, []),
        ({**NOW, "paddle": "3.4.0"}, ["paddle was 3.3.1 and is 3.4.0"]),
        ({**NOW, "numpy": "2.2.0"}, ["numpy was 2.1.0 and is 2.2.0"]),
        ({**NOW, "device": "gpu:0"}, ["an accelerator adds in any order", "device was cpu and is gpu:0"]),
    ],
)
def test_one_process_with_other_kernels_is_judged_by_what_rounding_does(now, reasons):
    """After an update of Paddle, or on a GPU, an honest run of one process was DIFFERENT for its last bits."""
    versions = {name: NOW[name] for name in ("paddle", "numpy", "python")} | {"paddle_dp": "0.1"}
    attempt = {"device": "cpu", "versions": versions}
    assert certified.other_kernels([attempt, attempt], now) == reasons
    near = {"digest": "d", "bits": False, "weights": [7.9, 1.0, 100.0], "losses": LOSSES}
    same, lines = judgement(near, True, reasons)
    assert same is bool(reasons)
    assert ("bits may differ: " + "; ".join(reasons) in lines) is bool(reasons)
    assert not judgement({**near, "weights": [8.1, 1.0, 100.0]}, True, reasons)[0]
    equal = judgement({**near, "bits": True, "losses": LOSSES[:1]}, True, reasons)
    assert equal[0] and "bits may differ" not in str(equal[1])


def test_a_constant_hides_no_weight_and_an_infinite_loss_no_later_one(monkeypatch):
    """Beside a mask of -1e30, or of minus infinities, any distance of the weights proved nothing, and passed."""
    before = {"w": np.ones(2), "mask": np.array([-1e30, -INF])}

    def train(kind):
        shift = 0.0 if kind is None else 1e-7
        weights = {"w": np.full(2, 1.5 + shift), "mask": before["mask"] * (1 + shift)}
        return retrain.TrainingResult({1: INF, 2: 1.0 + shift}, "here", weights)

    recipe = SimpleNamespace(train=SimpleNamespace(precision=SimpleNamespace(dtype="float32")))
    options = {
        "to": 2,
        "losses": {"1": INF, "2": 1.5},
        "saved": "there",
        "digest": "run",
        "ranks": 2,
        "tensor": 1,
    }
    again = retrain.Retraining(recipe, options, mesh=None)
    again._train, again.before = train, before
    monkeypatch.setattr(retrain, "_saved", lambda path: before | {"w": np.full(2, 1.51)})
    result = again.result()
    assert result["weights"][1] < 1e-6 and not judgement({**result, "losses": []})[0]
    assert [row[3] < 1e-6 for row in result["losses"]] == [True, True]
    assert not judgement({**result, "weights": None})[0]


def test_the_noise_of_tensor_ranks_belongs_to_a_run_that_had_them(monkeypatch):
    """In 16 bits products in blocks are nearly the only noise in a sample: an honest run could be DIFFERENT."""
    before = {"w": np.ones(2)}

    def train(kind):
        shift = 1e-3 * (kind is not None and kind.name.startswith("blocks"))
        return retrain.TrainingResult({1: 1.0 + shift}, "here", {"w": np.full(2, 1.5 + shift)})

    monkeypatch.setattr(retrain, "_saved", lambda path: {"w": np.full(2, 1.501)})
    recipe = SimpleNamespace(train=SimpleNamespace(precision=SimpleNamespace(dtype="bfloat16")))
    for tensor, same in ((1, False), (2, True)):
        options = {
            "to": 1,
            "losses": {"1": 1.001},
            "saved": "there",
            "digest": "run",
            "ranks": 2,
            "tensor": tensor,
        }
        again = retrain.Retraining(recipe, options, mesh=None)
        again._train, again.before = train, before
        assert judgement(again.result())[0] is same


def test_a_loss_that_is_no_number_is_read(tmp_path):
    rows = [{"event": "step", "step": n, "loss": value} for n, value in enumerate((2.0, NAN, INF), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(as_json, rows)))
    assert repr(certified.losses(tmp_path)) == "{1: 2.0, 2: nan, 3: inf}"


def test_intervals_are_spread_evenly():
    found = [Interval(start=n, to=n + 1, begin=None, end=None, recipe={}) for n in range(9)]
    assert [each.start for each in evenly_spread(found, 3)] == [0, 4, 8]
    assert evenly_spread(found, 0) == [] and evenly_spread(found[:2], 3) == found[:2]


def test_a_folder_without_a_certificate_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="holds no certificate"):
        certificate(tmp_path)


@pytest.mark.long
def test_a_run_of_several_sizes_is_trained_again(tmp_path, capsys, monkeypatch):
    """2 ranks, then 1, then 3: each third of it is one process's; then something is not as certified, three times."""
    monkeypatch.setattr(certified, "run_alone", lambda job, variables=None: run_in_forks(job))
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    for ranks, until, resume in ((2, 4, None), (1, 8, "newest"), (3, 12, "newest")):
        words = (f"train.length={until} steps",)
        assert (
            run_in_forks(Job(recipe=recipe, overrides=words, ranks=ranks, output_dir=out, resume=resume)) == 0
        )
    assert certificate(out, replay=3) == 0
    said = capsys.readouterr().out
    assert said.count("again on one process: the same") == 3 and said.count("with the same weights") == 2
    assert "\ntraining steps 9 to 12 again on one process (3 of 3) …\nsteps 9 to 12, done on 3 ranks" in said
    assert max(len(line) for line in said.splitlines() if "optimizer" in line or "digest" in line) <= 80
    assert "steps 5 to 8, done on 1 rank, again on one process: the same\n  the weights are bit-equal" in said
    assert certificate(out, step=6) == 0
    assert "steps 5 to 6, done on 1 rank, again on one process: the same" in capsys.readouterr().out

    metrics = (out / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    for row in rows:
        if row["step"] == 10 and row["event"] == "step":
            row["loss"] *= 1.0001
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert certificate(out, step=10) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    (out / "metrics.jsonl").write_text(metrics)

    damaged = next((out / "checkpoints" / step_name(12)).glob("*.safetensors"))
    flip_last_byte(damaged)
    assert certificate(out) == 1
    assert "its checksum is wrong" in capsys.readouterr().out


@pytest.mark.processes
def test_a_run_whose_loss_was_changed_is_trained_again_with_each_loss(tmp_path, capsys, monkeypatch):
    """The interval after the change has the new loss and begins with a checkpoint of the old one: it was refused."""
    monkeypatch.setattr(certified, "run_alone", lambda job, variables=None: run_in_forks(job))
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    for until, words, resume in ((4, (), None), (8, ("loss.label_smoothing=0.1",), "newest")):
        overrides = (f"train.length={until} steps", *words)
        job = Job(recipe=recipe, overrides=overrides, ranks=1, output_dir=out, resume=resume,
                  extra={"accept": ["loss"]} if resume else {})  # fmt: skip
        assert run_in_forks(job) == 0
    assert certificate(out, replay=2) == GOOD
    assert capsys.readouterr().out.count("again on one process: the same\n  the weights are bit-equal") == 2
    shutil.rmtree(out / "checkpoints" / step_name(4))
    changed = "steps 1 to 8 cannot be trained again: loss.label_smoothing changed after step 4 (--accept)"
    for words in ({"replay": 1}, {"step": 3}):  # nothing is trained again: it ended with 0
        with pytest.raises(UsageError, match=f"^{re.escape(changed)}, of which there is no checkpoint.$"):
            certificate(out, **words)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


MLP = {
    "name": "digits", "model": {"use": "mlp", "inputs": 64, "classes": 10}, "dataset": {"use": "digits"},
    "loss": {"use": "cross_entropy"}, "optimizer": {"use": "sgd"},
    "schedule": {"use": "constant", "learning_rate": 0.1}, "train": {"length": "2700 steps", "batch": 9},
}  # fmt: skip
DIGEST = "84a6b8abecab4ead60405c0d7f066fa0"


def certified_run():
    """The certificate of a run on two ranks, with two checkpoints that are not there any more."""
    saved = [{"step": step, "model": DIGEST, "optimizer": DIGEST} for step in (2600, 2700)]
    attempt = {
        "from": 0, "to": 2700, "why": "done", "weights": DIGEST, "saved": saved, "ranks": 2, "layout": {"data": 2},
        "begun": "2026-11-22T09:11:27Z", "device": "cpu", "host": "vm", "versions": {}, "recipe": DIGEST,
        "changes": [], "resumed": None, "refused": [], "differences": [], "variables": {},
    }  # fmt: skip
    data = {"train": {"samples": 9, "digest": DIGEST}}
    return {"name": "digits", "steps": 2700, "data": data, "attempts": [attempt], "replay": ""}


def test_a_certificate_is_shown_of_a_run_that_cannot_be_trained_again(tmp_path, monkeypatch, capsys):
    """There is no checkpoint (yet): only --replay asks for one."""
    monkeypatch.setattr(certified, "_read", lambda run: certified_run())
    assert certificate(tmp_path) == GOOD
    assert "digits: 2700 updates" in capsys.readouterr().out
    with pytest.raises(UsageError, match="there is no checkpoint to compare with"):
        certificate(tmp_path, replay=1)


def test_intervals_without_a_recipe_are_left_out_and_if_all_are_it_is_an_error(tmp_path, monkeypatch, capsys):
    plain = Interval(start=4, to=8, begin=None, end=None, recipe=MLP)
    mixed = [replace(plain, start=n, mixed=f"steps {n + 1} to {n + 2} cannot.") for n in (0, 2)]
    trained: list[Interval] = []
    monkeypatch.setattr(certified, "_read", lambda run: certified_run())
    monkeypatch.setattr(certified, "retrain_interval", lambda interval, *rest: not trained.append(interval))
    monkeypatch.setattr(certified, "intervals", lambda *_: [*mixed, plain])
    assert certificate(tmp_path, replay=3) == GOOD and trained == [plain]
    assert capsys.readouterr().out.endswith("\nsteps 1 to 2 cannot.\nsteps 3 to 4 cannot.\n")
    monkeypatch.setattr(certified, "intervals", lambda *_: mixed)
    with pytest.raises(UsageError, match=r"^steps 1 to 2 cannot\.\nsteps 3 to 4 cannot\.$"):
        certificate(tmp_path, replay=3)


@pytest.mark.parametrize(
    ("to", "steps", "changes", "recipe", "accepted"),
    [
        (4, None, [(4, "loss")], "before", []),
        (5, None, [(4, "loss")], None, []),
        (8, 2, [(4, "loss")], "before", []),  # was left out for the updates that --steps leaves out
        (8, 3, [(4, "loss")], None, []),
        (8, 9, [(8, "loss")], "after", []),
        (4, None, [(3, "loss"), (4, "loss")], None, []),
        (
            4,
            None,
            [(2, "loss"), (4, "loss")],
            None,
            ["loss"],
        ),  # no checkpoint has the recipe of steps 3 and 4
        (4, None, [(2, "loss")], "after", ["loss"]),
        (8, None, [(8, "loss")], "after", []),
    ],
)
def test_updates_before_a_change_have_the_recipe_of_the_checkpoint_before_them(
    monkeypatch, to, steps, changes, recipe, accepted
):
    """Checkpoints of steps 2 and 8 are there. Updates between them were given up, whatever changed after them."""
    rows = [{"step": step, "key": key} for step, key in changes]
    states = {Path("2"): {"recipe": "before"}, Path("8"): {"recipe": "after", "identity": {"accepted": rows}}}
    monkeypatch.setattr(certified, "_recipe_state", lambda checkpoint: states[checkpoint])
    found = certified._interval({2: Path("2"), 8: Path("8")}, 2, to, steps)
    assert (None if found.mixed else found.recipe, found.accepted) == (recipe, accepted)
    last = min(to, 2 + (steps or 9))
    assert (found.to, found.end) == (last, Path("8") if last == 8 else None)


def test_each_part_is_told_before_it_begins_and_digests_are_short(tmp_path, monkeypatch, capsys):
    """What the screen had when each of two parts began to train."""
    content, screens = certified_run(), []
    (attempt,) = content["attempts"]
    recipe = {**MLP}
    result = {"bits": True, "digest": DIGEST, "weights": None, "losses": [], "kernels": {"device": "cpu"}}
    parts = [
        Interval(start=a, to=b, begin=None, end=None, recipe=recipe) for a, b in ((0, 2000), (2600, 2700))
    ]

    def stops(job: Job, variables: object) -> int:
        screens.append(capsys.readouterr().out)
        Path(job.extra["out"], certified.RESULT).write_text(json.dumps(result))
        return 0

    rows = [json.dumps({"event": "step", "step": step, "loss": 1.0}) for step in (9, 2609)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(certified, "_read", lambda run: content)
    monkeypatch.setattr(certified, "intervals", lambda content, run, steps: parts * (steps == 2000))
    monkeypatch.setattr(certified, "run_alone", stops)
    assert certificate(tmp_path, replay=3, steps=2000) == 0
    assert screens[0].endswith("\ntraining steps 1 to 2000 again on one process (1 of 2) …\n")
    assert screens[1].endswith("\ntraining steps 2601 to 2700 again on one process (2 of 2) …\n")
    told = screens[0] + screens[1] + capsys.readouterr().out
    assert "step 2600: weights 84a6b8abecab, optimizer 84a6b8abecab\n" in told and DIGEST not in told
    assert "the weights are bit-equal: 84a6b8abecab\n" in told and max(map(len, told.splitlines()[1:])) <= 80
    for ended, said in (
        (-signal.SIGKILL, "a process was killed, by hand or"),
        (1, "exit status 1"),
        (2, "see"),
    ):
        monkeypatch.setattr(certified, "run_alone", lambda job, variables, ended=ended: ended)
        with pytest.raises(JobError, match=f"1 to 2000 were not trained again: {said}"):
            certificate(tmp_path, replay=3, steps=2000)
    monkeypatch.setattr(certified, "run_alone", stops)
    recipe["strategy"] = {"use": "local_sgd", "every": "8 steps"}
    with pytest.raises(UsageError, match="nothing was trained again: strategy local_sgd does not promise"):
        certificate(tmp_path, replay=3, steps=2000)
    recipe.pop("strategy")
    result["bits"] = False
    with pytest.raises(UsageError, match="steps 1 to 2000 cannot be judged: the weights are not bit-equal"):
        certificate(tmp_path, replay=3, steps=2000)
    result["bits"] = True
    result["losses"] = [[9, 1.0, 1.0 + 1e-9, 1e-7]]
    attempt |= {"ranks": 1, "host": socket.gethostname()}
    for strategy, status in (({"use": "single"}, BAD), ({"use": "replicas", "count": 2}, GOOD)):
        recipe["strategy"] = strategy  # copies compute a batch in parts: not the bits of one
        assert certificate(tmp_path, replay=3, steps=2000) == status
    recipe["strategy"], attempt["versions"] = {"use": "single"}, {"paddle": "3.3.0"}
    result["kernels"] = {"device": "cpu", "paddle": "3.3.1"}
    assert certificate(tmp_path, replay=3, steps=2000) == GOOD
    assert "\n  bits may differ: paddle was 3.3.0 and is 3.3.1\n" in capsys.readouterr().out


def test_an_interval_of_two_attempts_is_judged_by_both(tmp_path, monkeypatch, capsys):
    """Between two checkpoints 4 ranks stopped and one went on: the noise is that of 4, and no bit need be the same."""
    content, jobs = certified_run(), []
    first = content["attempts"][0] | {"to": 1000, "ranks": 4, "layout": {"data": 2, "tensor": 2}}
    second = first | {
        "from": 1000,
        "to": 2700,
        "ranks": 1,
        "layout": {"tensor": 1},
        "host": socket.gethostname(),
    }
    content["attempts"] = [first, second]
    result = {"bits": False, "digest": DIGEST, "weights": [2.0, 1.0, 100.0], "losses": []}

    def retrained(job: Job, variables: object) -> int:
        jobs.append((job.extra["ranks"], job.extra["tensor"], variables))
        Path(job.extra["out"], certified.RESULT).write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(certified, "_read", lambda run: content)
    monkeypatch.setattr(certified, "run_alone", retrained)
    part = Interval(start=0, to=2600, begin=None, end=None, recipe=MLP)
    monkeypatch.setattr(certified, "intervals", lambda *_: [part])
    assert certificate(tmp_path, replay=1) == GOOD
    assert jobs == [(4, 2, None)]
    assert (
        "steps 1 to 2600, done on 4 ranks, then 1 rank, again on one process: the same"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "after", "end"),
    [
        ("SIGUSR1", {"ranks": 2}, "stopped on purpose, to go on with 2 ranks"),
        ("SIGUSR1", None, "stopped by SIGUSR1 after step 190 of 1380: the training is not done."),
        ("SIGINT", {"ranks": 2}, "stopped by SIGINT after step 190 of 1380: the training is not done."),
    ],
)
def test_an_attempt_stopped_for_other_ranks_is_no_error(name, after, end):
    why = f"StoppedError: stopped by {name} after step 190 of 1380: the training is not done."
    assert certified._end({"why": why}, after) == end


def test_each_attempt_begins_with_the_weights_that_were_there(tmp_path):
    def attempt(begin: int, weights: str, **saved: str) -> dict:
        rows = [{"step": int(step[1:]), "model": digest} for step, digest in saved.items()]
        return {"from": begin, "to": begin, "weights": weights, "saved": rows, "ranks": 2}

    attempts = [
        attempt(0, "a"),
        attempt(0, "a", s4="b"),
        attempt(4, "b"),
        attempt(4, "b", s8="c"),
        attempt(8, "d"),
    ]
    found = [*certified.folder_checks({"attempts": attempts}, tmp_path)]
    assert [good for good, _ in found] == [True, True, True, False]
    assert found[-1][1] == "step 8: 2 ranks stopped, 2 ranks went on with OTHER weights"
