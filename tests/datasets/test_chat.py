"""Conversations: only answers are learned, by any template, and each line that is none is named."""

import json
import sys

import numpy as np
import pytest

from paddle_dp.datasets import _chat
from paddle_dp.datasets._chat import JinjaTemplate, WrongLineError, template_of
from paddle_dp.datasets._packing import IGNORED
from paddle_dp.datasets.chat import Config
from paddle_dp.errors import InstallError, UsageError

TURNS = [
    ("system", "Be kind."), ("user", "¿Qué?"), ("assistant", "Nada 你好."), ("user", "Ah"),
    ("assistant", "🎉!"),
]  # fmt: skip


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns or TURNS]


def line(*turns, **more):
    return json.dumps({"messages": messages(*turns), **more})


@pytest.fixture
def chat(tmp_path):
    """A Config that reads these lines."""

    def write(*lines, name="chat.jsonl", **more):
        (tmp_path / name).write_text("\n".join(lines))
        settings = {
            "path": str(tmp_path / name),
            "cache": str(tmp_path / "cache"),
            "length": 256,
            "held_out": 0.0,
        }
        return Config(**settings | more)

    return write


def texts(sample):
    """The text of a window in bytes, and the texts that are learned in it, one after another."""
    inputs, targets = sample
    read = bytes(inputs["tokens"].astype(np.uint8)).rstrip(b"\0").decode()
    return read, bytes(targets[targets != IGNORED].astype(np.uint8)).decode()


def test_answers_are_learned_and_nothing_else(chat):
    read, learned = texts(chat(line()).build("train")[0])
    assert read == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in TURNS)[:-1]
    assert learned == "Nada 你好.<|im_end|>🎉!<|im_end|>"


def test_an_answer_with_weight_0_is_read_and_not_learned(chat):
    record = {"messages": messages()}
    record["messages"][2]["weight"] = 0
    assert texts(chat(json.dumps(record)).build("train")[0])[1] == "🎉!<|im_end|>"


def learned_numbers(data):
    of_epoch = data.at_epoch(0, 3)
    learned = "".join(texts(of_epoch[index])[1] for index in range(len(data))).split("<|im_end|>")
    return sorted(int(each.removeprefix("reply ")) for each in learned if each)


def replies(numbers):
    return [line(("user", "a"), ("assistant", f"reply {number}")) for number in numbers]


def test_conversations_share_windows_and_a_share_is_held_out(chat):
    config = chat(*replies(range(20)), held_out=0.25)
    train, test = (config.build(split) for split in ("train", "test"))
    assert len(train) == 5 and len(test) == 2  # three of 73 bytes in a window of 256
    assert len(learned_numbers(test)) == 5
    assert sorted(learned_numbers(train) + learned_numbers(test)) == [*range(20)]
    assert (test.at_epoch(0, 3)[0][0]["tokens"] == test[0][0]["tokens"]).all()


def test_equal_conversations_are_in_the_same_split_and_new_lines_move_few_others(chat):
    """A line that stood twice was learned and held out."""
    numbers = [*range(20), *range(0, 20, 2), *range(20)]
    config = chat(*replies(numbers), held_out=0.25)
    train, test = (set(learned_numbers(config.build(split))) for split in ("train", "test"))
    assert len(test) == 5 and not train & test and train | test == {*range(20)}
    assert len(learned_numbers(config.build("train"))) + len(learned_numbers(config.build("test"))) == 50
    ordered = chat(*replies(reversed(range(20))), held_out=0.25, name="other.jsonl")
    assert set(learned_numbers(ordered.build("test"))) == test
    longer = set(learned_numbers(chat(*replies(range(24)), held_out=0.25).build("test")))
    assert len(longer) == 6 and len(test - longer) <= 4 and test & longer


def test_of_conversations_that_are_all_equal_none_is_held_out(chat):
    with pytest.raises(UsageError, match=r"all conversations of .* are equal, so none can be held out"):
        chat(*replies([1, 1, 1]), held_out=0.5).build("test")


def test_a_conversation_longer_than_the_window_is_cut_or_refused(chat, capsys):
    long, short = line(("user", "a"), ("assistant", "b" * 400)), line(("user", "c"), ("assistant", "d"))
    late = line(("user", "e" * 400), ("assistant", "f"))
    data = chat(long, short, late, length=200).build("train")
    said = capsys.readouterr().out
    assert "2 of 3 conversations of the train split have more than 200 tokens" in said and "1 of them" in said
    learned = sorted(texts(data[index])[1] for index in range(len(data)))
    prompt = len("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert learned == ["b" * (201 - prompt), "d<|im_end|>"]
    data = chat(long, short, late, length=200, longer="leave_out").build("train")
    assert [texts(data[index])[1] for index in range(len(data))] == ["d<|im_end|>"]
    assert (
        "2 of 3 conversations of the train split" in (said := capsys.readouterr().out) and "left out" in said
    )
    with pytest.raises(
        UsageError, match="none of the 2 conversations of the train split fits into 200 tokens"
    ):
        chat(long, late, length=200, longer="leave_out").build("train")
    with pytest.raises(UsageError, match=r"dataset\.length: 2 of 3 conversations .* \d+ holds all of them"):
        chat(long, short, late, length=200, longer="refuse").build("train")
    with pytest.raises(
        UsageError,
        match="none of the 1 conversations of the train split has an answer in its first 200 tokens",
    ):
        chat(late, length=200).build("train")


PAIR = {"field": "src", "answers": "tgt"}


@pytest.mark.parametrize(
    ("record", "prompts", "learned"),
    [
        ({"src": "a", "tgt": "b"}, "a", ["b"]),
        ({"src": ["a", "c"], "tgt": ["b", "d"]}, "ac", ["b", "d"]),
        ({"src": ["a", "c"], "tgt": ["b", "d"], "label": [0, 1]}, "abc", ["d"]),
        ({"src": ["a"], "tgt": ["b"], "system": "s", "context": {}}, "sa", ["b"]),
        ({"src": ["s", "a", "c"], "tgt": ["", "b", "d"], "is_system": 1, "label": [0, 1, 0]}, "sacd", ["b"]),
    ],
)  # fmt: skip
def test_questions_and_answers_in_two_fields_are_the_conversation_that_they_are(
    chat, record, prompts, learned
):
    read, answers = texts(chat(json.dumps(record), **PAIR).build("train")[0])
    assert answers == "".join(f"{each}<|im_end|>" for each in learned)
    contents = [turn.partition("\n")[2].removesuffix("<|im_end|>\n") for turn in read.split("<|im_start|>")]
    unlearned = [
        each.removesuffix("<|im_end|>") for each in contents if each.removesuffix("<|im_end|>") not in learned
    ]
    assert "".join(unlearned) == prompts
    roles = [turn.partition("\n")[0] for turn in read.split("<|im_start|>")[1:]]
    assert roles[-2:] == ["user", "assistant"] and (roles[0] == "system") == (prompts[0] == "s")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ('{"messages": []}', "there is no field 'src' with the questions: it has messages. Name .*: dataset.field=…"),
        ('{"src": "a"}', "there is no field 'tgt' with the answers: it has src. Name .*: dataset.answers=…"),
        ('{"src": 1, "tgt": "a"}', "'src' is no text, and no list of texts"),
        ('{"src": ["a"], "tgt": [["b"]]}', "'tgt' is no text, and no list of texts"),
        ('{"src": ["a", "b"], "tgt": ["c"]}', "'src' has 2 texts and 'tgt' 1: each question needs an answer"),
        ('{"src": [], "tgt": []}', "there is no turn of the assistant to learn"),
        ('{"src": "a", "tgt": " "}', r"message 2 \(assistant\) is empty"),
        ('{"src": "a", "tgt": "b", "context": {"system": "s"}}', "'context' is not written into the text"),
        ('{"src": "a", "tgt": "b", "label": [1, 0]}', "'label' has 2 numbers, and there are 1 answers"),
        ('{"src": "a", "tgt": "b", "label": [0]}', "there is no turn of the assistant to learn"),
        ('{"src": "a<|im_end|>", "tgt": "b"}', "message 1 has .*, which would be read as a mark"),
    ],
)  # fmt: skip
def test_a_pair_that_is_none_is_named(chat, wrong, reason):
    with pytest.raises(UsageError, match=rf"chat\.jsonl:2: .*{reason}"):
        chat('{"src": "a", "tgt": "b"}', wrong, **PAIR).build("train")


def test_labels_and_pictures_of_messages_are_not_passed_over(chat):
    """A label of 0 was learned, and the place of a picture was a text."""
    assert texts(chat(line(label=[0, 1])).build("train")[0])[1] == "🎉!<|im_end|>"
    assert texts(chat(line(label="kind", images=[])).build("train")[0])[1].startswith("Nada")
    with pytest.raises(UsageError, match="'images' are not written into the text"):
        chat(line(images=["a.png"])).build("train")
    with pytest.raises(UsageError, match=r"Name the one that is: dataset\.field=src dataset\.answers=tgt"):
        chat('{"src": "a", "tgt": "b"}').build("train")


def test_a_test_file_is_the_test_split_and_all_others_are_learned(chat, tmp_path):
    (tmp_path / "dev.json").write_text("\n".join(replies([30, 31])))
    config = chat(*replies(range(6)), name="train.json", test=str(tmp_path / "dev.json"), held_out=0.5)
    assert learned_numbers(config.build("train")) == [*range(6)]
    assert learned_numbers(config.build("test")) == [30, 31]
    assert chat(*replies(range(6))).build("test") is None  # held_out 0
    with pytest.raises(UsageError, match=r"dataset\.test: .*nowhere does not exist"):
        chat(*replies([1]), test=str(tmp_path / "nowhere")).build("test")
    with pytest.raises(UsageError, match=r"array\.json:1: this line is not JSON"):
        chat(json.dumps([json.loads(each) for each in replies([1, 2])], indent=1), name="array.json").build(
            "train"
        )


def test_held_out_conversations_that_are_learned_are_counted(chat, tmp_path, capsys):
    (tmp_path / "dev.jsonl").write_text("\n".join(replies([4, 30, 5])))
    config = chat(*replies(range(6)), test=str(tmp_path / "dev.jsonl"))
    config.build("test")
    assert "learned" not in capsys.readouterr().out
    config.build("train")
    assert (
        f"chat: 2 of 3 conversations of dataset.test ({tmp_path}/dev.jsonl) are in" in capsys.readouterr().out
    )
    (tmp_path / "dev.jsonl").write_text("\n".join(replies([30, 31])))
    config.build("train")
    assert "learned" not in capsys.readouterr().out
    (tmp_path / "dev.jsonl").write_text("\n".join(replies([4, 1])))
    with pytest.raises(
        UsageError, match=r"^2 of 2 conversations of dataset\.test .* are in dataset\.path, too"
    ):
        config.build("train")


def test_a_file_that_is_learned_is_not_held_out(chat, tmp_path):
    (tmp_path / "link.jsonl").symlink_to("chat.jsonl")
    config = chat(*replies(range(6)), test=str(tmp_path / "link.jsonl"))
    with pytest.raises(
        UsageError, match=r"dataset\.test: .*link\.jsonl is one of the files of dataset\.path, too"
    ):
        config.build("train")
    assert learned_numbers(config.build("test")) == [*range(6)]  # evaluated without the training files


def test_fields_are_told_apart_in_the_cache(chat):
    both = json.dumps({"src": "a", "tgt": "b", "messages": messages(("user", "c"), ("assistant", "d"))})
    assert texts(chat(both, name="both.json").build("train")[0])[1] == "d<|im_end|>"
    assert texts(chat(both, name="both.json", **PAIR).build("train")[0])[1] == "b<|im_end|>"


def test_without_packing_each_conversation_has_a_window(chat):
    config = chat(*replies(range(20)), packing=False)
    data = config.build("train")
    assert len(data) == 20 and learned_numbers(data) == [*range(20)]
    of_epoch = data.at_epoch(0, 1)
    for index in range(20):
        read, learned = texts(of_epoch[index])
        assert learned.count("<|im_end|>") == 1 == read.count("user")
        inputs, targets = of_epoch[index]
        count = len(read.encode())
        assert inputs["positions"].tolist() == [*range(count)] + [0] * (256 - count)
        assert (targets[count:] == IGNORED).all() and len(targets) == 256
    with pytest.raises(IndexError):
        of_epoch[20]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ('{"messages": ', "this line is not JSON"),
        ("[" * 100_000, "this line is not JSON"),
        ("[1]", "there is no field 'messages' with the messages: it has list"),
        ('{"conversations": [], "id": 1}', "it has conversations, id. Name the one that is: dataset.field"),
        ('{"messages": "hello"}', "is no list of objects"),
        ('{"messages": ["hello"]}', "is no list of objects"),
        ('{"messages": []}', "there is no turn of the assistant to learn"),
        (line(("user", "a")), "there is no turn of the assistant to learn"),
        (line(("human", "a"), ("assistant", "b")), "message 1 has the role 'human': roles are system, user"),
        ('{"messages": [{"from": "human", "value": "a"}]}', "message 1 has no role, but from, value"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', r"has the role \['user'\]"),
        (line(("user", "a"), ("assistant", None)), "message 2 has the content None, which is no text"),
        (line(("user", "a"), ("assistant", [{"type": "text"}])), "has the content .*, which is no text"),
        (line(("user", "a"), ("assistant", " \n")), r"message 2 \(assistant\) is empty"),
        (line(("user", "\ud83c"), ("assistant", "a")), "message 1 has half of a character"),
        (line(("user", "a<|im_end|>"), ("assistant", "a")), "message 1 has '<|im_end|>', which would be read"),
        (line(("user", "a"), ("assistant", "b"), tools=[1]), "'tools' are not written"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}', "message 1 has tool_calls"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "has the weight 0.5"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_conversation_is_named_and_others_are_counted(chat, wrong, reason):
    reason = reason.replace("<|im_end|>", r"<\|im_end\|>")
    with pytest.raises(UsageError, match=rf"chat\.jsonl:2: .*{reason}"):
        chat(line(), wrong, line()).build("train")
    with pytest.raises(
        UsageError, match=r"chat\.jsonl:2: .*So are 1 other lines, the next .*chat\.jsonl:4\."
    ):
        chat(line(), wrong, "", wrong).build("train")


def test_other_files_are_refused(chat, tmp_path):
    with pytest.raises(UsageError, match=r"texts\.txt is no \.jsonl file"):
        chat(line(), name="texts.txt").build("train")
    with pytest.raises(
        UsageError, match=r"dataset\.path is not given: give a \.jsonl file with a conversation"
    ):
        chat(line(), path=None).build("train")
    (tmp_path / "spm.model").write_text("")
    with pytest.raises(UsageError, match=r"spm\.model is no tokenizer\.json"):
        chat(line(), tokenizer=str(tmp_path / "spm.model")).build("train")


CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content | trim + ' ' + eos_token }}{%- endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# The last answer begins with a thought, empty without reasoning_content, as in Qwen3; a prompt ends before it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template(jinja, *marks):
    pytest.importorskip("jinja2")
    return JinjaTemplate(jinja, "the template", {"bos_token": "<s>", "eos_token": "</s>"}, marks)


@pytest.mark.parametrize(
    ("jinja", "marks", "learned"),
    [
        (CHATML, ("<|im_end|>",), ["Nada 你好.<|im_end|>", "🎉!<|im_end|>"]),
        (LLAMA_2, ("<s>", "</s>"), [" Nada 你好. </s>", " 🎉! </s>"]),
        (THINKING, ("<|im_end|>",), ["Nada 你好.<|im_end|>", "<think>\n\n</think>\n\n🎉!<|im_end|>"]),
    ],
)
def test_answers_are_told_from_prompts_in_any_template(jinja, marks, learned):
    text, turns = template(jinja, *marks).write(messages(*TURNS[1:]))
    assert [text[slice(*turn)] for turn in turns] == learned
    assert all(content.split("</think>")[-1] in text for _, content in TURNS[1:])


def test_what_follows_a_prompt_is_learned_and_a_thought_is_not_lost():
    talk = messages(*TURNS[1:])
    talk[-1]["reasoning_content"] = "a party"
    text, turns = template(THINKING, "<|im_end|>").write(talk)
    assert text[slice(*turns[-1])] == "<think>\na party\n</think>\n\n🎉!<|im_end|>"
    with pytest.raises(WrongLineError, match="has reasoning_content, which the template does not write"):
        template(CHATML, "<|im_end|>").write(talk)
    other = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>bot\\n'")
    assert other != CHATML
    with pytest.raises(WrongLineError, match="begins an answer in another way than it writes message 2"):
        template(other, "<|im_end|>").write(messages(*TURNS[1:]))
    with pytest.raises(WrongLineError, match="writes no special token behind message 2"):
        template("{% for m in messages %}{{ m.content }}{% endfor %}").write(
            messages(("user", "a"), ("assistant", "b"))
        )


def test_the_words_of_a_template_are_transformers(monkeypatch):
    words = (
        "{{ messages | tojson }}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}"
    )
    assert template(words).text(messages(("user", "é"))) == '[{"role": "user", "content": "é"}]'
    with pytest.raises(WrongLineError, match=r"the template does not write .*: only user and assistant"):
        template(LLAMA_2, "</s>").write(messages())


@pytest.mark.parametrize(
    ("jinja", "reason"),
    [
        ("{{ messages[1].content | upper }}<e>", "does not write the content of message 2 once and as it is"),
        ("{{ messages[0].content }}<e>", "does not write the content of message 2 once"),
        ("{{ messages[1].content * 2 }}<e>", "does not write the content of message 2 once"),
        ("{% if 'b' in messages[1].content %}B{% endif %}x{{ messages[1].content }}<e>", "once and as it is"),
        ("{{ messages[1].content }}\nUser:", "writes no special token behind message 2"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{% set x = messages.append(1) %}", "not safely callable|unsafe|SecurityError|immutable"),
    ],
)  # fmt: skip
def test_a_template_that_answers_cannot_be_told_in_is_refused(jinja, reason):
    with pytest.raises(WrongLineError, match=reason):
        template(jinja, "<e>").write(messages(("user", "a"), ("assistant", "bob")))


def test_a_template_is_looked_for_beside_the_tokenizer(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"added_tokens": [{"content": "<e>", "special": True}, {"content": "x"}]}))
    with pytest.raises(WrongLineError, match="'<e>'"):  # ChatML, and the tokenizer's special tokens
        template_of(str(file)).write(messages(("user", "x<e>"), ("assistant", "b")))
    config = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
        "bos_token": {"content": "<b>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_of(str(file)).text([]) == "<b>"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert template_of(str(file)).text([]) == "<b>!"
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(UsageError, match=r"chat_template\.jinja is no template"):
        template_of(str(file))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InstallError, match=r"pip install 'paddle_dp\[chat\]'"):
        template_of(str(file))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is damaged"):
        template_of(str(file))


def test_a_trained_tokenizer_s_tokens_of_answers(chat, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=350, special_tokens=special, initial_alphabet=alphabet
    )
    inner.train_from_iterator(["Be kind. Nada Ah 你好"] * 5, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    _, targets = chat(line(), tokenizer=str(tmp_path / "tokenizer.json")).build("train")[0]
    learned = targets[targets != IGNORED].tolist()
    assert inner.decode(learned, skip_special_tokens=False) == "Nada 你好.<|im_end|>🎉!<|im_end|>"
    assert learned.count(inner.token_to_id("<|im_end|>")) == 2


def test_roles_are_those_that_the_error_lists():
    assert _chat.ROLES == ("system", "user", "assistant", "tool")


def test_a_prompt_is_a_user_s_turn_and_an_answer_ends_with_its_own(chat):
    data = chat(line()).build("train")
    assert bytes(data.prompt("Qué?")).decode() == "<|im_start|>user\nQué?<|im_end|>\n<|im_start|>assistant\n"
    written = np.frombuffer("Nada 你好.<|im_end|>\n<|im_start|>user".encode(), np.uint8)
    assert data.answer(written) == "Nada 你好." and data.answer(written[:4]) == "Nada"
