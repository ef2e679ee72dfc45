"""Presents a source's weights under a model's names, where the source renames, transposes or splits them.

The naming convention of the source is detected: the model's, PyTorch's, or one of published weights. The model lists the
names of published weights as plain data (`PublishedNames`), which describe each tensor's origin:

| description                            | origin                                                                  |
|----------------------------------------|-------------------------------------------------------------------------|
| `"a.weight"`                           | that tensor                                                             |
| `"a.weight.T"`                         | the same, transposed: PyTorch's Linear is [outputs, inputs]             |
| `"a.weight[0]"`                        | the same, without its first dim, which is 1                             |
| `(("q.weight.T", "k.weight.T", "v.weight.T"), 16)` | the three joined along the last dim, head by head of width 16: [q, k, v] of one head together |
| `(("qkv.weight",), 16)`                | likewise, if one tensor has all of q, then all of k, then all of v      |
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paddle_dp.checkpoint.shards import Dims
from paddle_dp.checkpoint.source import Opened, fits
from paddle_dp.checkpoint.tensors import WeightSource, box_at
from paddle_dp.errors import UsageError, did_you_mean, similar

if TYPE_CHECKING:
    from paddle import nn

NameSpec = str | tuple[tuple[str, ...], int]
Names = Mapping[str, NameSpec]
PYTORCH, HUGGING_FACE = "PyTorch's", "Hugging Face's"
INNER = "Hugging Face's, of the model without its head"
PADDLE_NLP, PADDLE_NLP_INNER = "PaddleNLP's", "PaddleNLP's, of the model without its head"
PADDLE_FORMERS, PADDLE_FORMERS_INNER = "PaddleFormers'", "PaddleFormers', of the model without its head"
_IN_PADDLE = (
    (PADDLE_NLP, PADDLE_NLP_INNER, "paddle_nlp"),
    (PADDLE_FORMERS, PADDLE_FORMERS_INNER, "paddle_formers"),
)  # a convention, the inner model's, and the model's attribute with its patterns
# Their Linear is [inputs, outputs].
PADDLE_CONVENTIONS = ("", PADDLE_NLP, PADDLE_NLP_INNER, PADDLE_FORMERS, PADDLE_FORMERS_INNER)
# PaddleNLP's names of weights with a layout that no table here describes, and a description of each. Of one name there
# are several layouts: q, k and v one after another, or group by group of heads.
UNKNOWN = {
    "*.self_attn.qkv_proj.*": "q, k and v fused (fuse_attention_qkv; ERNIE 4.5 of ERNIEKit)",
    "*.mlp.gate_up_fused_proj.*": "two products fused (fuse_attention_ffn)",
    "*.mlp.up_gate_proj.*": "two products fused (ERNIE 4.5 of ERNIEKit)",
}
OTHER_MODELS = {
    "gpt.decoder.*": "of a GPT: model {use: gpt} has its names",
    "ernie.encoder.layers.*": "of an ERNIE: model {use: bert, family: ernie} has its names",
    "bert.encoder.layers.*": "of a BERT: model {use: bert} has its names",
}


@dataclass(frozen=True)
class Piece:
    """A tensor of a source, and how to transform it."""

    name: str
    transposed: bool = False
    first: bool = False  # drops the first dim, of length 1

    @staticmethod
    def parse(spec: str) -> Piece:
        if spec.endswith(".T"):
            return Piece(spec.removesuffix(".T"), transposed=True)
        return Piece(spec.removesuffix("[0]"), first=spec.endswith("[0]"))

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shape = source.shape(self.name)
        if self.first and shape[:1] != (1,):
            return shape  # a misfit, which the caller reports
        return shape[::-1] if self.transposed else shape[1:] if self.first else shape

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.transposed:
            return np.ascontiguousarray(source.read(self.name, offset[::-1], shape[::-1]).T)
        if self.first:
            return source.read(self.name, (0, *offset), (1, *shape))[0]
        return source.read(self.name, offset, shape)

    def written(self, array: np.ndarray) -> np.ndarray:
        """Converts the model's whole tensor to the source's form."""
        return np.ascontiguousarray(array.T) if self.transposed else array[None] if self.first else array


@dataclass(frozen=True)
class Origin:
    """The pieces of a model's tensor. With `head_width`, q, k and v are joined head by head."""

    pieces: tuple[Piece, ...]
    head_width: int | None = None

    @staticmethod
    def parse(spec: NameSpec) -> Origin:
        if isinstance(spec, str):
            return Origin((Piece.parse(spec),))
        names, head_width = spec
        if len(names) not in (1, 3):
            raise UsageError(
                f"names_of of the model joins {len(names)} tensors, {' + '.join(names)}: with a head width it names "
                "three (q, k and v), or one with all of them."
            )
        return Origin(tuple(map(Piece.parse, names)), head_width)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        shapes = [piece.shape(source) for piece in self.pieces]
        if len(shapes) == 1 or len(set(shapes)) > 1:  # unequal shapes do not fit; the caller reports them
            return shapes[0]
        return (*shapes[0][:-1], 3 * shapes[0][-1])

    def read(self, source: WeightSource, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if self.head_width is None:
            return self.pieces[0].read(source, offset, shape)
        width, (*above, start), (*sizes, columns) = self.head_width, offset, shape
        # The heads that the box overlaps.
        heads = range(start // (3 * width), -(-(start + columns) // (3 * width)))
        third = self.shape(source)[-1] // 3
        each = self.pieces if len(self.pieces) == 3 else self.pieces * 3
        shifts = (0, 0, 0) if len(self.pieces) == 3 else (0, third, 2 * third)
        arrays = [
            piece.read(source, (*above, heads.start * width + shift), (*sizes, len(heads) * width))
            for piece, shift in zip(each, shifts, strict=True)
        ]
        joined = np.stack([array.reshape(*sizes, len(heads), width) for array in arrays], axis=-2)
        at = start - heads.start * 3 * width
        return np.ascontiguousarray(joined.reshape(*sizes, -1)[..., at : at + columns])

    def written(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Converts the model's whole tensor to the source's tensors, by name."""
        if self.head_width is None:
            return {self.pieces[0].name: self.pieces[0].written(array)}
        above = array.shape[:-1]
        split = array.reshape(*above, -1, 3, self.head_width)
        arrays = [split[..., number, :].reshape(*above, -1) for number in range(3)]
        if len(self.pieces) == 1:
            arrays = [np.concatenate(arrays, axis=-1)]
        return {
            piece.name: piece.written(np.ascontiguousarray(joined))
            for piece, joined in zip(self.pieces, arrays, strict=True)
        }


class Translated:
    """`source` under a model's names. Tensors that no complete origin uses keep their names.

    `passed_over`: names of the source that the model does not use; `copies`: the ones that repeat a tied weight.
    """

    def __init__(
        self,
        source: WeightSource,
        origins: Mapping[str, Origin],
        passed_over: Sequence[str] = (),
        copies: Sequence[str] = (),
    ):
        self._source, self.folder, self.passed_over = source, source.folder, tuple(passed_over)
        self._copies = tuple(copies)
        there = set(source.names)
        self._origins = {name: o for name, o in origins.items() if there.issuperset(o.names)}
        used = {name for origin in self._origins.values() for name in origin.names}
        for name in sorted(there - used - set(passed_over)):
            self._origins.setdefault(name, Origin((Piece(name),)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._origins))

    def tie(self, groups: Iterable[Sequence[str]]) -> None:
        """Gives a name that the source lacks the origin of another name of the same weight: files of tied weights often
        have one of them. `groups`: the names of each tied weight."""
        for names in groups:
            if there := [name for name in names if name in self._origins]:
                self._origins |= {name: self._origins[there[0]] for name in names if name not in there}

    def refuse_untied(
        self, names: Sequence[str], offset: Sequence[int], shape: Sequence[int], copies: bool
    ) -> None:
        """Raises UsageError if the source has different numbers for `names`, all of one weight of the model, in the box
        at `offset`; with `copies`, also for the tensors that repeat it."""
        origins = {self._origins[name]: self.called(name) for name in names}
        for copy in self._copies if copies else ():
            pieces = (Piece(copy), Piece(copy, transposed=True))
            fitting = [piece for piece in pieces if piece.shape(self._source) == self.shape(names[0])]
            origins |= {Origin((piece,)): copy for piece in fitting[:1]}
        if len(origins) == 1:
            return
        (first, called), *repeats = origins.items()
        array = first.read(self._source, offset, shape)
        floating = array.dtype.kind == "f"  # NaN in both is no difference
        for origin, other in repeats:
            if not np.array_equal(array, origin.read(self._source, offset, shape), equal_nan=floating):
                raise UsageError(
                    f"load.path {self.folder}: {called} and {other} differ there, and are one weight, {names[0]}, in "
                    "this model. Give the model two (model.tied=false), or name the tensors to load with load.only."
                )

    def called(self, name: str) -> str:
        """A tensor's names in the source, joined by " + "."""
        inner = self._source.called if isinstance(self._source, Translated) else str
        return " + ".join(map(inner, self._origins[name].names))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._origins[name].shape(self._source)

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._origins[name].names[0])

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        box = box_at(self, name, offset, shape)
        return self._origins[name].read(self._source, box.offset, box.shape)


def origins_of(names: Names) -> dict[str, Origin]:
    """Parses the table that a model gives."""
    return {name: Origin.parse(spec) for name, spec in names.items()}


@runtime_checkable
class PublishedNames(Protocol):
    """A model that knows the names of its tensors in Hugging Face's transformers.

    It may have more tables, of patterns: `hugging_face_versions` maps the names of another version of transformers to
    `hugging_face`'s; `paddle_nlp` and `paddle_formers` map transformers' names to PaddleNLP's and PaddleFormers's, or
    to three names for one tensor with all of q, k and v. A tensor that `hugging_face` transposes is not transposed
    there, unless its name ends in .T.
    """

    def hugging_face(self) -> Names:
        """Our names → theirs. The key "" holds patterns of their tensors that this model does not use; one
        without a star is a copy of a tied weight, if it has its shape."""
        ...


@dataclass(frozen=True)
class Tables:
    """A model's tensor names: convention → ours → theirs; the convention "" is the model's. `passed_over`: convention →
    patterns of their tensors that this model does not use. `versions`: the model's `hugging_face_versions`. `tied`: the
    names of each weight that has several. `shapes`: of the model's tensors."""

    names: Mapping[str, Names]
    passed_over: Mapping[str, Sequence[str]]
    versions: Mapping[str, str]
    tied: Sequence[Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]

    def current_names(self, convention: str, names: Mapping[str, str]) -> dict[str, str]:
        """Replaces the keys of `names` that another version wrote by the table's names; the values stay."""
        versions = self.versions if convention in (HUGGING_FACE, INNER) else {}
        return {_first(name, versions)[0]: old for name, old in names.items()}


def names_of(model: nn.Layer) -> Tables:
    """All known naming tables of a model that is not placed yet."""
    tables: dict[str, Names] = {"": {name: name for name in model.state_dict()}, PYTORCH: torch_names(model)}
    passed_over: dict[str, Sequence[str]] = {PYTORCH: ("num_batches_tracked", "*.num_batches_tracked")}

    def add(convention: str, inner: str, table: Names, unused: Sequence[str]) -> None:
        tables.update({convention: table, inner: _without_prefix(table)})
        passed_over.update({convention: unused, inner: unused})

    if isinstance(model, PublishedNames):
        published = dict(model.hugging_face())
        unused = [str(pattern) for pattern in published.pop("", ())]
        add(HUGGING_FACE, INNER, published, unused)
        for convention, inner, attribute in _IN_PADDLE:
            patterns = getattr(model, attribute, None)
            if patterns is not None:
                theirs = [called.removesuffix(".T") for name in unused for called in _called(name, patterns)]
                add(convention, inner, _in_paddle(published, patterns), [*unused, *theirs])
    versions = dict(getattr(model, "hugging_face_versions", {}))
    names, shapes = defaultdict[int, list[str]](list), {}
    for name, tensor in model.state_dict().items():
        names[id(tensor)].append(name)
        shapes[name] = tuple(tensor.shape)
    tied = [group for group in names.values() if len(group) > 1]
    return Tables(tables, passed_over, versions, tied, shapes)


def translated(
    source: Opened, tables: Tables, rename: Mapping[str, str], only: Sequence[str] = ()
) -> tuple[Translated, str]:
    """The source under a model's names, and its naming convention: "" or words for the screen.

    `rename`: patterns of the source's names → new names. Of the writing framework's conventions, the one that matches
    most tensors by name, and of those by shape, is chosen; the model's names win a tie. Raises UsageError for a pattern
    that matches nothing or gives two tensors one name, for PaddleNLP's weights with an unknown layout, and for a Linear
    that fits as it is and transposed, if nothing says which framework wrote it and one of the patterns `only` (`()` is
    every name) selects it.
    """
    names = renamed(source.names, rename)
    plain, fitting = dict[str, Translated](), dict[str, dict[str, Origin]]()
    scores = dict[str, tuple[int, int]]()
    for convention, table in tables.names.items():
        if source.from_torch in (None, convention not in PADDLE_CONVENTIONS):
            there = tables.current_names(convention, names)
            plain[convention] = Translated(source, {new: Origin((Piece(old),)) for new, old in there.items()})
            origins = {n: o for n, o in origins_of(table).items() if there.keys() >= {*o.names}}
            shapes = {name: origin.shape(plain[convention]) for name, origin in origins.items()}
            fitting[convention] = {n: o for n, o in origins.items() if shapes[n] == tables.shapes.get(n)}
            scores[convention] = len(origins), len(fitting[convention])
    convention = max(scores, key=lambda each: scores[each])
    for rival in (each for each in scores if scores[each] == scores[convention]):
        _refuse_ambiguous(fitting[convention], fitting[rival], source, only)
    _refuse_unknown(plain[convention].names, tables.names[convention], source.from_torch)
    patterns = tables.passed_over.get(convention, ())
    unused = [name for name in plain[convention].names if any(fnmatchcase(name, p) for p in patterns)]
    copies = [name for name in unused if name in patterns]
    weights = Translated(plain[convention], origins_of(tables.names[convention]), unused, copies)
    weights.tie(tables.tied)
    return weights, convention


def _refuse_unknown(there: Iterable[str], table: Names, from_torch: bool | None) -> None:
    """Raises UsageError for names of `UNKNOWN` that the table lacks, and of `OTHER_MODELS` if it has none of theirs."""
    known = {name for origin in origins_of(table).values() for name in origin.names}
    foreign = {p: kind for p, kind in OTHER_MODELS.items() if not any(fnmatchcase(name, p) for name in known)}
    for name in there if not from_torch else ():
        for pattern, kind in UNKNOWN.items():
            if name not in known and fnmatchcase(name, pattern):
                raise UsageError(
                    f"load: {name} is PaddleNLP's, of {kind}, whose layout is not known here; known are its Llama, "
                    "GPT, BERT and ERNIE, not fused. Save the model with transformers' names and load that, or rename "
                    "the tensors that fit with load.rename, and select only these with load.only."
                )
        for pattern, kind in foreign.items():
            if fnmatchcase(name, pattern):
                raise UsageError(f"load: {name} is PaddleNLP's, {kind}.")


def _refuse_ambiguous(
    fitting: Mapping[str, Origin], rival: Mapping[str, Origin], source: Opened, only: Sequence[str]
) -> None:
    """Raises UsageError for a selected tensor that fits by both conventions, and is transposed by one of them."""
    selected = {name for name in fitting if not only or any(fits(name, pattern) for pattern in only)}
    for name in sorted(selected & rival.keys()):
        ours, theirs = ([p.transposed for p in origins[name].pieces] for origins in (fitting, rival))
        if ours != theirs:
            raise UsageError(
                f"load.path {source.folder}: nothing there says whether PyTorch or Paddle wrote it, and {name} is "
                "square: PyTorch's Linear is the transposed one of Paddle's. Write the file anew with safetensors' "
                'save_file(…, metadata={"format": "pt"}), or "pd" for weights of Paddle; paddle-dp merge does so.'
            )


def torch_names(model: nn.Layer) -> dict[str, str]:
    """The names and forms in PyTorch of this model's tensors: Linear is transposed, and BatchNorm's statistics have
    other names."""
    from paddle import nn

    table = {name: name for name in model.state_dict()}
    # A layer that has several names has these under each.
    for prefix, layer in model.named_sublayers(include_self=True, remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        if isinstance(layer, nn.Linear):
            table[f"{dot}weight"] = f"{dot}weight.T"
        for ours, torch_name in (("_mean", "running_mean"), ("_variance", "running_var")):
            if f"{dot}{ours}" in table:
                table[f"{dot}{ours}"] = f"{dot}{torch_name}"
    return table


def _in_paddle(published: Names, patterns: Mapping[str, str | tuple[str, ...]]) -> Names:
    """The same table with PaddleNLP's or PaddleFormers' names."""

    def called(*pieces: str) -> tuple[str, ...]:
        return tuple(name for piece in pieces for name in _called(piece.removesuffix(".T"), patterns))

    return {
        ours: called(origin)[0] if isinstance(origin, str) else (called(*origin[0]), origin[1])
        for ours, origin in published.items()
    }


def _called(name: str, patterns: Mapping[str, str | tuple[str, ...]]) -> tuple[str, ...]:
    """The new names by the first pattern that fits; the old one if none fits."""
    for pattern, new in patterns.items():
        if _stars(name, pattern) is not None:
            return tuple(
                _first(name, {pattern: each})[0] for each in ((new,) if isinstance(new, str) else new)
            )
    return (name,)


def _without_prefix(table: Names) -> Names:
    """The same table for the inner model, saved without its head: GPT2Model's names lack "transformer."."""
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
    match = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if match is None else [*match.groups()]
