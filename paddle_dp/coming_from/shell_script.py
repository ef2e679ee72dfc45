"""The commands of a shell script, with the values of its variables.

Nothing is run. A value that depends on a run, on the environment or on a condition stays in the text as it is, as
`Unresolved`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.errors import UsageError

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
_REDIRECTION = re.compile(r"(?:\d*(?:<<<|<<-?|<>|<&|<(?!\()|>>|>&|>\||>(?!\())|&>>?)")
_OPERATOR = re.compile(r"\n|;;&?|;&|&&|\|\||\|&|[;&|()]")
_LETTERS = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_INSIDE = re.compile(r"[^\"\\$`]+")  # double quotes
_SINGLE = re.compile(r"'[^']*'")
_BACKTICKS = re.compile(r"`(?:\\.|[^`\\])*`", re.S)
_BRACKET = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|[(){}]", re.S)
_PARAMETER = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])?")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)-([^}$`]*))?\})")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=|\[.*)(.*)", re.S)
_OPENING = {"if": "fi", "case": "esac", "{": "}"} | dict.fromkeys(("for", "select", "while", "until"), "done")
_PASSED = ("then", "else", "elif", "do", "!", "time", "function")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_SETTERS = ("read", "let", "unset", "mapfile", "readarray", "getopts", "printf")
_SOURCES = ("eval", "source", ".")
_LONGEST = 1 << 16  # characters of a value with its variables


class Unresolved(str):
    """A word with a part that only a run knows, such as `$X` or `$(date)`. `may_split`: whether the shell may make
    several words of it, or none. `line`: of the script."""

    may_split = False
    line = 0

    def segment(self, text: str) -> Unresolved:
        """A part of the word, on the same line."""
        segment = Unresolved(text)
        segment.line = self.line
        return segment


@dataclass(frozen=True)
class _Fragment:
    text: str
    is_quoted: bool = False
    is_expansion: bool = False


_Token = list[_Fragment]
_Values = dict[str, str | list[str] | None]


@dataclass
class _Command:
    """`is_certain`: whether it runs exactly once, in the script's shell."""

    tokens: list[_Token]
    line: int
    is_certain: bool


def commands(file: Path, text: str) -> Iterator[list[str]]:
    """The words of each command. A text that begins with an option is one command.

    Raises UsageError for an open quote, a command that begins with an option, and a value that is too long."""
    is_single = text.lstrip().startswith("--")
    parsed = _parsed(file, text, is_single)
    times = Counter(name for command in parsed for name, _ in _assignments(command))
    values: _Values = {}
    for command in parsed:
        first = _plain(command.tokens[0])
        for name, token in _assignments(command):
            values[name] = _value(file, token, values, command.line) if token and times[name] == 1 else None
        if first in _SOURCES:
            values = dict.fromkeys(values)
        if first.startswith("--") and not is_single:
            start = " ".join(map(_plain, command.tokens))[:60]
            raise UsageError(
                f"{file}: the line {start} begins with an option: the command before it has ended, by a comment or "
                "without a \\ at its end"
            )
        rest = command.tokens if first not in (*_DECLARATIONS, *_SETTERS) else []
        while rest and _ASSIGNED.fullmatch(_plain(rest[0])):
            rest = rest[1:]
        if tokens := [field for token in rest for field in _fields(token, values, command.line)]:
            yield tokens


def _parsed(file: Path, text: str, is_single: bool) -> list[_Command]:
    """The commands. A word that opens a block, such as `if`, is no part of one."""
    parsed: list[_Command] = []
    blocks: list[str] = []  # the word that closes each open block
    tokens: list[_Token] = []
    before, line = "\n", 1
    for item, number in _Lexer(file, text).items(is_single):
        if not isinstance(item, str):
            line = line if tokens else number
            tokens.append(item)
            continue
        tokens = _without_blocks(tokens, blocks)
        if blocks[-2:] == [")", ")"]:
            tokens = [[_Fragment("let")], *tokens]
        if tokens:
            is_joined = before in ("&&", "||", "|", "|&") or item in ("|", "|&", "&")
            parsed.append(_Command(tokens, line, not (is_joined or blocks)))
        if item == "(":
            blocks.append(")")
        elif item == ")" and blocks[-1:] == [")"]:
            blocks.pop()
        before, tokens = item, []
    return parsed


def _without_blocks(tokens: list[_Token], blocks: list[str]) -> list[_Token]:
    """The command after the words that open and close blocks; `blocks` has the closing word of each open one."""
    start = 0
    while start < len(tokens):
        first = _plain(tokens[start])
        if first not in (*_OPENING, *_PASSED, *blocks[-1:]):
            break
        if first in _OPENING:
            blocks.append(_OPENING[first])
        elif first in blocks[-1:]:
            blocks.pop()
        start += 1 + (first == "function")
        if first in ("for", "select") and start < len(tokens):  # the variable of a loop has many values
            tokens, start = [[_Fragment("read")], tokens[start]], 0
    return tokens[start:]


def _plain(token: _Token) -> str:
    return "".join(fragment.text for fragment in token)


def _assignments(command: _Command) -> Iterator[tuple[str, _Token | None]]:
    """The variables that a command sets, each with its value, or with None if that is not certain."""
    tokens = [_plain(token) for token in command.tokens]
    if tokens[0] in _SETTERS:
        for name in re.findall(r"[A-Za-z_]\w*", " ".join(tokens[1:])):
            yield name, None
        return
    is_declared = tokens[0] in _DECLARATIONS
    flags = [token for token in tokens[1:] if token.startswith("-")] if is_declared else []
    pairs = [
        (match, token)
        for text, token in zip(tokens, command.tokens, strict=True)
        if (match := _ASSIGNED.fullmatch(text))
    ]
    if not is_declared and len(pairs) < len(tokens):
        return  # of this command's environment
    for match, token in pairs:
        is_certain = command.is_certain and match[2] == "=" and not set("".join(flags)) - set("-xrg")
        start = token[0].text.partition("=")[2]
        yield match[1], [_Fragment(start), *token[1:]] if is_certain else None


def _value(file: Path, token: _Token, values: _Values, line: int) -> str | list[str] | None:
    """The text or the array that is assigned."""
    if len(token) == 2 and token[1].text.startswith("(") and not token[1].is_quoted:
        array = [
            field
            for item, _ in _Lexer(file, token[1].text[1:-1]).items(True)
            if not isinstance(item, str)
            for field in _fields(item, values, line)
        ]
        return None if any(isinstance(each, Unresolved) for each in array) else array
    quoted = [_Fragment(fragment.text, True, fragment.is_expansion) for fragment in token]
    texts = _fields(quoted, values, line)
    if any(isinstance(each, Unresolved) for each in texts):
        return None
    if len(text := " ".join(texts)) > _LONGEST:
        raise UsageError(f"{file}: A value is longer than {_LONGEST} letters: {text[:80]}")
    return text


def _fields(token: _Token, values: _Values, line: int) -> list[str]:
    """The words that the shell makes of one: an unquoted variable is split at spaces."""
    fields, text, is_open, is_resolved = list[str](), "", False, True
    for fragment in token:
        value = _expanded(fragment.text, values) if fragment.is_expansion else fragment.text
        if value is None:
            text, is_open, is_resolved = text + fragment.text, True, False
        elif isinstance(value, list) or (fragment.is_expansion and not fragment.is_quoted):
            ended = value if isinstance(value, list) else re.split(r"[ \t\n]+", value)
            for each in ended[:-1]:
                if text + each or is_open:
                    fields.append(text + each)
                text, is_open = "", False
            text += ended[-1] if ended else ""
        else:
            text, is_open = text + value, is_open or fragment.is_quoted
    if text or is_open:
        fields.append(text)
    if is_resolved:
        return fields
    source = Unresolved(_plain(token))
    is_list = re.search(r"\$[@*]|\[[@*]\]", source) is not None
    source.may_split = is_list or (len(token) == 1 and not token[0].is_quoted)
    source.line = line
    return [source]


def _expanded(text: str, values: _Values) -> str | list[str] | None:
    """The value of `$X`, `${X:-default}` or `${X[@]}`; None if a run alone knows it."""
    if text.startswith("`") and text[1:].lstrip().startswith("#") and "\n" not in text:
        return ""  # a comment between the options
    if array := _ARRAY.fullmatch(text):
        known = values.get(array[1])
        return known if isinstance(known, list) else None
    variable = _VARIABLE.fullmatch(text)
    if variable is None:
        return None
    name = variable[1] or variable[2]
    value = values.get(name, variable[4])
    if value == "" and variable[3]:
        return variable[4]
    return value if isinstance(value, str) else None


class _Lexer:
    """Takes a script apart into words and operators, with their lines. Redirections are left out, each with its one
    word, and texts of `<<`."""

    def __init__(self, file: Path, text: str):
        self.file, self.text, self.at = file, text, 0

    def items(self, is_single: bool) -> Iterator[tuple[_Token | str, int]]:
        """`is_single`: whether a new line does not end the command."""
        ends: list[str] = []  # the last lines of texts of <<
        line, counted = 1, 0
        while self.at < len(self.text):
            line, counted = line + self.text.count("\n", counted, self.at), self.at
            if not self._passes(_BLANK):
                if match := self._passes(_REDIRECTION):
                    self._passes(_BLANK)
                    token = _plain(self._token())
                    ends += [token] if match in ("<<", "<<-") else []
                elif match := self._passes(_OPERATOR):
                    while match == "\n" and ends:
                        here, _, rest = self.text[self.at :].partition("\n")
                        self.at = len(self.text) - len(rest)
                        ends = ends[1:] if here.strip() == ends[0] or not rest else ends
                    if match != "\n" or not is_single:
                        yield match, line
                else:
                    yield self._token(), line
        yield "\n", 0

    def _passes(self, pattern: re.Pattern[str]) -> str:
        """Moves past a pattern, if it is next, and returns it."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def _token(self) -> _Token:
        token: _Token = []
        start, is_quoted = self.at, False
        while self.at < len(self.text):
            letter, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            is_array = letter == "(" and self.text[self.at - 1 : self.at] == "=" and self.at > start
            if letter == '"':
                token.append(_Fragment("", True))
                self.at, is_quoted = self.at + 1, not is_quoted
            elif letter in "$`":
                token += self._expansion(is_quoted)
            elif letter == "\\" and (is_quoted or not _BLANK.match(self.text, self.at)):
                kept = following if not is_quoted or following in '"\\$`' else letter + following
                token.append(_Fragment("" if following == "\n" else kept, True))
                self.at += 2
            elif is_quoted:
                token.append(_Fragment(self._passes(_INSIDE), True))
            elif letter == "'":
                token.append(_Fragment(self._quotation(_SINGLE)[1:-1], True))
            elif is_array or (letter in "<>" and following == "("):
                end = self._closed(self.at + (letter != "("))
                token.append(_Fragment(self.text[self.at : end], is_expansion=not is_array))
                self.at = end
            elif not (letters := self._passes(_LETTERS)):
                break
            else:
                token.append(_Fragment(letters))
        if is_quoted or self.at == start:
            raise self._unreadable("No closing quotation" if is_quoted else "a redirection without a file")
        return token

    def _expansion(self, is_quoted: bool) -> _Token:
        start = self.at
        if self.text[start] == "`":
            self._quotation(_BACKTICKS)
        elif self.text.startswith(("$(", "${"), start):
            self.at = self._closed(start + 1)
        elif self._passes(_PARAMETER) == "$":
            # Alone it is a letter, and before a quote it marks escapes.
            is_mark = not is_quoted and self.text[self.at : self.at + 1] in ("'", '"')
            return [] if is_mark else [_Fragment("$", is_quoted)]
        return [_Fragment(self.text[start : self.at], is_quoted, True)]

    def _closed(self, start: int) -> int:
        """The position after the bracket that closes the one at `start`."""
        opening, closing = self.text[start], {"(": ")", "{": "}"}[self.text[start]]
        depth = 0
        for match in _BRACKET.finditer(self.text, start):
            depth += (match[0] == opening) - (match[0] == closing)
            if not depth:
                return match.end()
        raise self._unreadable(f"No closing {closing}")

    def _quotation(self, pattern: re.Pattern[str]) -> str:
        if match := self._passes(pattern):
            return match
        raise self._unreadable("No closing quotation")

    def _unreadable(self, why: str) -> UsageError:
        line = self.text.count("\n", 0, self.at) + 1
        return UsageError(f"{self.file}, line {line}: a command cannot be read: {why}")
