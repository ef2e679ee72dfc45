"""A count that only goes forward."""

from paddle_dp.train.progress import Progress


def test_batches_add_up_and_epochs_begin_anew():
    progress = Progress().advance(50).advance(37).next_epoch().advance(50)
    assert progress == Progress(epoch=1, batch=1, step=3, samples=137)


def test_its_state_brings_it_back():
    progress = Progress(epoch=2, batch=5, step=29, samples=1437)
    assert Progress(**progress.state()) == progress
