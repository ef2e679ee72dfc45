"""Writes on from a prompt with what a run has learned, in one process, whatever layout it learned in."""

from __future__ import annotations

from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.mesh import join
from paddle_dp.recipe import Recipe


def generate(recipe: Recipe, options: dict[str, Any]) -> None:
    """Prints options["prompt"] and what follows it: `tokens` more, at `temperature` (0: the likeliest), from `top_k`.

    Raises UsageError for a model that cannot generate, or data without a tokenizer.
    """
    import paddle

    from paddle_dp.train.assemble import find_checkpoint
    from paddle_dp.train.build import learner_of
    from paddle_dp.train.state import load_model

    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    learner = learner_of(recipe, mesh)
    words = getattr(recipe.dataset.build("test"), "tokenizer", None)
    if not hasattr(learner.model, "generate") or words is None:
        raise UsageError(
            f"model {recipe.model.name} on dataset {recipe.dataset.name} cannot write text: it takes a model with a "
            "method generate(tokens, steps, …) and a data set with a tokenizer, such as gpt on text_files."
        )
    load_model(find_checkpoint(recipe.folder, options.get("checkpoint") or "newest", mesh), learner)
    prompt = words.encode(options["prompt"].encode())
    if not len(prompt):
        raise UsageError("--prompt needs a character at least to begin with.")
    tokens = paddle.to_tensor(prompt.astype("int64")[None])
    written = learner.model.generate(
        tokens, options["tokens"], options["temperature"], options["top_k"], options["seed"]
    )
    print(words.decode(written.numpy()[0]), flush=True)
