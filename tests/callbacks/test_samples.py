"""Held-out samples with the model's answers: the right ones, on one rank, and nothing of the training changes."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.callbacks import _gallery, dashboard, samples, tensorboard
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Layout
from paddle_dp.train import Callback, Run
from paddle_dp.train.evaluate import MOST_CLASSES
from paddle_dp.train.gallery import Gallery, PredictedSample, WrittenText
from paddle_dp.units import Every
from tests.callbacks.moments import At, Capture
from tests.callbacks.test_dashboard import dp_rank
from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, recorded
from tests.ranks import run_ranks

MOMENTUM = {"optimizer": "momentum", "schedule": "constant, learning_rate: 0.1"}
METRICS = "[{use: metrics, every: 4 steps}]"
CONVNET = small_recipe(
    "length: 7 steps, batch: 50, micro_batches: 2", dataset="digits, as_image: true", **MOMENTUM,
    model="convnet, channels: 1, widths: [8, 8], classes: 10, norm: batch", strategy="data_parallel",
    callbacks=METRICS,
)  # fmt: skip
COSINES = small_recipe(
    "length: 7 steps, batch: 50", loss="margin_softmax, scale: 8", **MOMENTUM, callbacks=METRICS,
    model="large_classifier, inputs: 64, hidden: [16], classes: 10, cosines: true", strategy="single",
)  # fmt: skip
GPT = small_recipe(
    "length: 30 steps, batch: 8", model="gpt, vocab: 256, width: 32, depth: 1, heads: 2, length: 32",
    dataset="text_files, path: %(text)s, held_out: 0.2, cache: %(text)s.cache, length: 32", strategy="single",
    schedule="constant, learning_rate: 1e-2", callbacks="[{use: samples, count: 2, tokens: 8}]",
)  # fmt: skip


LINE = "the quick brown fox jumps over the lazy dog. "


class Noise(Callback):
    """Draws from every generator after each step: what the samples draw would be seen in these numbers."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def step(self, moment: Any) -> None:
        self.drawn += [random.random(), np.random.rand(), paddle.rand([1]).item()]


def trained(folder: str, shows: bool, recipe: str = CONVNET) -> Any:
    """In every rank: the losses, norms, weights and random numbers of a training with the callback or without."""
    settings = samples.Config(every=Every.parse("3 steps"), count=5, scan=60) if shows else None
    trainer = build_trainer(recipe, folder)
    rows, noise = recorded(trainer), Noise()
    random.seed(1), np.random.seed(2), paddle.seed(3)
    if settings is not None:
        draw = _gallery._picture
        _gallery._picture = lambda *sample: (
            (random.random(), np.random.rand(), paddle.rand([1])) and draw(*sample)
        )
        trainer.add(settings.build(trainer.run))
    trainer.add(noise)
    trainer.fit("7 steps")
    weights = {name: tensor.numpy() for name, tensor in trainer.learner.placed.state().items()}
    layers = [layer.training for layer in trainer.learner.model.sublayers(include_self=True)]
    return rows, noise.drawn, weights, layers


def equal(a: Any, b: Any) -> bool:
    return (a[0], a[1], a[3]) == (b[0], b[1], b[3]) and all(np.array_equal(a[2][n], b[2][n]) for n in a[2])


def twice(folder: str) -> bool:
    """In every rank: whether a training with the callback is bit-equal to one without."""
    return equal(trained(f"{folder}/shown", shows=True), trained(f"{folder}/plain", shows=False))


@pytest.mark.processes
def test_a_training_that_shows_samples_is_bit_equal_to_one_that_does_not(tmp_path: Path) -> None:
    assert run_ranks(twice, 2, str(tmp_path)) == [True, True]
    content = json.loads((tmp_path / "shown" / "samples.json").read_text())
    assert content["step"] == 7 and content["sentence"].startswith("The 5 worst of 60 of the 360")
    assert not (tmp_path / "plain" / "samples.json").exists()


def shown_worst(folder: str) -> Any:
    """In a rank: samples.json, and each held-out sample's loss and classes, computed one by one."""
    trainer = build_trainer(CONVNET, folder)
    trainer.add(samples.Config(count=6, scan=1000).build(trainer.run))
    trainer.fit("7 steps")
    model, data = trainer.learner.model, trainer.run.test_loader.dataset
    model.eval()
    rows = []
    for index in range(len(data)):
        image, target = data[index]
        scores = model(paddle.to_tensor(image[None])).numpy()[0].astype("float64")
        shares = np.exp(scores) / np.exp(scores).sum()
        rows.append((-np.log(shares[int(target)]), index, int(target), int(shares.argmax()), shares.max()))
    return json.loads((Path(folder) / "samples.json").read_text()), sorted(rows, reverse=True)[:6]


@pytest.mark.processes
def test_the_worst_samples_are_those_with_the_largest_losses(tmp_path: Path) -> None:
    ((content, rows),) = run_ranks(shown_worst, 1, str(tmp_path))
    assert content["sentence"] == "The 6 worst of 360 held-out samples, by their loss."
    for sample, (loss, index, true, predicted, share) in zip(content["samples"], rows, strict=True):
        assert (sample["index"], sample["true"], sample["predicted"]) == (index, str(true), str(predicted))
        assert sample["loss"] == pytest.approx(loss, rel=1e-4)
        assert sample["probability"] == pytest.approx(share, rel=1e-4)
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


def continued(folder: str, text: str) -> Any:
    trainer = build_trainer(GPT % {"text": text}, folder)
    trainer.fit("30 steps")
    window = trainer.run.test_loader.dataset[0][0]
    tokens = paddle.to_tensor(window[None, :16].astype("int64"))
    expected = trainer.learner.model.generate(tokens, 8).numpy()[0, 16:]
    return json.loads((Path(folder) / "samples.json").read_text()), bytes(expected.astype("uint8")).decode()


def shown_cosines(folder: str, classes: int) -> Any:
    """In a rank: samples.json, and the softmax of the cosines of each of its samples, as the loss scales them."""
    trainer = build_trainer(COSINES.replace("classes: 10", f"classes: {classes}"), folder)
    trainer.add(samples.Config(count=6, scan=100).build(trainer.run))
    trainer.fit("7 steps")
    model, data = trainer.learner.model, trainer.run.test_loader.dataset
    model.eval()
    shown = json.loads((Path(folder) / "samples.json").read_text())["samples"]
    powers = [np.exp(8 * model(paddle.to_tensor(data[row["index"]][0][None])).numpy()[0]) for row in shown]
    return [row["probability"] for row in shown], [float(p.max() / p.sum()) for p in powers]


@pytest.mark.processes
@pytest.mark.parametrize("classes", [10, MOST_CLASSES + 1])
def test_the_probability_of_a_class_is_that_of_the_loss(tmp_path: Path, classes: int) -> None:
    ((shown, expected),) = run_ranks(shown_cosines, 1, str(tmp_path), classes)
    assert len(shown) == 6 and shown == pytest.approx(expected, rel=1e-4)


@pytest.mark.processes
def test_a_language_model_continues_held_out_texts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(LINE * 60)
    ((content, expected),) = run_ranks(continued, 1, str(tmp_path / "run"), str(text))
    first = content["texts"][0]
    assert first["prompt"] in LINE * 3 and first["prompt"] + first["reference"] in LINE * 3
    assert len(first["prompt"]) == 16 and len(first["reference"]) == 8
    assert first["continuation"] == expected and len(content["texts"]) == 2


def continued_documents(folder: str, text: str) -> Any:
    trainer = build_trainer(GPT.replace("text_files", "packed_texts") % {"text": text}, folder)
    trainer.fit("30 steps")
    return json.loads((Path(folder) / "samples.json").read_text())["texts"]


@pytest.mark.processes
def test_of_a_window_of_documents_one_is_continued(tmp_path: Path) -> None:
    """Its inputs are the tokens and their positions; a prompt has no end of another document."""
    text = tmp_path / "texts.jsonl"
    documents = [chr(ord("a") + number % 26) * (10 + number % 9) for number in range(130)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    (texts,) = run_ranks(continued_documents, 1, str(tmp_path / "run"), str(text))
    assert len(texts) == 2
    for row in texts:
        assert len(set(row["prompt"])) == 1 and row["prompt"][0].isalpha() and len(row["prompt"]) > 4
        assert {*row["reference"]} <= {row["prompt"][0], "\N{REPLACEMENT CHARACTER}"}


GALLERY = Gallery(
    sentence="The 1 worst of 8 held-out samples, by their loss.",
    samples=[
        PredictedSample(index=3, name="sample 3", true="dark", predicted="light", probability=0.75, loss=1.25)
    ],
    texts=[WrittenText(index=0, prompt="to be", continuation=" or", reference=" and")],
    grid=b"\x89PNG\r\n\x1a\n" + bytes(40),
)


def test_dashboards_show_them_as_a_picture_and_a_text(run: Run, at: At) -> None:
    for module in (dashboard, tensorboard):
        if module is tensorboard:
            pytest.importorskip("tensorboardX")
        callback = module.Config().build(run)
        callback.start(at("start", 0))
        callback.gallery(at("gallery", 4), GALLERY)
    (text,) = dp_rank(run).get_data("text", "samples")
    assert "sample 3: true dark, predicted light (0.75), loss 1.250" in text.text.encoded_text_string
    (shown,) = dp_rank(run).get_data("image", "evaluation/samples")
    assert shown.id == 4 and shown.image.encoded_image_string == GALLERY.grid
    (log,) = (run.folder / "tensorboard").iterdir()
    assert b"evaluation/samples" in log.read_bytes() and b"samples/text_summary" in log.read_bytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": Layout(degrees=Degrees(tensor=2, data=2))}, r"split over ranks \(tensor 2\)"),
        ({"layout": Layout(degrees=Degrees(servers=1))}, "rank 0 is a server"),
        ({"test_loader": None}, "no held-out samples"),
        ({"collective_forward": True}, "sharding in stage 3"),
        ({"compares": "rank"}, "compares samples"),
    ],
)
def test_without_whole_weights_on_one_rank_a_sentence_says_why(
    run: Run, at: At, trainer: SimpleNamespace, capsys: Capture, changes: dict[str, Any], reason: str
) -> None:
    trainer.learner = SimpleNamespace(
        weights=SimpleNamespace(collective_forward=changes.pop("collective_forward", False)),
        loss=SimpleNamespace(compares=changes.pop("compares", None)),
    )
    callback = samples.Config().build(dataclasses.replace(run, **changes))
    callback.start(at("start", 0))
    callback.end(at("end", 4))  # computes nothing
    assert re.search(f"^callback samples shows nothing: .*{reason}", capsys.readouterr().err)


def test_a_page_shows_a_bounded_number() -> None:
    with pytest.raises(ValueError, match="at most 24"):
        samples.Config(count=25)
