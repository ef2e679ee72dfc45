"""Slots: apart from each other, aligned, shared with a forked process."""

import os

import numpy as np
import pytest

from paddle_dp.data.shared_buffer import ArraySpec, SampleSpec, SharedBuffer

LAYOUT = SampleSpec((ArraySpec("<f4", (3, 5)), ArraySpec("<i8", ())))


def test_slots_do_not_overlap_and_are_aligned():
    buffer = SharedBuffer(LAYOUT, rows=3, slots=4)
    arrays = [array for slot in buffer.slots for array in slot]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous
    assert buffer.slots[0].inputs.shape == (3, 3, 5) and buffer.slots[0].targets.shape == (3,)


def test_what_a_forked_process_writes_is_read_here():
    buffer = SharedBuffer(LAYOUT, rows=2, slots=1)
    if not (pid := os.fork()):
        buffer.slots[0].inputs[1] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert buffer.slots[0].inputs[:, 0, 0].tolist() == [0, 7]


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2)])
def test_samples_of_no_size_are_held_too(shape):
    buffer = SharedBuffer(SampleSpec((ArraySpec("|u1", shape), ArraySpec("<f4", shape))), rows=2, slots=2)
    assert buffer.slots[1].inputs.shape == (2, *shape)


def test_a_difference_is_told_in_words():
    layout = SampleSpec.from_pair((np.zeros((3, 8), np.float32), np.int64(1)))
    assert layout.difference((np.ones((3, 8), np.float32), np.array(5))) is None
    assert layout.difference((np.ones((1, 8), np.float32), np.array(5))) == "float32[1, 8], not float32[3, 8]"
    assert layout.difference((np.ones((3, 8), np.float32), np.array(0.5))) == "float64[], not int64[]"
