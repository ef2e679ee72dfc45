"""Conversations as text: the lines of a .jsonl file, checked, and the template that writes them.

A template is Jinja, as in transformers' tokenizers (`chat_template`). It runs in Jinja's sandbox, without a clock, so
the text depends on the messages alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paddle_dp.datasets._paths import MissingDataError, needed_module
from paddle_dp.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
UNWRITTEN = ("tools", "functions", "images", "videos", "audios")
"""Fields of a line, except the messages, that no template is given."""
FURTHER = (*UNWRITTEN, "label", "system", "is_system", "context")
"""Fields of a line that decide with the messages about what is written and learned."""
Message = dict[str, Any]
Turn = tuple[int, int]
"""First and last character of an assistant's turn in a conversation's text, as a slice."""
_OTHER = "QvZjXwKq"  # a content that no template changes
_NO_JINJA = (
    "dataset.tokenizer: its chat_template is in Jinja, which needs a package: pip install 'paddle_dp[chat]'"
)


class WrongLineError(DataError):
    """A line is no conversation that can be learned from; the text is the reason, without the place."""


def conversation(line: bytes | dict[str, Any], field: str, answers: str | None = None) -> list[Message]:
    """The messages of one line of a .jsonl file, or of a row of a table. With `answers`, the field of the answers,
    `field` has the questions. Raises WrongLineError."""
    try:
        record = line if isinstance(line, dict) else json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WrongLineError(f"this line is not JSON: {error}. A .jsonl file has one object a line") from None
    fields = {field: "messages"} if answers is None else {field: "questions", answers: "answers"}
    for name, content in fields.items():
        if not isinstance(record, dict) or name not in record:
            names = (", ".join(record) or "no fields") if isinstance(record, dict) else type(record).__name__
            key = "answers" if name == answers else "field"
            pair = isinstance(record, dict) and answers is None and {"src", "tgt"} <= record.keys()
            hint = "dataset.field=src dataset.answers=tgt" if pair else f"dataset.{key}=…"
            raise WrongLineError(
                f"there is no field '{name}' with the {content}: it has {names}. Name the one that is: {hint}"
            )
    for key in UNWRITTEN:
        if record.get(key):
            raise WrongLineError(f"'{key}' are not written into the text: leave them out, or into a message")
    messages = record[field] if answers is None else _paired(record, field, answers)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise WrongLineError(f'\'{field}\' is no list of objects such as {{"role": "user", "content": "…"}}')
    for number, message in enumerate(messages, 1):
        _check_message(message, f"message {number}")
    if isinstance(label := record.get("label"), list) and all(each in (0, 1) for each in label):
        messages = _weighed(messages, label[record.get("is_system") == 1 and answers is not None :])
    if not any(map(is_learned, messages)):
        raise WrongLineError("there is no turn of the assistant to learn: remove the line")
    return messages


def _paired(record: dict[str, Any], field: str, answers: str) -> list[Message]:
    """The messages of questions and answers in two fields, each a text or a list of as many, as PaddleNLP has them in
    `src` and `tgt`. `system` stands before them; with `is_system` 1 the first question does, without its answer."""
    both = [[texts] if isinstance(texts := record[name], str) else texts for name in (field, answers)]
    for name, texts in zip((field, answers), both, strict=True):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise WrongLineError(f"'{name}' is no text, and no list of texts")
    questions, replies = both
    if len(questions) != len(replies):
        raise WrongLineError(
            f"'{field}' has {len(questions)} texts and '{answers}' {len(replies)}: each question needs an answer"
        )
    if record.get("context"):
        raise WrongLineError(
            "'context' is not written into the text: write it into system, or into a question"
        )
    system = record.get("system") or ""
    if record.get("is_system") == 1:
        system, questions, replies = (questions or [""])[0], questions[1:], replies[1:]
    pairs = zip(questions, replies, strict=True)
    turns = [("system", system)] if system else []
    turns += [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [{"role": role, "content": text} for role, text in turns]


def _weighed(messages: list[Message], label: list[int]) -> list[Message]:
    """The messages, with weight 0 for the answers whose number in `label` is 0."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) != len(label):
        raise WrongLineError(
            f"'label' has {len(label)} numbers, and there are {len(answers)} answers: give each 1 if it is learned, or "
            "0, or rename the field"
        )
    silent = {number for number, weight in zip(answers, label, strict=True) if not weight}
    return [{**message, "weight": 0} if n in silent else message for n, message in enumerate(messages)]


def is_learned(message: Message) -> bool:
    """Whether a turn's tokens are targets: the assistant's, but for those with weight 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _check_message(message: Message, label: str) -> None:
    role, content, weight = message.get("role"), message.get("content"), message.get("weight", 1)
    if role not in ROLES:
        has = f"the role {role!r}" if "role" in message else f"no role, but {', '.join(message) or 'nothing'}"
        raise WrongLineError(f"{label} has {has}: roles are {', '.join(ROLES)}")
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise WrongLineError(
                f"{label} has {key}, which are not written into the text: write them into content"
            )
    if not isinstance(content, str):
        raise WrongLineError(f"{label} has the content {_short(content)}, which is no text")
    if not content.strip():
        raise WrongLineError(f"{label} ({role}) is empty: remove it, or the line")
    if weight not in (0, 1):
        raise WrongLineError(f"{label} has the weight {_short(weight)}: 1 is learned, 0 is not")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise WrongLineError(
            f"{label} has half of a character, {content[error.start]!r}: remove it"
        ) from None


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) < 40 else type(value).__name__


class Template:
    """Writes a conversation as text. `name` is for messages; `marks`: texts that stand between turns, which no message
    may contain; `identity`: differs between templates that write other texts (JSON)."""

    def __init__(self, name: str, marks: Sequence[str], identity: object):
        self.name, self.identity = name, [name, list(marks), identity]
        self._mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"\Z")

    def text(self, messages: Sequence[Message], prompts: bool = False) -> str:
        """The text of the messages; with `prompts`, and the words that begin an answer. Raises WrongLineError."""
        raise NotImplementedError

    def write(self, messages: Sequence[Message]) -> tuple[str, list[Turn]]:
        """The text of a conversation, and in it the content of each turn that is learned, with the mark that ends the
        turn. Raises WrongLineError."""
        for number, message in enumerate(messages, 1):
            mark = self._mark.search(message["content"])
            if mark is not None and mark[0]:
                raise WrongLineError(
                    f"message {number} has {mark[0]!r}, which would be read as a mark between turns: remove it"
                )
        text = self.text(messages)
        learned = [n for n, message in enumerate(messages) if is_learned(message)]
        reasoning = messages[learned[-1]].get("reasoning_content") if learned else None
        if reasoning and str(reasoning).strip() not in text:
            raise WrongLineError(
                f"message {learned[-1] + 1} has reasoning_content, which {self.name} does not write: write it "
                "into content"
            )
        return text, [self._turn(text, messages, n) for n in learned]

    def _turn(self, text: str, messages: Sequence[Message], number: int) -> Turn:
        """The slice of `text` that is learned of message `number`: from where a prompt ends, for `generate` asks so, to
        the mark that ends the turn. The content is found by writing another one in its place."""
        other = {**messages[number], "content": _OTHER}
        before, *after = self.text([*messages[:number], other, *messages[number + 1 :]]).split(_OTHER)
        if len(after) != 1 or not (text.startswith(before) and text.endswith(after[0])):
            raise WrongLineError(
                f"{self.name} does not write the content of message {number + 1} once and as it is, so its tokens "
                "cannot be distinguished from the prompt's: give the message weight 0, or change the template"
            )
        stop = len(text) - len(after[0])
        mark = re.compile(rf"\s*(?:{self._mark.pattern})").match(text, stop)
        if mark is None or not mark[0].strip():
            raise WrongLineError(
                f"{self.name} writes no special token behind message {number + 1}, so the model would not learn to end "
                "its turn: change the template"
            )
        prompt = self.text(messages[:number], prompts=True) if number else before
        if not before.startswith(prompt):
            raise WrongLineError(
                f"{self.name} begins an answer in another way than it writes message {number + 1}, so the model would "
                "not be asked as it was taught: give the message weight 0, or change the template"
            )
        return len(prompt), mark.end()


class ChatML(Template):
    """The template of a tokenizer that has none (OpenAI's ChatML)."""

    def __init__(self, marks: Iterable[str] = ()) -> None:
        super().__init__("ChatML", sorted({"<|im_start|>", "<|im_end|>", *marks}), None)

    def text(self, messages: Sequence[Message], prompts: bool = False) -> str:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n" * prompts


class JinjaTemplate(Template):
    """A template in Jinja with transformers' settings and names. `tokens`: texts by name, such as bos_token."""

    def __init__(self, source: str, name: str, tokens: Mapping[str, str], marks: Sequence[str]):
        super().__init__(name, marks, [source, dict(tokens)])
        jinja2, sandbox = (needed_module(module, _NO_JINJA) for module in ("jinja2", "jinja2.sandbox"))
        # transformers finds answers by {% generation %} … {% endgeneration %}, which Jinja does not know.
        for word, known in (("generation", "if true"), ("endgeneration", "endif")):
            source = re.sub(rf"({{%[-+]?)\s*{word}\s*([-+]?%}})", rf"\1 {known} \2", source)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise MissingDataError(f"dataset.tokenizer: {name} is no template: {error}") from None
        self._tokens = dict(tokens)

    def text(self, messages: Sequence[Message], prompts: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **self._tokens
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise WrongLineError(f"{self.name} does not write this conversation: {error}") from None
        return text


def template_of(tokenizer: str) -> Template:
    """The template next to a tokenizer.json: chat_template.jinja, or `chat_template` in tokenizer_config.json; without,
    and for bytes, ChatML. Raises MissingDataError for files that are damaged, InstallError without Jinja."""
    if tokenizer == "bytes":
        return ChatML()
    file = Path(tokenizer).expanduser()
    if file.suffix != ".json":
        raise MissingDataError(
            f"dataset.tokenizer: {file} is no tokenizer.json, which chat needs to tell answers from prompts: convert "
            "it (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)), or take bytes."
        )
    settings = _json(file.with_name("tokenizer_config.json"))
    named = file.with_name("chat_template.jinja")
    source = named.read_text(encoding="utf-8") if named.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several by name
        by_name = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = by_name.get("default")
    tokens = {
        name: str(value.get("content") if isinstance(value, dict) else value)
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    added = _json(file).get("added_tokens") or []
    marks = {str(each.get("content")) for each in added if each.get("special")} | set(tokens.values())
    if not isinstance(source, str):
        return ChatML(marks - {""})
    name = f"the template {named if named.exists() else file.with_name('tokenizer_config.json')}"
    return JinjaTemplate(source, name, tokens, sorted(marks - {""}))


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; {} without the file."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MissingDataError(f"dataset.tokenizer: {file} is damaged: {error}") from None
    return read if isinstance(read, dict) else {}


def _refuse(message: str) -> None:
    raise ValueError(message)
