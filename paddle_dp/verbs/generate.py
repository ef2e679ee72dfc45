"""Generates text from a prompt with a run's weights of any layout, in one process."""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

from paddle_dp.errors import UsageError
from paddle_dp.mesh import join
from paddle_dp.recipe import Recipe


@runtime_checkable
class Generates(Protocol):
    """A model with `generate(tokens [1, n], steps, temperature, top_k, seed)` → tokens [1, n + steps]."""

    def generate(self, *args: Any) -> Any: ...


@runtime_checkable
class Tokenized(Protocol):
    """A data set with a tokenizer: `encode(bytes)` → numbers, `decode(numbers)` → text."""

    tokenizer: Any


def generate(recipe: Recipe, options: dict[str, Any]) -> None:
    """Prints the prompt and `tokens` more, or of chat the answer, drawn at `temperature` (0: likeliest) from `top_k`.

    Raises UsageError for a model without `generate`, or data without a tokenizer.
    """
    import paddle

    from paddle_dp.assembly.build import learner_of, load_trained

    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    learner = learner_of(recipe, mesh)
    model, dataset = learner.model, recipe.dataset.build("test")
    if dataset is None:  # nothing is held out
        dataset = recipe.dataset.build("train")
    tokenizer = dataset.tokenizer if isinstance(dataset, Tokenized) else None
    if not isinstance(model, Generates) or tokenizer is None:
        raise UsageError(
            f"model {recipe.model.name} on dataset {recipe.dataset.name} cannot write text: it takes a model with a "
            "method generate(tokens, steps, …) and a data set with a tokenizer, such as gpt on text_files."
        )
    load_trained(recipe, options, learner)
    converses = hasattr(dataset, "answer")  # chat writes a user's turn, and reads an answer up to its end
    prompt = dataset.prompt(options["prompt"]) if converses else tokenizer.encode(options["prompt"].encode())
    if not options["prompt"] or not len(prompt):
        raise UsageError("--prompt is empty: give at least one character.")
    tokens = paddle.to_tensor(prompt.astype("int64")[None])
    written = model.generate(
        tokens, options["tokens"], options["temperature"], options["top_k"], options["seed"]
    )
    numbers = written.numpy()[0]
    show(dataset.answer(numbers[len(prompt) :]) if converses else tokenizer.decode(numbers))


def show(text: str) -> None:
    """Prints generated text: unchanged into a file or a pipe, with control characters escaped on a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, flush=True)


def visible(text: str) -> str:
    """The text with escapes ("\\x1b") for unprintable characters, except line ends and tabs.

    A model that has learned little writes any character, and a terminal obeys control characters: they move its cursor,
    change its colours and its title, and let text run backwards.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
