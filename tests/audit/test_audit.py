"""The audit of whole scripts; what it says is computed again here, by hand, without ranks.

Scripts that fail, hang or are ended run in real processes, the others in forks of the waiting ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.io import DistributedBatchSampler

from paddle_dp.audit import runner
from paddle_dp.audit.audit import Script, examine
from paddle_dp.launch.processes import alive, descendants, kill_all
from paddle_dp.launch.supervisor import JobEnd
from tests.house.command_service import command_line
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/audit/scripts"
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def start(script, *arguments, options=(), folder):
    command = [sys.executable, "-m", "paddle_dp", "audit", *options, str(script), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": PATH}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_takes_interrupts,  # noqa: PLW1509 - signal() only
    )  # fmt: skip


def _takes_interrupts():
    """Ctrl-C reaches it although pytest may run in the background of a script, where it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def audit(script, *arguments, folder, steps=3):
    """The report of one audit as (exit status, JSON). The script's ranks are forks, and may not fail."""

    def run(script, ranks, events, replay=None):
        events.mkdir()
        options = {"folder": str(events), "steps": script.steps, "replay": replay}
        run_ranks(audited, ranks, str(folder), options, [str(script.path), *script.arguments])
        return JobEnd()

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as scratch:
        patch.setattr(Script, "run", run)
        result = examine(Script(script, arguments, steps, patience=60), 2, Path(scratch))
    return result.exit_status, json.loads(result.as_json())


def audited(folder, options, words):
    """In a rank: what the runner does."""
    from paddle_dp.audit.events import EventJournal
    from paddle_dp.mesh.environment import Environment

    here = Environment.read()
    os.chdir(folder)
    sys.path.insert(0, os.path.dirname(words[0]))
    journal = EventJournal(Path(options["folder"]), here.rank)
    finish = runner.install(journal, options)
    assert runner.run(words[0], words[1:], journal, finish) == 0
    runner.wait_for_ranks(journal.folder, here.rank, here.ranks)


def audit_command(script, *arguments, options=(), folder):
    """The same of `paddle-dp audit`."""
    done = command("--json", *options, str(script), *arguments, folder=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def command(*words, folder):
    """Runs `paddle-dp audit`, a fork of the waiting process; all that it starts is new processes."""
    return subprocess.run(
        [*command_line(), "audit", *words], cwd=folder, env={**os.environ, "PYTHONPATH": PATH}, text=True,
        capture_output=True, timeout=200,
    )  # fmt: skip


def found(report, *severities):
    wanted = severities or ("fault", "difference")
    return {each["rule"]: each for each in report["findings"] if each["severity"] in wanted}


def line(script, text):
    """The place of a line of a script, as reports name it."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = [number for number, each in enumerate(lines, start=1) if text in each]
    return f"{script}:{number}"


def shares(samples, batch, **words):
    """What DistributedBatchSampler gives two ranks, asked in this process."""
    each = [DistributedBatchSampler(range(samples), batch, num_replicas=2, rank=r, **words) for r in range(2)]
    return [list(sampler) for sampler in each]


def gradient(model, loss, *arrays):
    """The gradients of a loss of a model's output as one vector."""
    model.clear_gradients()
    inputs, targets = map(paddle.to_tensor, arrays)
    loss(model(inputs), targets).backward()
    trained = [each for each in model.parameters() if not each.stop_gradient]
    return np.concatenate([each.grad.numpy().reshape(-1) for each in trained])


def points(count, seed):
    """The data of several of the scripts."""
    x = np.random.RandomState(seed).normal(size=(count, 8)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")


def off(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_an_honest_script_is_not_blamed(tmp_path):
    status, report = audit(SCRIPTS / "honest.py", "--lr", "0.05", steps=2, folder=tmp_path)
    assert (status, report["findings"], report["failure"]) == (0, [], "")
    assert "4 parameters in updates 1, 3" in report["looked_at"]["gradients"]
    assert report["steps"] == 6  # two and the last, in each of two epochs
    looked_at = {"samples", "weights", "gradients", "BatchNorm", "randomness", "evaluation"}
    assert set(report["looked_at"]) == looked_at
    apart = re.search(r"same samples: (\S+) apart", report["looked_at"]["gradients"])
    assert apart and float(apart[1]) < 1e-6
    assert not list(tmp_path.iterdir())  # the script writes nothing


@pytest.mark.long
def test_the_documentations_resnet(tmp_path):
    """DataParallel over a plain shuffling loader: each rank's sampler permutes all 20 samples."""
    status, report = audit(SCRIPTS / "documentation_resnet.py", folder=tmp_path)
    rows = found(report)
    assert status == 1
    assert set(found(report, "fault")) == {"samples-not-shared"}
    assert set(rows) == {
        "samples-not-shared", "batchnorm-local", "unseeded-weights", "unseeded-order", "unseeded-data"
    }  # fmt: skip
    shared = rows["samples-not-shared"]
    assert shared["where"].endswith(line("documentation_resnet.py", "loader = DataLoader("))
    assert "draws from all 20 samples: an epoch reads each 2 times" in shared["what"]
    batches = re.findall(r"rank \d \[([\d, ]+)\]", shared["evidence"])
    first = [list(map(int, batch.split(", "))) for batch in batches]
    assert [len(set(batch)) for batch in first] == [4, 4]
    assert shared["evidence"].endswith(f"in both: {len(set(first[0]) & set(first[1]))}")
    layers = paddle.vision.models.resnet18().sublayers()
    norms = sum(isinstance(layer, paddle.nn.BatchNorm2D) for layer in layers)
    assert rows["batchnorm-local"]["what"].startswith(f"{norms} BatchNorm layers")


@pytest.mark.long
def test_model_fit(tmp_path):
    """Paddle's own loop pads the shares and normalises locally; the first gradient's distance is computed again."""
    status, report = audit(SCRIPTS / "model_fit.py", folder=tmp_path)
    rows = found(report)
    assert status == 1 and set(rows) == {"samples-padded", "batchnorm-local"}
    reads = [index for rank in shares(31, 4, shuffle=True) for batch in rank for index in batch]
    twice = [index for index in range(31) if reads.count(index) > 1]
    assert rows["samples-padded"]["evidence"] == f"1 read too many: {twice[0]}" and len(twice) == 1

    paddle.seed(3)
    model = paddle.nn.Sequential(
        paddle.nn.Linear(8, 16), paddle.nn.BatchNorm1D(16), paddle.nn.ReLU(), paddle.nn.Linear(16, 2)
    )
    x, y = points(31, 0)
    first = [np.array(rank[0]) for rank in shares(31, 4, shuffle=True)]
    one = gradient(model, F.cross_entropy, x[np.concatenate(first)], y[np.concatenate(first)])
    two = np.mean([gradient(model, F.cross_entropy, x[mine], y[mine]) for mine in first], 0)
    assert f"the first gradient is {off(two, one):.1%} away" in rows["batchnorm-local"]["evidence"]


def test_a_fleet_script(tmp_path):
    """A sampler made anew in each epoch orders alike; nine held-out samples are ten; masks are equal on all ranks."""
    status, report = audit(SCRIPTS / "fleet_collective.py", folder=tmp_path)
    rows = found(report)
    assert status == 1 and set(rows) == {"order-repeats", "evaluation-repeats", "same-masks"}
    order = shares(30, 5, shuffle=True)
    assert order == shares(30, 5, shuffle=True)  # a new sampler's order, as the script makes it in each epoch
    first = [index for batch in order[0] for index in batch][:6]
    assert f"[{', '.join(map(str, first))}, …]" in rows["order-repeats"]["evidence"]
    held_out = [index for rank in shares(9, 4) for batch in rank for index in batch]
    twice = [index for index in range(9) if held_out.count(index) > 1]
    assert rows["evaluation-repeats"]["evidence"] == f"{len(held_out) - 9} read too many: {twice[0]}"
    assert "4 parameters" in report["looked_at"]["gradients"]
    masks = []
    for _ in range(2):  # as on two ranks that both call paddle.seed(42)
        paddle.seed(42)
        masks.append(F.dropout(paddle.ones([64]), 0.2).numpy())
    np.testing.assert_array_equal(*masks)


@pytest.mark.long  # what is told of it is held to arithmetic in test_judges.py
def test_nothing_synchronised(tmp_path):
    status, report = audit(SCRIPTS / "not_synchronised.py", folder=tmp_path)
    rows = found(report)
    assert status == 1
    assert set(rows) == {"weights-differ-at-start", "not-exchanged", "unseeded-weights"}
    assert rows["not-exchanged"]["where"].endswith(line("not_synchronised.py", "optimizer.step()"))
    assert "2 of 4 parameters" in rows["weights-differ-at-start"]["what"]  # biases begin at 0 on both


def own_gradients():
    """The first gradients of unequal_shares.py: of both ranks' shares, and of all 25 samples."""
    paddle.seed(5)
    model = paddle.nn.Sequential(paddle.nn.Linear(8, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
    x = np.random.RandomState(0).normal(size=(25, 8)).astype("float32")
    y = (x**2).sum(1, keepdims=True)
    parts = [slice(0, None, 2), slice(1, None, 2)]
    return [gradient(model, F.mse_loss, x[part], y[part]) for part in parts], gradient(
        model, F.mse_loss, x, y
    )


@pytest.mark.long  # what is told of it is held to arithmetic in test_judges.py
def test_unequal_shares(tmp_path):
    status, report = audit(SCRIPTS / "unequal_shares.py", folder=tmp_path)
    (row,) = found(report).values()
    assert (status, row["rule"]) == (1, "mean-of-means")
    own, one = own_gradients()
    assert "(13 and 12 samples)" in row["what"]
    assert f"{off(np.mean(own, 0), one):.2%} away from one process's" in row["evidence"]
    np.testing.assert_allclose((13 * own[0] + 12 * own[1]) / 25, one, atol=1e-6)  # the remedy is right


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("weighted", {}),
        ("summed", {"wrong-scale": "summed, and not averaged"}),
        ("twice", {"wrong-scale": "averaged twice"}),
        ("forgets", {"weights-diverge": "from update 1 on: 1 of 4", "not-exchanged": "1 of 4 gradients"}),
    ],
)
def test_other_exchanges_by_hand(mode, expected, tmp_path):
    status, report = audit(SCRIPTS / "unequal_shares.py", mode, folder=tmp_path)
    rows = found(report)
    assert (status, set(rows)) == (int(bool(expected)), set(expected))
    assert all(said in rows[rule]["what"] for rule, said in expected.items())
    if mode in ("summed", "twice"):
        own, one = own_gradients()
        final = np.sum(own, 0) if mode == "summed" else np.mean(own, 0) / 2
        factor = np.vdot(final, one) / np.vdot(one, one)
        assert f"{factor:.3f} × one process's gradient" in rows["wrong-scale"]["evidence"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("accumulate.py", [], {}),
        ("gathers.py", [], {}),
        ("stream.py", [], {"samples-not-shared": "the ranks read the same samples of Stream"}),
        ("stream.py", ["shared"], {}),
        ("by_hand.py", [], {"samples-not-shared": "all ranks compute the same gradient"}),
    ],
)
def test_other_ways_to_read_and_to_step(script, words, expected, tmp_path):
    status, report = audit(SCRIPTS / script, *words, folder=tmp_path)
    rows = found(report)
    assert (status, set(rows), report["failure"]) == (int(bool(expected)), set(expected), "")
    assert all(said in rows[rule]["what"] for rule, said in expected.items())
    if not expected:
        apart = re.search(r"same samples: (\S+) apart", report["looked_at"]["gradients"])
        assert apart and float(apart[1]) < 1e-6


@pytest.mark.long
def test_ranks_that_wait_for_each_other_are_told_apart(tmp_path):
    status, report = audit_command(SCRIPTS / "by_hand.py", "hangs", folder=tmp_path)
    assert status == 1 and "ended on rank 1 and waited for ever on rank 0" in report["failure"]


FAILS = """
import sys, paddle, paddle.distributed as dist
assert __name__ == "__main__" and sys.argv[1:] == ["--json", "7"] and sys.path[0] == {folder!r}
assert __file__ == sys.argv[0]
dist.init_parallel_env()
if dist.get_rank() == 1:
    raise ValueError("the script's own words")
"""


def test_a_script_that_fails_is_told_as_such(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS.format(folder=str(tmp_path)))
    status, report = audit_command("fails.py", "--json", "7", folder=tmp_path)
    assert (status, report["findings"]) == (3, [])
    assert "The script itself failed, on rank 1 of 2" in report["failure"]
    assert report["failure"].endswith("ValueError: the script's own words")
    assert "runner.py" not in report["failure"]
    assert [path.name for path in tmp_path.iterdir()] == ["fails.py"]  # the audit leaves nothing there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gone.py",), "audit gone.py: give a Python script (.py)"),
        (("--ranks", "1", str(SCRIPTS / "honest.py")), "--ranks 2 or more"),
        (("--steps", "0", str(SCRIPTS / "honest.py")), "--steps 1 or more"),
    ],
)
def test_usage(words, said, tmp_path):
    done = command(*words, folder=tmp_path)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("stream",)])
def test_an_evaluation_that_averages_means_over_unequal_shares(words, tmp_path):
    status, report = audit(SCRIPTS / "evaluates.py", *words, folder=tmp_path)
    (row,) = found(report).values()
    assert (status, row["rule"]) == (1, "evaluation-mean-of-means")
    paddle.seed(4)
    x = np.random.RandomState(2).normal(size=(11, 8)).astype("float32")
    inputs, targets = paddle.to_tensor(x), paddle.to_tensor((x.sum(1) > 0).astype("int64"))
    each = F.cross_entropy(paddle.nn.Linear(8, 2)(inputs), targets, reduction="none").numpy().reshape(-1)
    means = [float(each[rank::2].mean()) for rank in range(2)]
    said = f"their mean is {np.mean(means):.4f}, the mean over all samples {each.mean():.4f}"
    assert "(6, 5 samples)" in row["what"] and row["evidence"].endswith(said)
    assert row["where"].endswith(line("evaluates.py", ".all_reduce(loss)"))


@pytest.mark.long
def test_an_evaluation_of_one_ranks_share(tmp_path):
    status, report = audit(SCRIPTS / "evaluates.py", "alone", folder=tmp_path)
    assert (status, set(found(report))) == (1, {"evaluation-not-combined"})


SHARDED = """
import paddle
from paddle.distributed import fleet
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
net = paddle.nn.Linear(4, 4)
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.1, parameters=net.parameters()))
model(paddle.rand([4, 4])).mean().backward()
optimizer.step()
"""


@pytest.mark.long
def test_a_model_that_fleet_divides_is_refused_and_not_misjudged(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    status, report = audit_command("sharded.py", folder=tmp_path)
    assert (status, report["findings"]) == (3, [])
    assert report["failure"].startswith("The script splits the model (sharding 2)")


STANDS_STILL = """
import os, time, paddle.distributed as dist
dist.init_parallel_env()
open(f"pid.{os.environ['PADDLE_TRAINER_ID']}", "w").write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


@pytest.mark.long
def test_a_script_that_stands_still_is_ended_and_its_line_named(tmp_path):
    (tmp_path / "still.py").write_text(STANDS_STILL)
    status, report = audit_command("still.py", options=("--patience", "10"), folder=tmp_path)
    assert status == 3
    assert (
        "The script stood still for 10 s: rank" in report["failure"] and "in still.py:6" in report["failure"]
    )
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid.*"))


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_when_the_audit_is_ended(sign, tmp_path):
    (tmp_path / "still.py").write_text(STANDS_STILL)
    process = start("still.py", folder=tmp_path)
    try:
        pids = ready(tmp_path, process)
        process.send_signal(sign)
        process.communicate(timeout=30)
        assert process.returncode == (-9 if sign == signal.SIGKILL else 128 + sign)
        deadline = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, pids))
    finally:
        kill_all(lambda: descendants(process.pid))
        process.kill()


def ready(folder, process):
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        found = [path.read_text() for path in folder.glob("pid.*")]
        if len(found) == 2 and all(found):
            return [int(pid) for pid in found]
        time.sleep(0.05)
    raise AssertionError(f"the script did not start: {process.communicate()}")
