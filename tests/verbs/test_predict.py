"""`paddle-dp predict`: files to a run's model, without its data set."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_dp.assembly.build import build
from paddle_dp.assembly.inputs import FILE, InputArray, Inputs
from paddle_dp.core.loss import as_loss
from paddle_dp.datasets import cifar, digits, image_folder, text_files
from paddle_dp.errors import DataError, PaddleDPError, UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.schema import Pad
from paddle_dp.verbs import predict as predicting
from paddle_dp.verbs.array_files import samples_of
from paddle_dp.verbs.predict import Answer, Sample, _answers, _classes, _Lines, predict

DIGITS = {
    "model": {"use": "mlp", "hidden": [16]},
    "dataset": {"use": "digits"},
    "loss": {"use": "cross_entropy"},
    "optimizer": {"use": "adamw"},
    "schedule": {"use": "constant", "learning_rate": 0.01},
    "strategy": {"use": "single"},
    "train": {"length": "10 steps", "batch": 50},
    "callbacks": [{"use": "checkpoint", "every": "10 steps"}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run in a folder that has moved since, and what its model learned."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "r.yaml").write_text(json.dumps(DIGITS | {"output_dir": str(folder / "first")}))
    recipe = read_recipe(folder / "r.yaml")
    recipe.folder.mkdir()
    trainer = build(recipe, Mesh.alone())
    Inputs.from_dataset(trainer.loader.dataset).write(recipe.folder)
    trainer.fit("10 steps")
    shutil.move(folder / "first", folder / "moved")
    moved = read_recipe(folder / "r.yaml", (f'output_dir="{folder / "moved"}"',))
    return moved, trainer.learner.model


def one(shape, dtype):
    return Inputs(arrays=(InputArray(shape=shape, dtype=dtype),))


def said(recipe, capsys, *files, **options):
    predict(recipe, {"files": list(map(str, files)), **options})
    return capsys.readouterr().out


def test_arrays_are_classified_as_the_trained_model_does(run, tmp_path, capsys):
    recipe, model = run
    data = digits.Config().build("test")
    np.save(tmp_path / "some.npy", data.inputs[:7])
    np.savetxt(tmp_path / "some.csv", data.inputs[:7], delimiter=",")
    model.eval()
    scores = model(paddle.to_tensor(data.inputs[:7])).numpy()
    for name in ("some.npy", "some.csv"):
        out = tmp_path / f"{name}.npz"
        text = said(recipe, capsys, tmp_path / name, top=1, out=str(out))
        words = [line.split() for line in text.splitlines()]
        assert [word[0] for word in words] == [f"{tmp_path / name}[{row}]:" for row in range(7)]
        assert [int(word[1]) for word in words] == scores.argmax(1).tolist()
        with np.load(out) as kept:
            np.testing.assert_allclose(kept["outputs"], scores, rtol=1e-5, atol=1e-5)
            assert kept["rows"].tolist() == list(range(7))


@pytest.mark.parametrize(("words", "sizes"), [((), [32, 8]), (("evaluation.batch=15",), [15, 15, 10])])
def test_a_forward_has_few_samples_though_a_training_has_many(run, tmp_path, monkeypatch, words, sizes):
    """The batch of a training, 50 here, is shared by all of its ranks."""
    recipe, counts = (
        read_recipe(run[0].folder.parent / "r.yaml", (f'output_dir="{run[0].folder}"', *words)),
        [],
    )
    original = predicting._answers
    counted = lambda model, loss, batch: counts.append(len(batch)) or original(model, loss, batch)  # noqa: E731
    monkeypatch.setattr(predicting, "_answers", counted)
    np.save(tmp_path / "some.npy", np.zeros([40, 64], "float32"))
    predict(recipe, {"files": [str(tmp_path / "some.npy")]})
    assert counts == sizes


def test_a_table_has_all_scores(run, tmp_path, capsys):
    recipe, _ = run
    np.savez(tmp_path / "some.npz", digits.Config().build("test").inputs[:2])
    rows = list(csv.DictReader(io.StringIO(said(recipe, capsys, tmp_path / "some.npz", csv=True))))
    assert [row["row"] for row in rows] == ["0", "1"]
    for row in rows:
        scores = [float(row[f"score {digit}"]) for digit in range(10)]
        assert int(row["class"]) == int(np.argmax(scores))
        assert float(row["probability"]) == pytest.approx(
            float(np.max(np.exp(scores)) / np.sum(np.exp(scores))), 1e-5
        )


def test_samples_of_float64_are_read_as_in_a_training(run, tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "some.npy", digits.Config().build("test").inputs[:3])
    expected = said(run[0], capsys, tmp_path / "some.npy")
    monkeypatch.setattr(Inputs, "read", lambda _: one((64,), "float64"))  # a data set of np.float64 samples
    assert said(run[0], capsys, tmp_path / "some.npy") == expected


def test_names_of_classes_come_from_the_run_not_from_the_data(run):
    recipe, _ = run
    kept = Inputs.read(recipe.folder)
    assert kept == Inputs(arrays=(InputArray(shape=(64,), dtype="float32"),), classes=tuple("0123456789"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (np.zeros((2, 5)), r"float64\[2, 5\], and the model reads samples of float32\[64\]"),
        (np.array([{"a": 1}], dtype=object), "cannot be read as an array"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_its_name(run, tmp_path, content, what):
    np.save(tmp_path / "bad.npy", content, allow_pickle=True)
    with pytest.raises(DataError, match=f"bad.npy.*{what}"):
        predict(run[0], {"files": [str(tmp_path / "bad.npy")]})


@pytest.mark.parametrize(
    ("dtype", "numbers", "what"),
    [
        ("uint8", [300, 1], "has 300, which does not fit the model's dtype, uint8"),
        ("uint8", [1, -1], "has -1, which does not fit the model's dtype, uint8"),
        ("int64", [0.5, 1], "has fractions"),
        ("bool", [2, 1], "has 2, which does not fit the model's dtype, bool"),
        ("float32", [1e300, 1], "has 1e[+]300, which does not fit the model's dtype, float32"),
        ("float32", [1j, 1], "is of type complex128"),
        ("float32", ["a", "b"], "is of type <U1"),
    ],
)
def test_numbers_that_the_model_cannot_read_are_refused(tmp_path, dtype, numbers, what):
    np.save(tmp_path / "some.npy", np.array([numbers]))
    with pytest.raises(DataError, match=what):
        list(samples_of(tmp_path / "some.npy", one((2,), dtype), {}))


SEVERAL = Inputs(
    arrays=(
        InputArray(name="ids", shape=(3,), dtype="int64"),
        InputArray(name="mask", shape=(3,), dtype="bool"),
        InputArray(name="more.age", shape=(), dtype="float32"),
    ),
    structure={"ids": None, "mask": None, "more": {"age": None}},
)
LINES = ['{"ids": [1, 2, 3], "mask": [true, true, false], "more": {"age": 4}}', ""]
LINES += ['{"more": {"age": 0.5}, "ids": [4, 5, 6], "mask": [1, 0, 0]}']


def test_several_inputs_are_read_by_their_names_from_each_kind_of_file(tmp_path):
    ids, mask, age = np.int64([[1, 2, 3], [4, 5, 6]]), np.array([[1, 1, 0], [1, 0, 0]]), np.array([4, 0.5])
    np.savez(tmp_path / "some.npz", **{"ids": ids, "mask": mask, "more.age": age, "labels": age})
    header = "more.age,mask[0],mask[1],mask[2],ids[2],ids[1],ids[0]"
    np.savetxt(
        tmp_path / "some.csv", np.c_[age, mask, ids[:, ::-1]], delimiter=",", header=header, comments=""
    )
    (tmp_path / "some.jsonl").write_text("\n".join(LINES))
    for name in ("some.npz", "some.csv", "some.jsonl"):
        found = list(samples_of(tmp_path / name, SEVERAL, {}))
        assert len(found) == 2, name
        for row, sample in enumerate(found):
            assert sample["ids"].tolist() == ids[row].tolist() and sample["ids"].dtype == np.int64
            assert sample["mask"].tolist() == mask[row].astype(bool).tolist()
            assert sample["more"]["age"] == np.float32(age[row])


def test_lines_are_padded_as_the_run_pads(tmp_path):
    (tmp_path / "some.jsonl").write_text('{"ids": [7], "more": {"age": 1}}')
    pads = {"inputs.ids": Pad(length=3, mask="mask"), "targets": Pad(length=9)}
    (found,) = samples_of(tmp_path / "some.jsonl", SEVERAL, pads)
    assert (found["ids"].tolist(), found["mask"].tolist()) == ([7, 0, 0], [True, False, False])
    (tmp_path / "whole.jsonl").write_text(LINES[0])
    (found,) = samples_of(tmp_path / "whole.jsonl", SEVERAL, pads)
    assert found["mask"].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("name", "content", "of", "rows"),
    [
        ("some.jsonl", "[1, 2]\n[3]", ((None,), "int64"), [[1, 2], [3]]),  # a dim of any size, as it is
        ("some.csv", "a,b\n1,2\n3,4\n", ((2,), "float32"), [[1, 2], [3, 4]]),  # a header is passed over
    ],
)
def test_a_file_of_one_input(tmp_path, name, content, of, rows):
    (tmp_path / name).write_text(content)
    assert [x.tolist() for x in samples_of(tmp_path / name, one(*of), {})] == rows


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"ids": [1, 2], "mask": [1, 1], "more": {"age": 4}}', r":1 is .*the model reads ids of int64\[3\]"),
        ('{"ids": [1, 2, 3]}', r"the model reads ids int64\[3\], mask bool\[3\], more.age float32\[\]"),
        ('{"ids": [1, 2, 0.5], "mask": [1, 1, 1], "more": {"age": 4}}', "has fractions"),
        ('{"ids": [1, [2], 3]', "is no sample in JSON"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, line, what):
    (tmp_path / "some.jsonl").write_text(line)
    with pytest.raises(DataError, match=what):
        list(samples_of(tmp_path / "some.jsonl", SEVERAL, {}))


def test_archives_and_tables_without_a_name_are_refused(tmp_path):
    both = {"ids": np.zeros((2, 3)), "mask": np.zeros((2, 3))}
    np.savez(tmp_path / "some.npz", **both)
    with pytest.raises(DataError, match=r"has ids, mask, and no more\.age"):
        list(samples_of(tmp_path / "some.npz", SEVERAL, {}))
    np.savez(tmp_path / "some.npz", **both, **{"more.age": np.zeros(3)})
    with pytest.raises(DataError, match=r"unequal numbers of samples: ids 2, mask 2, more\.age 3"):
        list(samples_of(tmp_path / "some.npz", SEVERAL, {}))
    np.save(tmp_path / "some.npy", np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"give \.npz, \.csv or \.jsonl with names"):
        list(samples_of(tmp_path / "some.npy", SEVERAL, {}))


def test_what_a_model_of_several_inputs_reads_is_kept(tmp_path):
    texts = [(({"ids": np.arange(i + 1)}, [np.float32(1), np.zeros(2)]), 0) for i in range(3)]
    kept = Inputs.from_dataset(texts, varies=True)
    assert str(kept) == "[0].ids int64[any], [1][0] float32[], [1][1] float64[2]"
    kept.write(tmp_path)
    assert Inputs.read(tmp_path) == kept


def test_a_damaged_archive_is_refused_by_its_name(tmp_path):
    path = tmp_path / "cut.npz"
    np.savez(path, np.ones((2, 4)))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:150] + b"xxx" + whole[153:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cut\.npz cannot be read as an array"):
            list(samples_of(path, one((4,), "float32"), {}))


@pytest.mark.parametrize(
    ("out", "what"),
    [
        ("some.csv", "outputs are written as .npz"),
        ("nowhere/o.npz", "there is no folder"),
        ("some.npz", "one of the files to predict, and would be lost"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_anything_is_read(run, tmp_path, out, what):
    np.savez(tmp_path / "some.npz", np.ones((1, 64)))
    with pytest.raises(UsageError, match=what):
        predict(run[0], {"files": [str(tmp_path / "some.npz")], "out": str(tmp_path / out)})


def test_outputs_on_a_full_disk_are_answered_in_a_sentence_and_leave_no_half_a_file(
    run, tmp_path, monkeypatch
):
    np.save(tmp_path / "some.npy", np.ones((1, 64)))

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DataError, match=r"o\.npz was not written: No space left on device\."):
        predict(run[0], {"files": [str(tmp_path / "some.npy")], "out": str(tmp_path / "o.npz")})
    assert [file.name for file in tmp_path.iterdir()] == ["some.npy"]


@pytest.mark.parametrize(
    ("name", "what"), [("nowhere.npy", "there is no such file"), ("it.jpg", "dataset digits reads no files")]
)
def test_a_file_that_nothing_reads_is_refused(run, tmp_path, name, what):
    (tmp_path / "it.jpg").touch()
    with pytest.raises(UsageError, match=what):
        predict(run[0], {"files": [str(tmp_path / name)]})


def test_a_damaged_record_of_inputs_is_told(tmp_path):
    (tmp_path / FILE).write_text('{"shape": [64]')
    with pytest.raises(PaddleDPError, match="is damaged"):
        Inputs.read(tmp_path)


def test_an_image_is_read_as_a_held_out_one(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        image.fromarray(pixels).save(tmp_path / split / "cat" / "one.png")
    config = image_folder.Config(path=str(tmp_path), size=24, resize=32)
    [(one, target)] = config.read_file(tmp_path / "val" / "cat" / "one.png")
    assert target is None
    np.testing.assert_array_equal(one, config.build("test")[0][0])
    [(small, _)] = cifar.Config().read_file(tmp_path / "val" / "cat" / "one.png")
    assert (small.shape, small.dtype) == ((3, 32, 32), np.float32)


def test_all_of_a_text_but_its_first_token_is_predicted(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(65, 75)))
    windows = list(text_files.Config(length=4).read_file(tmp_path / "text.txt"))
    assert [target.tolist() for _, target in windows] == [[66, 67, 68, 69], [70, 71, 72, 73], [74]]
    (tmp_path / "text.txt").write_bytes(b"a")
    with pytest.raises(DataError, match="1 tokens: there is nothing to predict"):
        list(text_files.Config().read_file(tmp_path / "text.txt"))


def test_the_loss_of_a_text_is_that_of_each_token(tmp_path, capsys):
    """Its last window is shorter, and counts by its tokens."""
    text = bytes(range(32, 32 + 21))
    (tmp_path / "text.txt").write_bytes(text)
    settings = DIGITS | {
        "model": {"use": "gpt", "vocab": 256, "width": 16, "depth": 1, "heads": 2, "length": 8},
        "dataset": {"use": "text_files", "path": str(tmp_path / "text.txt"), "length": 8, "held_out": 0.5},
        "train": {"length": "1 steps", "batch": 1},
        "callbacks": [{"use": "checkpoint", "every": "1 steps"}],
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "r.yaml").write_text(json.dumps(settings))
    recipe = read_recipe(tmp_path / "r.yaml")
    trainer = build(recipe, Mesh.alone())
    trainer.fit("1 steps")
    model = trainer.learner.model
    model.eval()
    tokens = np.frombuffer(text, np.uint8).astype("int64")
    total = 0.0
    for start in (0, 8, 16):
        scores = model(paddle.to_tensor(tokens[None, start : start + 8][:, : 20 - start]))
        targets = paddle.to_tensor(tokens[None, start + 1 : start + 9])
        total += float(paddle.nn.functional.cross_entropy(scores[0], targets[0], reduction="sum"))
    words = said(recipe, capsys, tmp_path / "text.txt")
    assert f"loss {total / 20:.4f} over 20 targets" in words
    (tmp_path / "texts.jsonl").write_text(
        f"\n{json.dumps({'text': text.decode()})}\n"
    )  # as its data set reads it
    assert f"loss {total / 20:.4f} over 20 targets" in said(recipe, capsys, tmp_path / "texts.jsonl")
    (tmp_path / "tokens.jsonl").write_text("[1, 2, 3, 4, 5, 6, 7, 8]\n")
    assert said(recipe, capsys, tmp_path / "tokens.jsonl").startswith(
        f"{tmp_path / 'tokens.jsonl'}[0]: float32[8, 256]"
    )


def test_a_text_counts_by_the_targets_that_are_not_ignored():
    model = paddle.nn.Embedding(7, 5)
    loss = as_loss(read_part("losses", {"use": "cross_entropy", "ignore_index": -100}).build())
    tokens, targets = np.array([1, 2, 3]), np.array([[-100, -100, 4], [0, -100, 4]])
    samples = [Sample(file=Path("a"), row=row, input=tokens, target=targets[row]) for row in range(2)]
    scores = -paddle.nn.functional.log_softmax(model(paddle.to_tensor(tokens))).numpy()
    for answer, total, count in zip(
        _answers(model, loss, samples), (scores[2, 4], scores[0, 0] + scores[2, 4]), (1, 2), strict=True
    ):
        assert answer.count == count and answer.total == pytest.approx(total, rel=1e-6)


@pytest.fixture
def labelled(tmp_path):
    """A function of biases: a run of a model whose three labels' outputs are these, and its two images."""
    image = pytest.importorskip("PIL.Image")
    for name in ("a.png", "b.png", "c.png"):
        image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "train_list.txt").write_text("a.png 1,0,1\nb.png 0,1,1\n")
    (tmp_path / "val_list.txt").write_text("c.png 1,0,1\n")
    (tmp_path / "names.txt").write_text("hat\nglasses\nsmile\n")

    def train(loss, biases):
        settings = DIGITS | {
            "model": {"use": "mlp", "inputs": 768, "hidden": [], "classes": 3},
            "dataset": {"use": "image_list", "path": str(tmp_path), "labels": 3, "names": "names.txt", "size": 16},
            "loss": {"use": loss},
            "schedule": {"use": "constant", "learning_rate": 0.0},
            "train": {"length": "1 step", "batch": 2},
            "callbacks": [{"use": "checkpoint", "every": "1 steps"}],
            "output_dir": str(tmp_path / "run"),
        }  # fmt: skip
        (tmp_path / "r.yaml").write_text(json.dumps(settings))
        recipe = read_recipe(tmp_path / "r.yaml")
        trainer = build(recipe, Mesh.alone())
        *_, weight, bias = trainer.learner.model.parameters()
        weight.set_value(paddle.zeros_like(weight))
        bias.set_value(paddle.to_tensor(biases))
        trainer.fit("1 steps")
        return recipe, [tmp_path / "a.png", tmp_path / "b.png"]

    return train


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "asymmetric"])
def test_of_labels_each_has_a_probability_and_the_likely_ones_are_shown(labelled, capsys, loss):
    recipe, images = labelled(loss, [1.0, -2.0, 3.0])
    shares = (1 / (1 + np.exp([-1.0, 2.0, -3.0]))).tolist()
    lines = said(recipe, capsys, *images, top=1).splitlines()
    assert lines == [f"{image}: smile {shares[2]:.4f}  hat {shares[0]:.4f}" for image in images]
    rows = list(csv.DictReader(io.StringIO(said(recipe, capsys, *images, csv=True))))
    for row in rows:
        found = [float(row[f"probability {name}"]) for name in ("hat", "glasses", "smile")]
        assert found == pytest.approx(shares, rel=1e-5)
        assert "class" not in row and float(row["score smile"]) == 3


def test_without_a_likely_label_a_sentence_says_so(labelled, capsys):
    recipe, images = labelled("binary_cross_entropy", [-1.0, -2.0, -3.0])
    expected = f"{images[0]}: no label has a probability of 0.5; the likeliest: hat 0.2689"
    assert said(recipe, capsys, images[0]).splitlines() == [expected]


def shares_of(loss, outputs):
    """The classes and their probabilities, by a recipe's `loss`, for a model with these outputs [1, 3]."""
    built = as_loss(read_part("losses", loss).build())
    samples = [Sample(file=Path("a"), row=0, input=np.float32(outputs))]
    (answer,) = _answers(paddle.nn.Identity(), built, samples)
    return _classes(built, answer, ("a", "b", "c")), answer.probabilities.tolist()


def test_cosines_are_scaled_as_in_the_training():
    cosines = [0.5, 0.4, -0.2]
    powers = np.exp(np.multiply(cosines, 30))
    found = shares_of({"use": "margin_softmax", "scale": 30}, cosines)
    assert found == (("a", "b", "c"), pytest.approx((powers / powers.sum()).tolist(), rel=1e-5))
    assert np.isnan(shares_of({"use": "cross_entropy"}, [0.0, np.nan, 1.0])[1]).all()


def test_labels_without_names_have_their_numbers():
    """They were shown as raw outputs, which are no probabilities."""
    built = as_loss(read_part("losses", {"use": "binary_cross_entropy"}).build())
    (answer,) = _answers(
        paddle.nn.Identity(), built, [Sample(file=Path("a"), row=0, input=np.float32([0, 2]))]
    )
    assert _classes(built, answer, ()) == ("0", "1")
    assert answer.probabilities == pytest.approx([0.5, 1 / (1 + np.exp(-2.0))])


@pytest.mark.parametrize("loss", ["mean_squared_error", "triplet"])
def test_outputs_that_score_no_classes_have_no_probabilities(loss):
    assert shares_of({"use": loss}, [0.1, 0.2, 0.3]) == ((), [])


@pytest.mark.parametrize(
    ("settings", "ending"),
    [({}, ", perplexity 7.389"), ({"ignore_index": 0}, ", perplexity 7.389"), ({"label_smoothing": 0.1}, "")],
)
def test_the_power_of_a_smoothed_loss_is_no_perplexity(capsys, settings, ending):
    lines = _Lines(as_loss(read_part("losses", {"use": "cross_entropy", **settings}).build()), 3)
    sample = Sample(file=Path("a.txt"), row=0, input=np.zeros(2))
    lines.show(Answer(sample=sample, outputs=np.zeros(2), probabilities=np.zeros(0), total=6.0, count=3), ())
    lines.end()
    assert capsys.readouterr().out == f"a.txt: loss 2.0000 over 3 targets{ending}\n"
