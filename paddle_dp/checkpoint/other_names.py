"""Detects the naming convention of a source's tensors: the model's, PyTorch's, or one of published weights.

The model lists the names of published weights as plain data (`PublishedNames`), in the format of
`checkpoint.translated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paddle_dp.checkpoint.source import Opened
from paddle_dp.checkpoint.translated import Names, Origin, Piece, Translated, origins_of
from paddle_dp.errors import UsageError, did_you_mean, similar

if TYPE_CHECKING:
    from paddle import nn

PYTORCH, HUGGING_FACE = "PyTorch's", "Hugging Face's"
INNER = "Hugging Face's, of the model without its head"
PADDLE_NLP, PADDLE_NLP_INNER = "PaddleNLP's", "PaddleNLP's, of the model without its head"
PADDLE_CONVENTIONS = ("", PADDLE_NLP, PADDLE_NLP_INNER)  # their Linear is [inputs, outputs]
# PaddleNLP's names of weights with a layout that no table here describes, and a description of each.
UNKNOWN = {
    "*.self_attn.qkv_proj.*": "q, k and v fused (fuse_attention_qkv)",
    "*.mlp.gate_up_fused_proj.*": "two products fused (fuse_attention_ffn)",
    "gpt.decoder.*": "a GPT",
    "ernie.*": "an ERNIE",
}


@runtime_checkable
class PublishedNames(Protocol):
    """A model that knows the names of its tensors in Hugging Face's transformers."""

    def hugging_face(self) -> Names:
        """Our names → theirs. The key "" holds patterns of their tensors that this model does not use."""
        ...


@runtime_checkable
class OtherVersions(Protocol):
    """A model with `PublishedNames` that maps patterns of another transformers version's names to the table's names."""

    hugging_face_versions: Mapping[str, str]


@runtime_checkable
class InPaddleNLP(Protocol):
    """A model with `PublishedNames` that maps patterns of transformers' names to PaddleNLP's names. A tensor that the
    table for transformers transposes is not transposed in PaddleNLP, unless its name here ends in .T."""

    paddle_nlp: Mapping[str, str]


@dataclass(frozen=True)
class Tables:
    """A model's tensor names: convention → ours → theirs; the convention "" is the model's. `passed_over`: convention →
    patterns of their tensors that this model does not use. `versions`: see `OtherVersions`."""

    names: Mapping[str, Names]
    passed_over: Mapping[str, Sequence[str]]
    versions: Mapping[str, str]

    def current_names(self, convention: str, names: Mapping[str, str]) -> dict[str, str]:
        """Replaces the keys of `names` that another version wrote by the table's names; the values stay."""
        versions = self.versions if convention in (HUGGING_FACE, INNER) else {}
        return {_first(name, versions)[0]: old for name, old in names.items()}


def names_of(model: nn.Layer) -> Tables:
    """All known naming tables of a model that is not placed yet."""
    tables: dict[str, Names] = {"": {name: name for name in model.state_dict()}, PYTORCH: torch_names(model)}
    passed_over: dict[str, Sequence[str]] = {PYTORCH: ("num_batches_tracked", "*.num_batches_tracked")}
    if isinstance(model, PublishedNames):
        published = dict(model.hugging_face())
        unused = [str(pattern) for pattern in published.pop("", ())]
        tables |= {HUGGING_FACE: published, INNER: _without_prefix(published)}
        passed_over |= {HUGGING_FACE: unused, INNER: unused}
        if isinstance(model, InPaddleNLP):
            ours = _in_paddle_nlp(published, model.paddle_nlp)
            tables |= {PADDLE_NLP: ours, PADDLE_NLP_INNER: _without_prefix(ours)}
            unused = [*unused, *(_first(name, model.paddle_nlp)[0].removesuffix(".T") for name in unused)]
            passed_over |= {PADDLE_NLP: unused, PADDLE_NLP_INNER: unused}
    versions = dict(model.hugging_face_versions) if isinstance(model, OtherVersions) else {}
    return Tables(tables, passed_over, versions)


def translated(source: Opened, tables: Tables, rename: Mapping[str, str]) -> tuple[Translated, str]:
    """The source under a model's names, and its naming convention: "" or words for the screen.

    `rename`: patterns of the source's names → new names. Of the writing framework's conventions, the one that matches
    most tensors is chosen; the model's names win a tie. Raises UsageError for a pattern that matches nothing or gives
    two tensors one name, and for PaddleNLP's weights with an unknown layout.
    """
    names = renamed(source.names, rename)
    usable = [
        convention
        for convention in tables.names
        if source.from_torch in (None, convention not in PADDLE_CONVENTIONS)
    ]
    convention = max(
        usable,
        key=lambda convention: _fits(tables.names[convention], set(tables.current_names(convention, names))),
    )
    there = tables.current_names(convention, names)
    _refuse_unknown(there, tables.names[convention], source.from_torch)
    plain = Translated(source, {new: Origin((Piece(old),)) for new, old in there.items()})
    patterns = tables.passed_over.get(convention, ())
    unused = sorted(name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns))
    return Translated(plain, origins_of(tables.names[convention]), unused), convention


def _refuse_unknown(there: Iterable[str], table: Names, from_torch: bool | None) -> None:
    """Raises UsageError for names of `UNKNOWN` that the table lacks."""
    known = {name for origin in origins_of(table).values() for name in origin.names}
    for name in there if not from_torch else ():
        for pattern, kind in UNKNOWN.items():
            if name not in known and fnmatchcase(name, pattern):
                raise UsageError(
                    f"load: {name} is PaddleNLP's, of {kind}, whose layout is not known here; known are its Llama and "
                    "BERT, not fused. Save the model with transformers' names and load that, or rename the tensors "
                    "that fit with load.rename, and select only these with load.only."
                )


def _fits(table: Names, there: set[str]) -> int:
    return sum(there.issuperset(origin.names) for origin in origins_of(table).values())


def torch_names(model: nn.Layer) -> dict[str, str]:
    """The names and forms in PyTorch of this model's tensors: Linear is transposed, and BatchNorm's statistics have
    other names."""
    from paddle import nn

    table = {name: name for name in model.state_dict()}
    for prefix, layer in model.named_sublayers(include_self=True):
        dot = f"{prefix}." if prefix else ""
        if isinstance(layer, nn.Linear):
            table[f"{dot}weight"] = f"{dot}weight.T"
        for ours, torch_name in (("_mean", "running_mean"), ("_variance", "running_var")):
            if f"{dot}{ours}" in table:
                table[f"{dot}{ours}"] = f"{dot}{torch_name}"
    return table


def _in_paddle_nlp(published: Names, patterns: Mapping[str, str]) -> Names:
    """The same table with PaddleNLP's names."""

    def called(piece: str) -> str:
        return _first(piece.removesuffix(".T"), patterns)[0]

    return {
        ours: called(origin) if isinstance(origin, str) else (tuple(map(called, origin[0])), origin[1])
        for ours, origin in published.items()
    }


def _without_prefix(table: Names) -> Names:
    """The same table for the inner model, saved without its head: GPT2Model's names lack «transformer.»."""
    firsts = Counter(name.partition(".")[0] for origin in origins_of(table).values() for name in origin.names)
    prefix = f"{firsts.most_common(1)[0][0]}."

    def cut(name: str) -> str:
        return name.removeprefix(prefix)

    return {
        ours: cut(origin) if isinstance(origin, str) else (tuple(map(cut, origin[0])), origin[1])
        for ours, origin in table.items()
    }


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Maps each tensor's new name to its old name. The first pattern that fits renames it; the text that its stars
    match replaces the stars of the new name. Raises UsageError for a pattern that matches nothing, or for two tensors
    with one name."""
    names, used, old_names = list(names), set[str](), dict[str, str]()
    for old in names:
        new, pattern = _first(old, rename)
        used.add(pattern)
        if new in old_names:
            raise UsageError(f"load.rename: {old_names[new]} and {old} would both be {new}.")
        old_names[new] = old
    for pattern in rename:
        if pattern not in used:
            hint = did_you_mean(pattern, names, "They are", similar)
            raise UsageError(
                f"load.rename: '{pattern}' matches no tensor there that is not renamed already.{hint}"
            )
    return old_names


def _first(name: str, rename: Mapping[str, str]) -> tuple[str, str]:
    """The new name by the first pattern that fits, and that pattern; the old name and "" if none fits."""
    for pattern, new_name in rename.items():
        if (stood := _stars(name, pattern)) is not None:
            segments = new_name.split("*")
            return "".join(a + b for a, b in zip(segments, [*stood, ""], strict=True)), pattern
    return name, ""


def _stars(name: str, pattern: str) -> list[str] | None:
    """The texts that a pattern's stars match in a name, each as short as possible; None if the pattern does not fit."""
    segments = pattern.split("*")
    if len(segments) == 1:
        return [] if name == pattern else None
    if not (name.startswith(segments[0]) and name.endswith(segments[-1])):
        return None
    rest, stood = name[len(segments[0]) :], []
    for segment in segments[1:-1]:
        at = rest.find(segment)
        if at < 0:
            return None
        stood.append(rest[:at])
        rest = rest[at + len(segment) :]
    if len(rest) < len(segments[-1]) or not rest.endswith(segments[-1]):
        return None
    return [*stood, rest[: len(rest) - len(segments[-1])]]
