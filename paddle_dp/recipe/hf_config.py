"""Implements `model: {use: llama, from: FOLDER}`: a Hugging Face folder provides sizes (config.json) and weights.

The model's Config translates the keys of config.json with a table (`PublishedSizes`), as plain data. A key that changes
the model's result and that our model does not support is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paddle_dp.errors import Mistake, RecipeError, UsageError
from paddle_dp.part import find, names
from paddle_dp.part.config import fields_of, show
from paddle_dp.recipe.yaml_document import YamlDocument

FILE, OLD_FILE = "config.json", "model_config.json"  # the second is PaddleNLP's, before 2.5
_OLD_CLASS = re.compile(r"(Bert|Ernie|GPT|Llama)(Model|For[A-Z]\w*|LMHeadModel)")
KEY = "from"
MEANING = "A Hugging Face folder, which provides sizes (config.json) and initial weights."
_LARGEST = 2**22  # bytes of a config.json
# Keys that do not change a model's result.
_HARMLESS = (
    "_*", "architectures", "transformers_version", "torch_dtype", "dtype", "name_or_path", "*_token_id", "use_cache",
    "initializer_range", "initializer_factor", "id2label.*", "label2id.*", "problem_type", "return_dict*", "output_*",
    "tokenizer_class", "task_specific_params.*", "chunk_size_feed_forward", "auto_map.*", "finetuning_task", "prefix",
    "gradient_checkpointing", "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "num_return_sequences", "length_penalty", "repetition_penalty", "diversity_penalty",
    "early_stopping", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "model_max_length",
    "is_llama_config", "transformers.js_config.*",
    # PaddleNLP's and PaddleFormers' keys for the same result by other means, or on other numbers of ranks.
    "paddle*_version", "*recompute*", "virtual_pp_degree", "pp_seg_method", "tensor_parallel_*", "sequence_parallel",
    "fuse_sequence_parallel_allreduce", "use_flash_attention*", "use_fused_*", "seq_length", "long_sequence_*",
    "immediate_clear_past_key_value", "use_last_token_for_generation",
)  # fmt: skip


@runtime_checkable
class PublishedSizes(Protocol):
    """A Config that translates Hugging Face's config.json. The table's entries:

    `sizes`: their key (nested ones with dots) → our field; `also`: a synonym → that key; `words`: our field → their
    value → ours; `must`: their key → the only values that ours supports, including "as KEY" and "KEY / KEY", and a
    list for values that are lists of these; `always`: our field → its value; `least`: our field → the minimum of
    theirs; `absent`: their key → its default, a text names another key; `computed`: their key → "KEY / KEY", written
    where our field is None; `switched`: a key of `sizes` → another key, without which it counts as 0; `needs`:
    required keys, because the defaults of theirs differ; `unused`: patterns of irrelevant keys; `architecture`: their
    class; `types`: model_type → entries that are added to these or replace them, of which the first that can express
    our Config is written.
    """

    hugging_face: Mapping[str, Any]


def expand(page: YamlDocument, home: Path) -> None:
    """Replaces `model.from` by the sizes in that folder, unless the recipe sets them, and by `load`, unless it has one:
    null, too, but not that of a file, such as a run's recipe.yaml, below an override's `from`. Adds unsupported keys to
    the page's mistakes."""
    model = page.values.get("model")
    if not isinstance(model, dict) or KEY not in model or not isinstance(model.get("use"), str):
        return
    try:
        kind = find("models", model["use"], home)
    except RecipeError:
        return  # reading the model reports it
    if KEY in fields_of(kind):
        return
    folder, key_path = model.pop(KEY), ("model", KEY)
    try:
        if not isinstance(folder, str) or not folder:
            raise _wrong(f"{show(folder)} is not the path of a folder")
        source = Path(folder).expanduser()
        settings = settings_of(read(source), kind, model["use"], home, file_in(source))
    except RecipeError as error:
        for mistake in error.mistakes:
            page.complain(key_path, mistake.message)
        return
    for name, value in settings.items():
        if name not in model:
            model[name] = value
            page.source_lines[("model", name)] = page.source_line(key_path)
    by_override = [page.source_line(path).startswith("override ") for path in (key_path, ("load",))]
    if "load" not in page.values or (page.values["load"] is None and by_override == [True, False]):
        page.values["load"] = {"path": folder}
        page.source_lines[("load",)] = page.source_line(key_path)


def file_in(folder: Path) -> str:
    """The name of the file with a folder's sizes: config.json, unless there is an old one of PaddleNLP's only."""
    return OLD_FILE if not (folder / FILE).is_file() and (folder / OLD_FILE).is_file() else FILE


def read(folder: Path, name: str | None = None, setting: str = f"model.{KEY}") -> dict[str, Any]:
    """The keys of a folder's config.json, or of another file of settings, nested ones with dots. Raises RecipeError,
    for the recipe's `setting`, if it cannot be read."""
    file, wrong = folder / (name := name or file_in(folder)), partial(_wrong, setting=setting)
    try:
        if file.stat().st_size > _LARGEST:
            raise wrong(f"{file} is no {name}: it is larger than {_LARGEST >> 20} MB")
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        there = "there is no such folder" if not folder.is_dir() else f"there is no {name} in it"
        raise wrong(f"{folder}: {there}") from None
    except OSError as error:
        raise wrong(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise wrong(f"{file} is not a group of settings")
    if name == OLD_FILE:
        content = _without_init_args(content)
    if isinstance(labels := content.get("id2label"), dict):
        content.setdefault("num_labels", len(labels))
    return dict(_flat(content, ""))


def _without_init_args(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an old file of PaddleNLP's as config.json has them.

    It holds the call that made a model: the class as `init_class`, arguments without a name in the list `init_args`, of
    which the inner model is a group like the whole file. The outer setting counts, as in PaddleNLP.
    """
    settings = {key: value for key, value in content.items() if key not in ("init_args", "init_class")}
    arguments = content.get("init_args") or []
    for argument in arguments if isinstance(arguments, list | tuple) else [arguments]:
        if not isinstance(argument, dict):
            raise _wrong(f"{OLD_FILE} has init_args {show(argument)}, which has no name: write config.json")
        settings = {**_without_init_args(argument), **settings}
    if isinstance(name := content.get("init_class"), str):
        known = _OLD_CLASS.fullmatch(name)
        settings |= {"architectures": [name], "model_type": known[1].lower() if known else name}
    return settings


def _flat(group: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def settings_of(
    there: Mapping[str, Any], kind: type[Any], use: str, home: Path | None, file: str = FILE
) -> dict[str, Any]:
    """The settings of our model from the keys of config.json, or of another `file`. Raises RecipeError with every key
    or value that ours does not support."""
    table = _table(kind)
    if table is None:
        having = ", ".join(n for n in names("models", home) if "." not in n and _table_of(n, home))
        raise _wrong(f"model {use} has no table of Hugging Face's sizes; those that have: {having}")
    values = _canonical(there, table.get("also", {}))
    wrong = list(_wrong_type(values, table, use, home))
    if not wrong:
        table = _typed_table(table, values.get("model_type"))
        wrong = list(wrong_keys(values, table, use))
    if wrong:
        raise RecipeError([Mistake(where="", message=f"model.{KEY}: {file} {problem}") for problem in wrong])
    settings: dict[str, Any] = {}
    switched = table.get("switched", {})
    for key, field in table["sizes"].items():
        if key in switched and not values.get(switched[key]):
            continue
        value = values[key] if key in values else table.get("absent", {}).get(key, ...)
        if isinstance(value, str) and value in table["sizes"] and key not in values:
            value = values.get(value, ...)
        if key in table.get("computed", {}) and value == _meant(table["computed"][key], values):
            value = None
        if value is not ...:
            words = table.get("words", {}).get(field)
            settings[field] = value if words is None else words.get(value)
        elif field in REQUIRED:
            raise _wrong(f"{file} has no {key}")
    settings |= (always := table.get("always", {}))
    return {
        field: value
        for field, value in settings.items()
        if field not in always or value != getattr(kind, field)
    }


REQUIRED = ("vocab", "width", "depth", "heads")


def model_types(use: str, home: Path | None = None) -> tuple[str, ...]:
    """The values of model_type that a model of ours reads; none without a table."""
    return tuple(_table_of(use, home).get("must", {}).get("model_type", ())) if "." not in use else ()


def has_table(kind: type[Any]) -> bool:
    """True if a model's Config translates Hugging Face's keys, so that a recipe may use `from`."""
    return _table(kind) is not None


def _typed_table(table: Mapping[str, Any], model_type: str | None) -> Mapping[str, Any]:
    """The table for a model_type of its `types`; without one, for the first."""
    types = table.get("types")
    if not types:
        return table
    name = model_type or next(iter(types))
    entries = {**types[name], "must": {**types[name].get("must", {}), "model_type": (name,)}}
    return dict(table) | {
        entry: {**table.get(entry, {}), **value} if isinstance(value, dict) else value
        for entry, value in entries.items()
    }


def _table_of(name: str, home: Path | None) -> Mapping[str, Any]:
    """The table of a model by name; empty without one."""
    try:
        return _table(find("models", name, home)) or {}
    except RecipeError:
        return {}


def _table(config: Any) -> Mapping[str, Any] | None:
    """The table of a Config or of its class; None without one."""
    return config.hugging_face if isinstance(config, PublishedSizes) else None


def _canonical(there: Mapping[str, Any], also: Mapping[str, str]) -> dict[str, Any]:
    """Replaces synonyms by the table's keys; among synonyms, the first value other than null counts."""
    canonical: dict[str, Any] = {}
    for key, value in there.items():
        name = also.get(key, key)
        if name not in canonical or canonical[name] is None:
            canonical[name] = value
    return canonical


def _wrong_type(
    values: Mapping[str, Any], table: Mapping[str, Any], use: str, home: Path | None
) -> Iterator[str]:
    """Yields messages for a folder of another kind of model; its other keys are then not checked."""
    model_type, ours = values.get("model_type"), table.get("must", {}).get("model_type", ())
    if model_type is None or not ours:
        return
    if model_type not in ours:
        alternatives = [n for n in names("models", home) if model_type in model_types(n, home)]
        instead = f": use {' or '.join(alternatives)}" if alternatives else ""
        known = " and ".join(filter(None, (", ".join(map(show, ours[:-1])), show(ours[-1]))))
        yield f"has model_type {show(model_type)}, and {use} reads {known} only{instead}"
    for key in _typed_table(table, model_type).get("needs", ()) if model_type in ours else ():
        if key not in values:
            yield f"has no {key}, and a {model_type} has another default for it than {use}: write it there"


def wrong_keys(values: Mapping[str, Any], table: Mapping[str, Any], use: str) -> Iterator[str]:
    """Yields a message for each key that ours does not support."""
    sizes, must, always = table["sizes"], table.get("must", {}), table.get("always", {})
    switches = {switch for key, switch in table.get("switched", {}).items() if sizes[key] not in always}
    for key, value in values.items():
        if key in sizes:
            values_by_name = table.get("words", {}).get(sizes[key])
            if values_by_name is not None and value is not None and value not in values_by_name:
                yield f"has {key} {show(value)}: {use} has {', '.join(map(str, values_by_name))}"
        elif key in must:
            allowed = [_meant(option, values) for option in must[key]]
            if value is not None and not any(_is(value, option) for option in allowed):
                yield f"has {key} {show(value)}: {use} has {' or '.join(map(show, allowed))} only"
        elif value and not any(
            fnmatchcase(key, pattern) for pattern in (*_HARMLESS, *table.get("unused", ()), *switches)
        ):
            yield f"has {key} {show(value)}, which {use} does not know"


def _is(value: Any, option: Any) -> bool:
    """True if a value is an allowed one, or a list of the values in an allowed list."""
    if isinstance(option, list):
        return isinstance(value, list) and all(element in option for element in value)
    return bool(value == option)


def _meant(allowed: Any, values: Mapping[str, Any]) -> Any:
    """An allowed value: "as KEY" and "KEY / KEY" are computed from config.json."""
    if not isinstance(allowed, str):
        return allowed
    if allowed.startswith("as "):
        return values.get(allowed.removeprefix("as "))
    if " / " in allowed:
        above, below = (values.get(key) for key in allowed.split(" / "))
        if not above or not below:
            return None
        return above / below if above % below else above // below
    return allowed


def written(config: Any) -> dict[str, Any]:
    """The content of config.json for our Config. Raises UsageError if it has no table, or a value that theirs does not
    support."""
    general = _table(config)
    if general is None:
        raise UsageError(f"{type(config).__module__} has no table of Hugging Face's sizes")
    ours = vars(config)
    tables = [_typed_table(general, model_type) for model_type in general.get("types", ("",))]
    table = min(tables, key=lambda table: len(list(_inexpressible(ours, table))))
    if reasons := list(_inexpressible(ours, table)):
        raise UsageError("; ".join(reasons))
    flat: dict[str, Any] = {}
    for key, field in table["sizes"].items():
        if field in table.get("always", {}):
            continue
        labels, value = table.get("words", {}).get(field), ours[field]
        if value is None and key in table.get("computed", {}):
            value = _meant(table["computed"][key], flat)
        elif value is None and labels is None and table.get("absent", {}).get(key, ...) is not None:
            value = 4 * ours["width"]  # the default of `hidden`
        flat[key] = value if labels is None else {v: k for k, v in reversed(labels.items())}[value]
        if switch := table.get("switched", {}).get(key):
            flat[switch] = bool(value)
            if not value:
                del flat[key]
    must = {key: _meant(allowed[0], flat) for key, allowed in table.get("must", {}).items()}
    flat |= {key: value for key, value in must.items() if value is not None}
    if flat.get("rope_scaling.rope_type") == "default":
        flat = {key: value for key, value in flat.items() if not key.startswith("rope_scaling.")}
    return {"architectures": [table["architecture"]], "torch_dtype": "float32", **_nested(flat)}


def _inexpressible(ours: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each of our settings that their class does not have."""
    architecture, labels = table["architecture"], table.get("words", {})
    for field, value in table.get("always", {}).items():
        if ours[field] != value:
            yield f"model.{field} is {show(ours[field])}, and {architecture} has {show(value)} only"
    for field in labels.keys() - table.get("always", {}).keys():
        if ours[field] not in labels[field].values():
            allowed = " or ".join(map(show, labels[field].values()))
            yield f"model.{field} is {show(ours[field])}, and {architecture} has {allowed} only"
    for field, least in table.get("least", {}).items():
        if ours[field] < least:
            yield f"model.{field} is {ours[field]}, and {architecture} has {least} at least"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the groups that `_flat` took apart."""
    content: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, last = key.split(".")
        group = content
        for name in groups:
            group = group.setdefault(name, {})
        group[last] = value
    return content


def _wrong(message: str, setting: str = f"model.{KEY}") -> RecipeError:
    return RecipeError([Mistake(where="", message=f"{setting}: {message}")])
