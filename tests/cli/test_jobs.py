"""What each verb asks the launcher for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.cli import options
from paddle_dp.cli.training import NO_TRAINING
from paddle_dp.errors import DataError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
Leave = Callable[..., int]


def test_train_asks_for_a_job(leave: Leave, jobs: list[Job]) -> None:
    words = ["train", "a.yaml", "train.batch=64", "--ranks", "2", "output_dir=x", "--out", "runs/b"]
    assert leave(*words) == 7
    assert jobs == [
        Job(
            recipe=Path("a.yaml"),
            overrides=("train.batch=64", "output_dir=x"),
            ranks=2,
            output_dir=Path("runs/b"),
        )
    ]


def test_train_on_several_nodes(leave: Leave, jobs: list[Job]) -> None:
    leave(
        *["train", "a.yaml", "--devices", "0,3", "--nodes", "2", "--master", "host:9701", "--node-rank", "1"]
    )
    assert jobs == [Job(recipe=Path("a.yaml"), devices=(0, 3), nodes=2, master="host:9701", node_rank=1)]


def test_ranks_and_nodes_may_be_spans(leave: Leave, jobs: list[Job]) -> None:
    leave("train", "a.yaml", "--ranks", "2:4", "--nodes", "1:3", "--restarts", "2")
    assert jobs == [
        Job(recipe=Path("a.yaml"), ranks=4, least_ranks=2, nodes=3, least_nodes=1, restarts=2),
    ]


@pytest.mark.parametrize("words", [("train", "a.yaml"), ("launch",)])
def test_the_home_folder_may_be_written_as_a_tilde(
    leave: Leave, jobs: list[Job], words: tuple[str, ...]
) -> None:
    """Shells do not replace it after =, and a folder named ~ was made, or a sweep looked there for its trials."""
    leave(*words, "--output-dir=~/b", *(["a.py"] if words == ("launch",) else []))
    assert jobs[0].output_dir == Path.home() / "b"


@pytest.mark.parametrize("word", ["two", "2:", ":4", "2:4:8", "-2", "2-4"])
def test_what_is_no_number_of_ranks_is_refused(leave: Leave, jobs: list[Job], word: str, capsys: Any) -> None:
    assert leave("train", "a.yaml", f"--ranks={word}") == 2 and not jobs
    assert f"--ranks {word}: give a number, such as --ranks 4, or MIN:MAX" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["a.yaml"], None),
        (["a.yaml", "--resume"], "newest"),
        (["a.yaml", "--resume", "--ranks", "2"], "newest"),
        (["a.yaml", "--resume", "train.batch=64"], "newest"),
        (["--resume", "a.yaml"], "newest"),
        (["a.yaml", "--resume", "runs/x/checkpoints/step-00000012"], "runs/x/checkpoints/step-00000012"),
        (["a.yaml", "--resume", "runs/lr=1/checkpoints"], "runs/lr=1/checkpoints"),
        (["a.yaml", "--resume=best"], "best"),
    ],
)
def test_the_value_of_resume_may_be_left_out(
    leave: Leave, jobs: list[Job], words: list[str], resume: str | None
) -> None:
    leave("train", *words)
    assert jobs[0].resume == resume and jobs[0].recipe == Path("a.yaml")


def test_the_words_of_a_script_stay_what_they_are(leave: Leave, jobs: list[Job]) -> None:
    leave("launch", "--ranks", "2", "own.py", "--resume", "--ranks", "9", "--resume")
    assert jobs[0].script == ("own.py", "--resume", "--ranks", "9", "--resume") and jobs[0].ranks == 2


def test_a_script_has_the_bridge_only_where_it_is_asked_for(leave: Leave, jobs: list[Job]) -> None:
    leave("launch", "own.py")
    leave("launch", "--cpu-bridge", "own.py")
    assert [job.extra for job in jobs] == [{}, {"cpu_bridge": True}]


def test_ranks_behind_a_script_are_not_taken_for_one_rank(leave: Leave, jobs: list[Job], capsys: Any) -> None:
    assert leave("launch", "own.py", "--ranks", "2") == 2 and not jobs
    assert "paddle-dp launch --ranks 2 own.py" in capsys.readouterr().err


def test_what_a_resume_may_find_changed_is_given_by_key(leave: Leave, jobs: list[Job], capsys: Any) -> None:
    leave("train", "a.yaml", "--resume", "--accept", "loss, optimizer.clip")
    assert jobs[0].options["accept"] == ["loss", "optimizer.clip"] and jobs[0].resume == "newest"
    assert leave("train", "a.yaml", "--accept", "loss") == 2
    assert (
        "--accept loss needs --resume: it lists settings that may differ from the run's"
        in capsys.readouterr().err
    )


PLAIN = ("strategy.use=single", "train.precision=float32", *NO_TRAINING)
DRAWN = {"temperature": 0.8, "top_k": 2, "seed": 0, "checkpoint": "newest", "ema": False}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            "evaluate RUN --ranks 3 --checkpoint best",
            {"entry_point": "evaluate", "overrides": NO_TRAINING, "ranks": 3,
             "extra": {"checkpoint": "best", "ema": False}},
        ),
        (
            "generate RUN --prompt a --tokens 3 --top-k 2",
            {"entry_point": "generate", "overrides": (PLAIN[0], *NO_TRAINING), "ranks": 1, "quiet": True,
             "extra": {"prompt": "a", "tokens": 3, **DRAWN}},
        ),
        (
            "predict RUN a.npy b.png --csv -o all",
            {"entry_point": "predict", "overrides": PLAIN, "ranks": 1, "quiet": True,
             "extra": {"files": ["a.npy", "b.png"], "checkpoint": "newest", "ema": False, "top": 3, "csv": True,
                       "out": "all.npz"}},
        ),
        (
            "export RUN -o x --checkpoint best",
            {"entry_point": "export", "overrides": PLAIN, "ranks": 1, "quiet": True,
             "extra": {"to": "x", "checkpoint": "best", "ema": False, "onnx": False, "adapter": False}},
        ),
        (
            "export RUN --hf x --ema",
            {"entry_point": "export_weights", "overrides": PLAIN, "ranks": 1, "quiet": True,
             "extra": {"to": "x", "checkpoint": "newest", "ema": True, "onnx": False, "adapter": False}},
        ),
    ],
    ids=["evaluate", "generate", "predict", "export", "export --hf"],
)  # fmt: skip
def test_a_verb_of_a_run_takes_its_recipe(
    leave: Leave, jobs: list[Job], tmp_path: Path, words: str, wanted: dict[str, Any]
) -> None:
    (tmp_path / "recipe.yaml").touch()
    leave(*words.replace("RUN", str(tmp_path)).split())
    assert jobs == [Job(recipe=tmp_path / "recipe.yaml", output_dir=tmp_path, **wanted)]


def test_weights_for_hugging_face_come_without_a_program(leave: Leave, jobs: list[Job]) -> None:
    assert leave("export", str(ROOT), "--hf", "x", "--onnx") == 2 and not jobs


def test_onnx_is_asked_for_before_anything_starts(
    leave: Leave, jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "paddle2onnx" else name)
    assert leave("export", str(ROOT), "--onnx") == 2 and not jobs
    said = capsys.readouterr().err
    assert "--onnx needs paddle2onnx: pip install 'paddle_dp[onnx]'" in said and "onnxruntime" not in said


def test_verify_hands_over(leave: Leave, monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle_dp import proof

    asked: list[Any] = []
    monkeypatch.setattr(proof, "verify", lambda *words, **how: asked.append((words, how)) or 1)
    assert leave("verify", "a.yaml", "--ranks", "3", "--steps", "4", "train.batch=50", "--json") == 1
    how = {"as_text": False, "rehearse": False, "at": None}
    assert asked == [((Path("a.yaml"), ("train.batch=50",), 3, 4), how)]


@pytest.mark.parametrize(("name", "ranks"), [("digits_mlp", "2"), ("digits_replicas", "1")])
def test_train_verify_proves_on_the_devices_of_the_training(
    leave: Leave, jobs: list[Job], monkeypatch: pytest.MonkeyPatch, name: str, ranks: str
) -> None:
    """It took the first two, and two ranks for the one that has both of them (strategy replicas)."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(cores=8, kind="gpu", devices=("0", "1", "2", "3")))
    asked: list[Any] = []
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr("subprocess.run", lambda words, env: asked.append((words, env)) or done)
    assert leave("train", str(ROOT / f"configs/{name}.yaml"), "--devices", "2,3", "--verify") == 7
    ((words, variables),) = asked
    assert (words[3], words[-2:]) == ("verify", ["--ranks", ranks])
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert [job.devices for job in jobs] == [(2, 3)]


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("a bug"), 70), (DataError("no sample"), 4), (UsageError("no"), 2)]
)
def test_an_error_of_verify_has_not_the_status_of_a_difference(
    leave: Leave, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    from paddle_dp import proof

    def fails(*words: Any, **how: Any) -> int:
        raise error

    monkeypatch.setattr(proof, "verify", fails)
    assert leave("verify", "a.yaml") == status


@pytest.mark.parametrize("out", ["model.pdparams", "model"])
def test_merge_writes_no_file_by_another_format_s_name(
    leave: Leave, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """load.path and paddle.load ended at its first byte."""
    assert leave("merge", str(tmp_path), "-o", out) == 2
    assert f"--out {out}: merge writes safetensors" in capsys.readouterr().err


def test_merge_of_an_adapter_asks_for_one_process_that_has_its_base(
    leave: Leave, jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr("paddle_dp.checkpoint.find", lambda *_: saved)
    monkeypatch.setattr("paddle_dp.checkpoint.is_adapter", lambda _: True)
    leave("merge", str(tmp_path), "-o", "all.safetensors", "--ema")
    (job,) = jobs
    assert (job.entry_point, job.ranks, job.output_dir) == ("merge", 1, tmp_path)
    assert job.overrides == PLAIN
    assert job.extra == {"to": "all.safetensors", "checkpoint": str(saved), "ema": True}
