"""A callback that would never be called is refused before training, with the moment that it probably means."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_args

import pytest
from paddle import nn

from paddle_dp import Callback
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.callbacks.console import Console
from paddle_dp.errors import UsageError
from paddle_dp.part.shelf import load, names
from paddle_dp.train import Moment
from paddle_dp.train.callback import Callback as Base
from paddle_dp.train.callback import Name
from paddle_dp.train.overrides import MOMENTS, refuse_overrides
from tests.assembly.test_trainer import Points, trainer


def with_method(name: str, method: Callable[..., Any]) -> Callback:
    return type("Mine", (Callback,), {name: method})()


def test_the_moments_are_those_of_a_callback() -> None:
    assert {name for name in vars(Base) if callable(vars(Base)[name])} == {
        *MOMENTS,
        "due_at_step",
        "due_at_epoch",
    }
    assert tuple(MOMENTS) == get_args(Name)


OTHER_NAMES = {  # moment: its near misses, and the methods of other tools
    "start": "on_train_begin on_fit_start on_load_checkpoint",
    "end": "on_train_end on_fit_end",
    "epoch": "on_epoch_end on_epoch_ended on_train_epoch_end on_epoch_begin epoch_end epochs Epoch",
    "step": (
        "on_train_batch_end on_train_batch_begin on_before_optimizer_step train_batch_end after_train_iter step_"
    ),
    "evaluated": "on_eval_end on_validation_epoch_end evaluate before_validate",
    "saved": "on_save_checkpoint save before_save_checkpoint",
    "save_failed": "on_save_failed savefailed",
    "failed": "on_exception",
}


@pytest.mark.parametrize(
    ("name", "meant"), [(name, moment) for moment, names in OTHER_NAMES.items() for name in names.split()]
)
def test_other_words_for_a_moment_are_refused(name: str, meant: str) -> None:
    with pytest.raises(
        UsageError,
        match=rf"test_overrides\.Mine: .*{name} is never called\. Did you mean {meant}\(self, moment[,)]",
    ):
        refuse_overrides(with_method(name, lambda self, moment: None))


def test_there_is_no_moment_before_an_update() -> None:
    with pytest.raises(UsageError, match=r"is called after the update; none is called before"):
        refuse_overrides(with_method("on_train_batch_begin", lambda self, batch, logs=None: None))


def generator(self: Any, moment: Moment) -> Iterator[None]:
    yield


async def waits(self: Any, moment: Moment) -> None:
    pass


async def waits_and_yields(self: Any, moment: Moment) -> AsyncIterator[None]:
    yield


class Waiting:
    async def __call__(self, moment: Moment) -> None: ...


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda self, epoch, logs: None, r"epoch\(epoch, logs\) cannot be called with 1 argument\."),
        (lambda self: None, r"epoch\(\) cannot be called with 1 argument.*def epoch\(self, moment\)"),
        (None, r"epoch = None cannot be called"),
        (generator, "epoch is a generator: called, it would do nothing"),
        (waits, "epoch is async"),
        (waits_and_yields, "epoch is an async generator: called, it would do nothing"),
        (Waiting(), "epoch is async"),
        (functools.partial(waits, None), "epoch is async"),
    ],
)
def test_a_moment_that_cannot_be_called_is_refused(method: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refuse_overrides(with_method("epoch", method))


def test_what_a_moment_is_about_comes_with_it() -> None:
    words = r"evaluated\(moment\) cannot be called with 2 arguments\. Write def evaluated\(self, moment, evaluation\)\."
    with pytest.raises(UsageError, match=words):
        refuse_overrides(with_method("evaluated", lambda self, moment: None))
    with pytest.raises(UsageError, match=r"Did you mean failed\(self, moment, error\)"):
        refuse_overrides(with_method("on_exception", lambda self, error: None))
    with pytest.raises(
        UsageError, match=r"its method save is never called\. Did you mean saved\(self, moment, path\)"
    ):
        refuse_overrides(with_method("save", lambda self, moment, path: None))


def test_what_is_no_callback_is_refused() -> None:
    class Keras:
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    with pytest.raises(UsageError, match=r"Keras is not a paddle_dp\.Callback\..* start, step, epoch"):
        trainer(Keras())
    with pytest.raises(UsageError, match=r"Keras is not a paddle_dp\.Callback"):
        Trainer.of(
            model=nn.Linear(2, 2), loss=None, optimizer="sgd", train=Points(), batch=4, callbacks=[Keras()]
        )


def test_an_interval_in_words_is_refused_with_the_way_to_write_it() -> None:
    mine = Callback()
    mine.every = "10 steps"  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"every is '10 steps': write Every\.parse\('10 steps'\)"):
        refuse_overrides(mine)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("every", 10, r"every is 10: write Every\.parse\('50 steps'\)"),
        ("reads", "false", r"reads is 'false': write True, .* or False"),
        ("reads", None, r"reads is None: write True"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refuse_overrides(type("Mine", (Callback,), {name: value})())


def test_a_method_for_a_moment_that_nobody_names_is_refused() -> None:
    words = r"its method note is never called\. The trainer calls refuse, start, step, .*rename it to _note\."

    class Named(Callback):
        def note(self, moment): ...  # type: ignore[no-untyped-def]

    class Annotated(Callback):
        def note(self, now: Moment, more: Any) -> None: ...

    class Repeats(Callback):
        def note(self, moment: Moment) -> None:
            self.note(moment)

    class Calls(Callback):  # only its code would say so, and that is not read
        def step(self, moment: Moment) -> None:
            self.note(moment)

        def note(self, moment: Moment) -> None: ...

    for kind in (Named, Annotated, Repeats, Calls):
        with pytest.raises(UsageError, match=words):
            refuse_overrides(kind())


def test_a_foreign_name_that_resembles_no_moment_is_refused_with_all_of_them() -> None:
    words = (
        r"its method on_log is never called\. The trainer calls refuse, start, step, .*rename it to _on_log\."
    )
    with pytest.raises(UsageError, match=words):
        refuse_overrides(with_method("on_log", lambda self, logs: None))


def test_another_name_of_a_moment_s_method_is_let_be() -> None:
    class Mine(Callback):
        def after(self, moment: Moment) -> None: ...

        epoch = after

    refuse_overrides(Mine())


def test_methods_of_ones_own_and_optional_arguments_are_let_be() -> None:
    class Mine(Callback):
        window_end = 3

        def step(self, moment: Moment, *, factor: int = 1, **more: Any) -> None:
            self._note(moment)

        def _note(self, moment: Moment) -> None: ...

        def sample(self, image): ...  # type: ignore[no-untyped-def]

        def log(self, text: str) -> None: ...

        def update(self, key: str, value: float) -> None: ...

        def save(self) -> None: ...

        def after_all(self) -> None: ...

        def _on_epoch_end(self) -> None: ...

    refuse_overrides(Mine())
    refuse_overrides(object.__new__(type("Quiet", (Console,), {"every": None})))


@pytest.mark.parametrize("name", names("callbacks"))
def test_the_shelf_s_own_are_let_be(name: str) -> None:
    module = load("callbacks", name)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Callback)]
    mine = [kind for kind in kinds if kind.__module__.startswith(module.__name__)]
    assert mine
    for kind in mine:
        refuse_overrides(object.__new__(kind))


def test_a_function_that_is_given_to_the_object_is_called() -> None:
    seen, mine = [], Callback()
    mine.step = seen.append  # type: ignore[method-assign]
    trainer(mine).fit("2 steps")
    assert [moment.progress.step for moment in seen] == [1, 2]
