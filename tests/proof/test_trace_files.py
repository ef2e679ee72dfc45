"""The store on the disk, and what runs with noise leave there."""

import numpy as np
import pytest

from paddle_dp.checkpoint import TensorShard
from paddle_dp.proof import trace_files
from paddle_dp.proof.trace_files import ArrayStore, NoiseFloors, SheetWriter, Trace, key_of

GRADIENT = key_of("gradient", 1, "w")
DRAW = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Arrays of a few elements are read and folded in several chunks."""
    monkeypatch.setattr(trace_files, "CHUNK", 3)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool", "uint16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_an_array_comes_back_as_it_was(tmp_path, dtype, shape):
    array = np.asarray(DRAW.normal(size=shape) * 100).astype(dtype)
    written = ArrayStore(tmp_path / "a.bin")
    written.put("first", np.arange(7))
    written.put("a", array.T)
    assert np.array_equal(written.get("a"), array.T)
    written.close()
    again = ArrayStore(tmp_path / "a.bin", written.index)
    assert again.get("a").dtype == array.dtype and np.array_equal(again.get("a"), array.T)
    assert np.array_equal(again.read("first", 2, 5), [2, 3, 4])


def runs(count):
    return [DRAW.normal(size=(4, 5)) for _ in range(count)]


def test_the_most_of_every_element_and_of_the_norm_is_kept(tmp_path):
    base, *noisy = runs(4)
    with SheetWriter(tmp_path, "wide", 0) as sheet:
        sheet.put(GRADIENT, TensorShard.full(GRADIENT, base))
        floors = NoiseFloors(sheet)
        for array in noisy:
            floors.put(GRADIENT, TensorShard.full(GRADIENT, array))
            floors.put(key_of("state", 1, "unknown"), TensorShard.full("x", array))
        sheet.finish({"noise": floors.norms})
    most, norm = Trace.read(tmp_path, "wide", 1).noise(GRADIENT)
    apart = [np.abs(array - base) for array in noisy]
    assert np.array_equal(most, np.max([a.astype("float32") for a in apart], axis=0))
    assert norm == pytest.approx(max(map(np.linalg.norm, apart)), rel=1e-15)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_constant_that_is_not_finite_has_no_noise(tmp_path, value):
    """It was a NaN, so that the others of its buffer had none either."""
    with SheetWriter(tmp_path, "wide", 0) as sheet:
        sheet.put(GRADIENT, TensorShard.full(GRADIENT, np.array([value, 1.0, 2.0, 2.0])))
        floors = NoiseFloors(sheet)
        floors.put(GRADIENT, TensorShard.full(GRADIENT, np.array([value, 4.0, 2.0, 6.0])))
        sheet.finish({"noise": floors.norms})
    most, norm = Trace.read(tmp_path, "wide", 1).noise(GRADIENT)
    assert norm == 5.0 and most.tolist() == [0.0, 3.0, 0.0, 4.0]


def test_a_sheet_that_is_not_finished_is_none(tmp_path):
    with pytest.raises(RuntimeError), SheetWriter(tmp_path, "wide", 0):
        raise RuntimeError
    assert Trace.read(tmp_path, "wide", 1) is None and not list(tmp_path.iterdir())


def test_a_file_that_was_cut_off_is_no_array(tmp_path):
    written = ArrayStore(tmp_path / "a.bin")
    written.put("a", np.ones(8))
    written.close()
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(40)
    with pytest.raises(EOFError, match="ends within a"):
        ArrayStore(tmp_path / "a.bin", written.index).get("a")
