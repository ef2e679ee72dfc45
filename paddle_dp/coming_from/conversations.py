"""The data of PaddleNLP's and PaddleFormers's fine-tunings: conversations, and several data sets with probabilities.

The keys' meanings are from `llm/utils/data.py` of PaddleNLP and `paddleformers/datasets` (PaddleFormers 1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Section
from paddle_dp.coming_from.model_folder import PublishedModel, texts_section
from paddle_dp.coming_from.trainer_arguments import choice, number, switch

_FORMS = {"erniekit": {"field": "src", "answers": "tgt"}, "messages": {}}
_ORDERS = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted", "random": ""}


@dataclass(frozen=True)
class _Source:
    """A file or folder of PaddleFormers's, the form of its lines, and its probability."""

    path: str
    form: str
    probability: float = 1.0


def reads_conversations(model: PublishedModel) -> bool:
    """Whether the model takes windows of several documents."""
    return model.family in ("gpt", "llama")


def conversations_section(
    c: Configuration, model: PublishedModel, length: int | None, evaluates: bool
) -> Section:
    """The data set of a fine-tuning; `evaluates`: whether held-out conversations are named there, too."""
    sources, tests = _sources(c, "train"), _sources(c, "eval")
    folder = None if sources else c.take("dataset_name_or_path")
    named = "which the file does not name"
    section = texts_section(c, model, sources[0].path if sources else folder, length, named, use="chat")
    # Windows are shared, by the names of PaddleFormers, PaddleNLP, and its older one.
    is_packed = [switch(c, key) for key in ("packing", "zero_padding", "intokens")]
    section["packing"] = any(is_packed)
    if isinstance(folder, str) and folder:
        section |= {**_in_folder(c, folder, evaluates), **_FORMS["erniekit"]}
    if not folder and not evaluates:
        section["held_out"] = 0.0
    if sources or c.has("truncation_strategy"):
        section |= _longer(c)
    _template(c, bool(sources))
    if not sources:
        return section
    return _mixture(c, section, sources, tests if evaluates else None)


def packed_section(c: Configuration, model: PublishedModel, length: int | None, evaluates: bool) -> Section:
    """The data set of PaddleFormers's pretraining on texts; `evaluates`: whether held-out texts are named, too."""
    sources = _sources(c, "train")
    is_packed = switch(c, "packing") and c.values.get("truncate_packing") in (None, True)
    use = "packed_texts" if is_packed else "text_files"
    section = texts_section(c, model, sources[0].path, length, use=use)
    if (tests := _sources(c, "eval")) and evaluates:
        section["test"] = tests[0].path
    if any(source.form != "erniekit" for source in sources):
        c.lose_key("train_dataset_type", "texts are the field text of a line, as in erniekit: dataset.field")
    if is_packed:
        c.take("truncate_packing")
    else:
        c.lose_key("packing", "texts are cut into windows, which go across documents")
        c.differ("Texts are cut into windows; theirs cuts each at max_seq_len, and leaves out the rest.")
    return _mixture(c, section, sources, [])


def _sources(c: Configuration, split: str) -> list[_Source]:
    """The data sets of a split, those with probability 0 left out; none if no path is there. Raises UsageError for
    lists of unequal lengths."""
    key = f"{split}_dataset_path"
    if not (paths := _entries(c.take(key))):
        return []
    types = _entries(c.take(f"{split}_dataset_type", "erniekit")) or ["erniekit"]
    equal = "1.0" if len(paths) == 1 else ",".join("1" * len(paths))
    shares = _entries(c.take(f"{split}_dataset_prob", equal))
    if split == "eval":
        c.carried -= {"eval_dataset_prob"}
        c.without_counterpart("eval_dataset_prob", "every held-out sample counts once")
    if not len(paths) == len(types) == len(shares):
        c.reject(
            key, f"has {len(paths)} paths, and there are {len(types)} types and {len(shares)} probabilities"
        )
    try:
        numbers = [float(share) for share in shares]
    except ValueError:
        c.reject(f"{split}_dataset_prob", "needs a number for each path, such as 0.8,0.2")
    if unknown := [name for name in types if name not in _FORMS]:
        reason = f"{unknown[0]}: lines are read as messages; erniekit has src and tgt, too"
        c.lose_key(f"{split}_dataset_type", reason)
    if any("#" in path for path in paths):
        c.lose_key(key, "all lines of a file are read: the number behind # is left out")
    read = [
        _Source(path.partition("#")[0], form if form in _FORMS else "messages", share)
        for path, form, share in zip(paths, types, numbers, strict=True)
        if share > 0
    ]
    return read or c.reject(f"{split}_dataset_prob", "is 0 for each path")


def _entries(value: Any) -> list[str]:
    """The entries of a text such as "a.jsonl,b.jsonl", or of a list."""
    entries = value if isinstance(value, list) else str("" if value is None else value).split(",")
    return [text for each in entries if (text := str(each).replace(" ", ""))]


def _mixture(
    c: Configuration, section: Section, sources: list[_Source], tests: list[_Source] | None
) -> Section:
    """The section for one data set, or a mixture of several with the settings of `section`. `tests`: their held-out
    data sets; None: nothing is evaluated."""
    sections = [{**section, "path": source.path} for source in sources]
    strategy = choice(c.take("mix_strategy", "concat"))
    if section["use"] == "chat":
        sections = [each | _FORMS[source.form] for each, source in zip(sections, sources, strict=True)]
        if tests is None:
            c.carried -= {"eval_dataset_path", "eval_dataset_type"}
            c.without_counterpart("eval_dataset_path", "nothing is evaluated")
            c.without_counterpart("eval_dataset_type", "nothing is evaluated")
        sections = _with_tests(c, sections, sources, tests)
    if len(sections) == 1:
        c.without_counterpart("num_samples_each_epoch", "an epoch has each sample once")
        return sections[0]
    if strategy not in _ORDERS:
        if strategy != "concat":
            c.lose_key(
                "mix_strategy", "of concat, interleave_under, interleave_over and random, concat is taken"
            )
        c.carried -= {"train_dataset_prob"}
        c.without_counterpart("train_dataset_prob", "concat reads each data set once an epoch")
        return {"use": "mixture", "sources": sections}
    weighed = [{**each, "weight": source.probability} for each, source in zip(sections, sources, strict=True)]
    mixture: Section = {"use": "mixture", "sources": weighed}
    if strategy == "random" and c.values.get("max_steps") in (None, -1):
        mixture["samples"] = int(number(c, "num_samples_each_epoch", 6e6, 1))
    c.without_counterpart(
        "num_samples_each_epoch", "max_steps ends the training, and the order does not depend on it"
    )
    if _ORDERS[strategy]:
        mixture["epoch"] = _ORDERS[strategy]
    c.differ("Weights are exact after any number of samples; theirs are probabilities.")
    if section.get("packing", True):
        c.differ("Weights count windows; theirs texts, before they are packed.")
    return mixture


def _with_tests(
    c: Configuration, sections: list[Section], sources: list[_Source], tests: list[_Source] | None
) -> list[Section]:
    """The sections with a held-out data set of the same form each, as far as there are some; others hold nothing
    out."""
    if tests == []:
        c.fill(
            "dataset.test",
            "theirs evaluates a data set that the file does not name; held_out is a share of the training's",
        )
        return sections
    rest = list(tests or ())
    with_tests = []
    for section, source in zip(sections, sources, strict=True):
        test = next((each for each in rest if each.form == source.form), None)
        if test is not None:
            rest.remove(test)
        with_tests.append({**section, **({"held_out": 0.0} if test is None else {"test": test.path})})
    if rest:
        c.lose_key("eval_dataset_path", f"a data set has one test of its form, so {rest[0].path} is not read")
    return with_tests


def _in_folder(c: Configuration, name: str, evaluates: bool) -> Section:
    """The files of PaddleNLP's folder: train.json and dev.json, or folders train and dev."""
    folder = Path(name).expanduser()
    has_folders = (folder / "train").is_dir() or (folder / "dev").is_dir()
    ends = ("train", "dev") if has_folders else ("train.json", "dev.json")
    if not folder.is_dir():
        c.differ(
            f"{name} is not here: train.json and dev.json in it are read; of folders train and dev, name these "
            "(dataset.path, dataset.test)."
        )
    held_out: Section = {"test": f"{name.rstrip('/')}/{ends[1]}"} if evaluates else {"held_out": 0.0}
    return {"path": f"{name.rstrip('/')}/{ends[0]}", **held_out}


def _longer(c: Configuration) -> Section:
    strategy = choice(c.take("truncation_strategy", "delete"))
    if strategy not in ("delete", "right"):
        reason = "of longer conversations the beginning is read (right), or nothing (delete)"
        c.lose_key("truncation_strategy", reason)
    return {"longer": "leave_out"} if strategy == "delete" else {}


def _template(c: Configuration, is_formers: bool) -> None:
    if not is_formers:
        c.differ(
            "A conversation is written by the tokenizer's chat_template (in Jinja), or as ChatML; theirs by "
            "chat_template.json, or without one as src and tgt alone."
        )
    elif c.values.get("template_backend") == "jinja":
        c.take("template_backend")
        c.without_counterpart("template", "the tokenizer's chat_template writes the text, there, too")
    elif c.values.get("template"):
        c.lose_key("template", "the tokenizer's chat_template writes the text; theirs its own of this name")
    else:
        c.differ("A conversation is written by the tokenizer's chat_template, or as ChatML.")
