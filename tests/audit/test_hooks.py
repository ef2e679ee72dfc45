"""What hooks are made of, without installing any: batches to files and back, orders read ahead, places in a script."""

from __future__ import annotations

import json
import sys

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler, IterableDataset

from paddle_dp.audit.events import EventJournal
from paddle_dp.audit.hooks import arrays, generators
from paddle_dp.audit.hooks.collectives import ORIGINAL, POSITIONS, watch_collectives
from paddle_dp.audit.hooks.data import BatchOrder, rows, size
from paddle_dp.audit.hooks.replay import JoinError, join
from paddle_dp.audit.hooks.source_line import called_by, here, nearest
from paddle_dp.audit.hooks.updates import local_norms, parameters_of


class Numbers(Dataset):
    def __getitem__(self, index):
        return np.float32([index])

    def __len__(self):
        return 10


class Endless(IterableDataset):
    def __iter__(self):
        yield from iter(int, 1)


def nested(count, shift=0):
    x = paddle.arange(count * 2, dtype="float32").reshape([count, 2]) + shift
    return [x, {"y": np.arange(count) + shift, "grid": paddle.ones([7])}, (1, "name", None)]


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, paddle.Tensor):
        return isinstance(other, paddle.Tensor) and one.dtype == other.dtype and bool((one == other).all())
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_batches_go_to_files_and_back(tmp_path):
    arrays.write_batches(tmp_path, "rank-0.step-1.batches", [nested(3), nested(5, 1)])
    back = arrays.read_batches(tmp_path, "rank-0.step-1.batches")
    assert all(
        equal(arrays.unflatten(*got), sent) for got, sent in zip(back, [nested(3), nested(5, 1)], strict=True)
    )
    assert len(back) == 2


def test_batches_that_are_too_large_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MAX_BATCH_BYTES", 10)
    arrays.write_batches(tmp_path, "b", [nested(3)])
    assert not list(tmp_path.iterdir())


def test_joined_batches_have_every_sample_once_and_common_arrays_as_they_are(tmp_path):
    arrays.write_batches(tmp_path, "b", [nested(3), nested(2, 10)])
    x, rest, _ = join(arrays.read_batches(tmp_path, "b"), [3, 2])
    assert x.numpy()[:, 0].tolist() == [0, 2, 4, 10, 12]
    assert rest["y"].tolist() == [0, 1, 2, 10, 11] and rest["grid"].shape == [7]


def test_batches_of_other_shapes_do_not_join(tmp_path):
    arrays.write_batches(tmp_path, "b", [[paddle.ones([2, 3])], [paddle.ones([2, 4])]])
    with pytest.raises(JoinError, match=r"\(2, 3\), \(2, 4\) cannot be joined to one batch"):
        join(arrays.read_batches(tmp_path, "b"), [2, 2])


@pytest.mark.parametrize("sampler", [BatchSampler, DistributedBatchSampler])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_order_read_ahead_is_the_one_that_is_served(sampler, shuffle):
    loader = DataLoader(Numbers(), batch_sampler=sampler(Numbers(), batch_size=4, shuffle=shuffle))
    order = BatchOrder()
    np.random.seed(0)
    served = [tuple(batch) for batch in order.read(loader.batch_sampler, loader)]
    np.random.seed(0)
    assert list(order.batches or ()) == served
    again = sampler(Numbers(), batch_size=4, shuffle=shuffle)
    assert [tuple(batch) for batch in again] == served
    assert order.drew == (("numpy",) if shuffle and sampler is BatchSampler else ())


def test_samplers_without_end_and_streams_stay_unread():
    endless = BatchOrder()
    loader = DataLoader(Numbers(), batch_size=4)
    served = iter(endless.read(iter(lambda: [1, 2], None), loader))
    assert [next(served) for _ in range(100)] == [[1, 2]] * 100 and endless.batches is None
    assert BatchOrder().read("sampler", DataLoader(Endless(), batch_size=4)) == "sampler"


def test_rows_know_samples_by_their_content():
    first, second = nested(3), nested(5)
    assert size(first) == 3 and len(rows(first)) == 3
    assert rows(first)[:2] == rows(second)[:2] and len(set(rows(second))) == 5
    assert not set(rows(first)) & set(rows(nested(3, 100)))


def test_generators_are_seen_to_move_and_are_not_moved():
    before = generators.states()
    assert generators.states() == before
    np.random.rand()
    assert generators.moved(before, generators.states()) == ("numpy",)
    before = generators.states()
    paddle.rand([1])
    assert generators.moved(before, generators.states()) == ("paddle",)


def test_places_are_the_users_and_no_librarys():
    number = sys._getframe().f_lineno
    assert here().endswith(f"test_hooks.py:{number + 1}")
    assert called_by("tests/audit/test_hooks.py") and not called_by("paddle/hapi/model.py")
    frames = []
    with pytest.raises(TypeError) as caught:
        json.loads(None)
    below = caught.value.__traceback__
    while below is not None:
        frames.append(below.tb_frame)
        below = below.tb_next
    assert frames[-1].f_code.co_filename.endswith("json/__init__.py")
    assert nearest(frames[-1]).startswith(here().rpartition(":")[0]) and nearest(None) == ""


def test_frozen_and_global_norms_are_not_local():
    layers = [
        paddle.nn.BatchNorm2D(4),
        paddle.nn.BatchNorm(4),
        paddle.nn.BatchNorm1D(4, use_global_stats=True),
    ]
    frozen = paddle.nn.BatchNorm2D(4)
    frozen.eval()
    names = {layer.full_name() for layer in local_norms()}
    assert [layer.full_name() in names for layer in (*layers, frozen)] == [True, True, False, False]


def test_parameters_of_groups_come_once():
    layers = [paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)]
    groups = [{"params": layer.parameters()} for layer in layers]
    plain = [each for layer in layers for each in layer.parameters()]
    for given in (groups, plain):
        names = [each.name for each in parameters_of(paddle.optimizer.AdamW(0.1, parameters=given))]
        assert names == [each.name for each in plain]


def test_collectives_have_their_effect_for_one_rank(tmp_path, monkeypatch):
    for module in (dist, dist.stream):
        for name in {*POSITIONS, *ORIGINAL} & vars(module).keys():
            monkeypatch.setattr(module, name, getattr(module, name))  # puts it back
    watch_collectives(EventJournal(tmp_path, 0), alone=True)
    sent = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    full, empty, gathered, received = [paddle.zeros([2])], [], [paddle.zeros([2])], []
    tensors, objects, scattered, sums = [paddle.zeros([2]) for _ in range(7)], ["there"], [], [5]
    dist.all_gather(full, sent, sync_op=False).wait()
    dist.all_gather(empty, tensor=sent)
    dist.all_gather(tensors[0], sent)
    dist.reduce_scatter(tensors[1], [sent])
    dist.gather(sent, gather_list=gathered, dst=0)
    dist.alltoall(received, [sent])
    dist.alltoall_single(tensors[2], sent)
    dist.scatter(tensors[3], [sent], src=0)
    dist.stream.scatter(tensors[4], sent)
    dist.stream.alltoall(tensors[5], sent, use_calc_stream=True)
    dist.stream.reduce_scatter(tensor=tensors[6], tensor_or_tensor_list=sent)
    dist.all_gather_object(objects, {"a": 1})
    dist.broadcast_object_list(sums, src=0)
    dist.scatter_object_list(scattered, [{"b": 2}])
    for module in (dist, dist.stream):
        for task in (
            module.all_reduce(sent, sync_op=False),
            module.broadcast(sent, 0),
            module.reduce(sent, dst=0),
        ):
            assert task.wait() and task.is_completed()
    dist.barrier()
    lists = [full, empty, gathered, received, *([tensor] for tensor in tensors)]
    assert [[each.tolist() for each in tensors] for tensors in lists] == [[[1.0, 2.0]]] * len(lists)
    assert all(each.stop_gradient and each is not sent for tensors in lists for each in tensors)
    assert sent.tolist() == [1.0, 2.0] and (objects, sums, scattered) == (
        ["there", {"a": 1}],
        [5],
        [{"b": 2}],
    )
    lines = [
        json.loads(line)[1]["collective"] for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()
    ]
    assert lines == [
        *["all_gather"] * 3, "reduce_scatter", "gather", "alltoall", "alltoall_single", *["scatter"] * 2, "alltoall",
        "reduce_scatter", "all_gather_object", "broadcast_object_list", "scatter_object_list",
        *["all_reduce", "broadcast", "reduce"] * 2, "barrier",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="group is not initialized"):
        dist.send(sent, 1)  # there is no other rank
    with pytest.raises(ValueError, match="shorter"):
        dist.all_gather([paddle.zeros([2]), paddle.zeros([2])], sent)  # of two ranks
