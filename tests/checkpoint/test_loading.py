from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from paddle_dp.checkpoint import Snapshot, TensorShard, UnusableError, load, save
from paddle_dp.checkpoint.manifest import read_manifest
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh


@pytest.fixture
def saved(tmp_path, snapshot_of, on_ranks):
    return on_ranks(2, lambda mesh: save(snapshot_of(3, mesh.rank, 2), tmp_path, mesh))[0]


def test_names_shapes_and_dtypes(saved):
    opened = load(saved)
    assert opened.names == ("model/b", "model/w")
    assert (opened.shape("model/w"), opened.dtype("model/w")) == ((6, 4), "float32")


def test_any_box_of_a_tensor(saved):
    whole = np.arange(24, dtype=np.float32).reshape(6, 4) + 3
    np.testing.assert_array_equal(load(saved).read("model/w", (2, 1), (3, 2)), whole[2:5, 1:3])
    np.testing.assert_array_equal(load(saved).read("model/w", offset=(4, 0)), whole[4:])
    np.testing.assert_array_equal(load(saved).read("model/w", shape=(1, 4)), whole[:1])
    assert load(saved).read("model/w", (6, 0), (0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0), (7, 4)), ((6, 0), (1, 4)), ((-1, 0), (1, 1)), ((0,), (6,)), ((0, 5), None)]
)
def test_a_box_outside_is_refused(saved, offset, shape):
    with pytest.raises(CheckpointError, match=r"model/w is \(6, 4\)"):
        load(saved).read("model/w", offset, shape)


def test_an_unknown_name_is_told_the_near_one(saved):
    with pytest.raises(CheckpointError, match=r"no tensor 'model/ww'\. Did you mean 'model/w'\?"):
        load(saved).read("model/ww")


def test_what_was_read_outlives_the_checkpoint(saved):
    opened = load(saved)
    array = opened.read("model/w")
    for path in saved.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    array += 1
    assert array[0, 0] == 4
    with open("/proc/self/maps") as maps:
        assert str(saved) not in maps.read()


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00000.json", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_found_on_load(saved, name, harm):
    path = saved / name
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 0x40
    path.write_bytes(content[:-9] if harm == "cut" else content)
    if harm == "remove":
        path.unlink()
    with pytest.raises(UnusableError, match=re.escape(name)) as caught:
        load(saved)
    assert str(saved) in str(caught.value)


def test_damage_that_one_rank_finds_is_raised_on_all(saved, on_ranks):
    (saved / "rank-00001.safetensors").write_bytes(b"x")
    results = on_ranks(3, lambda mesh: load(saved, mesh))
    assert {type(r) for r in results} == {CheckpointError} and len({str(r) for r in results}) == 1
    assert "rank-00001.safetensors" in str(results[0])


def test_ranks_share_the_checking_and_miss_nothing(saved, on_ranks, monkeypatch):
    read = []
    real = type(read_manifest(saved)).verify
    monkeypatch.setattr(
        type(read_manifest(saved)),
        "verify",
        lambda self, folder, names: read.extend(names) or real(self, folder, names),
    )
    results = on_ranks(3, lambda mesh: load(saved, mesh).names)
    assert results == [("model/b", "model/w")] * 3
    assert sorted(read) == sorted(read_manifest(saved).files)


def test_a_table_that_does_not_fit_its_file_is_refused(saved):
    """Right checksums, wrong content: what a careless tool that rewrites checkpoints could leave."""
    table = json.loads((saved / "rank-00000.json").read_text())
    table["pieces"]["model/b"]["size"] = table["pieces"]["model/b"]["shape"] = [5]
    (saved / "rank-00000.json").write_text(json.dumps(table))
    with pytest.raises(UnusableError, match="model/b with another shape or dtype than its index says"):
        load(saved, verify=False)


def test_nothing_in_a_checkpoint_is_run(saved):
    """No pickle: a file that runs code when unpickled is just damaged bytes here."""
    (saved / "rank-00000.safetensors").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UnusableError, match="makes no sense"):
        load(saved, verify=False)


def _cut(name, array, cuts, seat):
    """The shard of `array` at `seat`, when every dim is cut in so many equal parts."""
    size = [n // c for n, c in zip(array.shape, cuts, strict=True)]
    offset = [n * s for n, s in zip(size, seat, strict=True)]
    box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
    return TensorShard(name, array.shape, tuple(offset), array[box])


def test_tensor_by_pipeline_by_sharding_loads_in_every_other_layout(tmp_path, on_ranks):
    """8 ranks: weights in columns (tensor), layers by stage (pipeline), moments in rows as well (sharding)."""
    random = np.random.default_rng(0)
    layers = [f"layer{i}" for i in range(4)]
    weights = {n: random.standard_normal((8, 12)).astype(np.float32) for n in layers}
    moments = {n: random.standard_normal((8, 12)).astype(np.float32) for n in layers}
    tied = random.standard_normal((12, 8)).astype(np.float32)

    def work(mesh):
        stage, shard, seat = mesh.rank // 4, mesh.rank // 2 % 2, mesh.rank % 2
        shards = [_cut("model/tied", tied, (2, 1), (seat, 0))]  # on both stages and both shards
        for name in layers[stage * 2 : stage * 2 + 2]:
            shards.append(_cut(f"optimizer/{name}/moment1", moments[name], (2, 2), (shard, seat)))
            if shard == 0:
                shards.append(_cut(f"model/{name}", weights[name], (1, 2), (0, seat)))
        tensors = dict(enumerate(shards))
        return save(Snapshot(tensors=tensors, state={"progress": {"step": 5}}), tmp_path, mesh)

    opened = load(on_ranks(8, work)[0])
    for name, cuts in itertools.product(layers, [(1, 1), (1, 4), (4, 1), (2, 3), (8, 12)]):
        for seat in np.ndindex(*cuts):
            for kind, whole in (
                (f"model/{name}", weights[name]),
                (f"optimizer/{name}/moment1", moments[name]),
            ):
                wanted = _cut(kind, whole, cuts, seat)
                np.testing.assert_array_equal(
                    opened.read(kind, wanted.offset, wanted.array.shape), wanted.array
                )
    np.testing.assert_array_equal(opened.read("model/tied"), tied)
    assert len(opened.names) == 9


def test_a_rank_may_hold_several_boxes_of_one_tensor(tmp_path):
    """A fused qkv that is cut by head lies on a rank in three boxes."""
    whole = np.arange(12.0)
    shards = {str(i): TensorShard("qkv", (12,), (i,), whole[i : i + 2]) for i in range(0, 12, 2)}
    path = save(Snapshot(tensors=shards, state={"progress": {"step": 1}}), tmp_path, Mesh.alone())
    np.testing.assert_array_equal(load(path).read("qkv"), whole)
