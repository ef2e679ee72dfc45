"""Arguments in scripts and texts: what a shell would pass, without one, and refusals of what is not clear."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.coming_from.command_line import Command
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.shell_script import Unresolved
from paddle_dp.errors import UsageError

FILE = Path("run.sh")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("python t.py --learning_rate 1e-5 --bf16", {"learning_rate": 1e-5, "bf16": True}),
        ("--learning_rate 1e-5\n--bf16\n--seed 3\n", {"learning_rate": 1e-5, "bf16": True, "seed": 3}),
        ("t --learning-rate=0.1 --name='a b' --debug \"\"", {"learning_rate": 0.1, "name": "a b", "debug": ""}),
        ("t --learning_rate 1 --save no --tf32 False", {"learning_rate": 1, "save": "no", "tf32": False}),
        ("t --learning_rate 1 --report_to a b --x -1", {"learning_rate": 1, "report_to": ["a", "b"], "x": -1}),
        ('A=5\nexport B=$A-x\nt --learning_rate $A --name ${B}y --last ${C:-7} --open "$D"',
         {"learning_rate": 5, "name": "5-xy", "last": 7, "open": "$D"}),
        ("X=1 t --learning_rate 1 > log 2>&1; echo --learning_raet 3", {"learning_rate": 1}),
        ("t --learning_rate 1 \\\n  --seed 2 # --seed 3\n# --seed 4", {"learning_rate": 1, "seed": 2}),
        ("torchrun --nproc_per_node 8 t.py --learning_rate 1", {"launcher.nproc_per_node": 8, "learning_rate": 1}),
        ("t --learning_rate 1.2.3 --a 1_000 --b ０ --c 1e999", {"learning_rate": "1.2.3", "a": "1_000", "b": "０",
                                                              "c": float("inf")}),
        ("t --learning_rate 1 --seed 2 --seed 2", {"learning_rate": 1, "seed": 2}),
        ("t --learning_rate 1 --name $(rm x)", {"learning_rate": 1, "name": "$(rm x)"}),  # nothing is run
        ('A="--bf16 --seed 3"\nt --learning_rate 1 $A --x 2', {"learning_rate": 1, "bf16": True, "seed": 3, "x": 2}),
        ('A="\n  --bf16\n"\nB=(--seed 3 "a b")\nB2="${B[@]}"\nt --learning_rate 1 $A "${B[@]}"',
         {"learning_rate": 1, "bf16": True, "seed": [3, "a b"]}),
        ("t --learning_rate 1 --run_name $(hostname | cut -c1-8) --bf16", {"learning_rate": 1, "bf16": True,
                                                                          "run_name": "$(hostname | cut -c1-8)"}),
        ("t --learning_rate 1 --run_name `a | b` --bf16", {"learning_rate": 1, "bf16": True, "run_name": "`a | b`"}),
        ('t --learning_rate 1 --run_name "exp #3" --bf16', {"learning_rate": 1, "bf16": True, "run_name": "exp #3"}),
        ("t --learning_rate 1 2> err.log --bf16 >out &>x --seed 1", {"learning_rate": 1, "bf16": True, "seed": 1}),
        ("cat > a <<EOF\nit's --learning_rate 3\nEOF\nt --learning_rate 1 \\\n  `# --seed 2` \\\n  --bf16",
         {"learning_rate": 1, "bf16": True}),
        ("X=5\nX=1 t --learning_rate $X", {"learning_rate": 5}),  # the value of before
        ("if true; then\n  t --learning_rate 1 \\\r\n --bf16\nfi", {"learning_rate": 1, "bf16": True}),
        ("accelerate launch --gradient_accumulation_steps 8 t.py --gradient_accumulation_steps 2 --learning_rate 1",
         {"launcher.gradient_accumulation_steps": 8, "gradient_accumulation_steps": 2, "learning_rate": 1}),
        ("deepspeed --num_gpus 2 --deepspeed t.py --deepspeed a.json --learning_rate 1",
         {"launcher.num_gpus": 2, "launcher.deepspeed": True, "deepspeed": "a.json", "learning_rate": 1})
    ],
)  # fmt: skip
def test_options_of_one_command(text: str, options: dict[str, Any]) -> None:
    assert Command.read(FILE, text).options == options


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("torchrun --nproc_per_node=8 t.py --learning_rate 1", 8),
        ('python -m paddle.distributed.launch --gpus "0,1,2" t.py --learning_rate 1', 3),
        ("accelerate launch --num_processes 4 --num_machines 2 t.py --learning_rate 1", 4),
        ("torchrun --nproc_per_node auto t.py --learning_rate 1", 0),
        ("t.py --learning_rate 1", 0),
    ],
)
def test_ranks_of_the_launcher(text: str, ranks: int) -> None:
    assert Command.read(FILE, text).launched == ranks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo --hello", "run.sh holds no training"),
        ("t --learning_rate 1\nt --learning_rate 2", "run.sh holds 2 trainings"),
        ("t --learning_rate 1 --seed 2 --seed 3", "--seed is there twice, with other values"),
        ("t --learning_rate 'a", "a command cannot be read: No closing quotation"),
        (
            "t --learning_rate 1\n  --seed 2",
            "--seed 2 begins with an option: the command before it has ended",
        ),
        (
            "A0=xxxxxxxxxxxxxxxx\n" + "".join(f"A{n + 1}=" + f"$A{n}" * 4 + "\n" for n in range(9)),
            "A value is longer than 65536 letters",
        ),
    ],
)
def test_what_is_not_clear_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Command.read(FILE, text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "script",
    [
        "LR=1\nLR=2\n{}", "LR=1\nif x; then LR=2; fi\n{}", "LR=1\nx && LR=2\n{}", "x || LR=1\n{}", "LR=1\nLR+=0\n{}",
        "for LR in 1 2; do\n{}\ndone", "while x; do\nLR=1\ndone\n{}", "case x in a) LR=1;; esac\n{}",
        "f() {{\nLR=1\n}}\n{}",
        "function f {{\nLR=1\n}}\n{}", "(LR=1)\n{}", "LR=1 | x\n{}", "declare -i LR=1\n{}", "read LR\n{}",
        "LR=1\nread LR\n{}", "LR=1\nprintf -v LR 2\n{}", "LR=1\n. env.sh\n{}", "LR=1\n((LR=2))\n{}",
        "LR=$(x)\n{}", "LR=`x`\n{}", "{}\nLR=1", "LR=1 {}", "f() {{ local LR=1; }}\n{}", "LR=1\nunset LR\n{}",
        "LR=$((2 * 3))\n{}", "for ((LR=1; LR<2; LR++)); do\n{}\ndone",
    ],
)  # fmt: skip
def test_a_variable_that_is_not_certain_stays_unresolved(script: str) -> None:
    options = Command.read(FILE, script.format("t --learning_rate $LR --bf16")).options
    assert options == {"learning_rate": "$LR", "bf16": True} and isinstance(
        options["learning_rate"], Unresolved
    )


def test_an_unresolved_value_after_an_equals_sign() -> None:
    options = Command.read(FILE, "t --learning_rate=$LR --run_name=a$(x | y) --seed 3").options
    assert options == {"learning_rate": "$LR", "run_name": "a$(x | y)", "seed": 3}
    assert isinstance(options["learning_rate"], Unresolved) and options["learning_rate"].line == 1


@pytest.mark.parametrize(
    "words",
    ["--learning_rate 1 --do_train $X", "--learning_rate 1 $X", '--learning_rate 1 "$@"', "$X --learning_rate 1",
     "--learning_rate 1 --output_dir a $X", '--output_dir "${A[@]}"', "--learning_rate 1 --bf16 $(x | y)",
     "$* --seed 1"],
)  # fmt: skip
def test_a_word_that_may_hold_options_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"line 2: .* may hold options, and what it is depends on a run"):
        Command.read(FILE, f"A=1\npython t.py --max_steps 1 {words}")


def test_the_file_of_arguments_after_the_program(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text('{"learning_rate": 1, "seed": 2}')
    script = tmp_path / "run.sh"
    script.write_text("python -u run.py sft.json --learning_rate 3")
    assert Configuration.read(script).values == {"learning_rate": 3, "seed": 2}  # the command's options count
    script.write_text("python run.py other.json --learning_rate 3")
    with pytest.raises(UsageError, match=r"names the arguments of other\.json, which is not next to it"):
        Configuration.read(script)


def test_an_unresolved_value_is_refused_where_it_counts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("LR=1\nLR=2\npython run.py --learning_rate $LR --output_dir $OUT")
    c = Configuration.read(script)
    assert c.values["output_dir"] == "$OUT"
    with pytest.raises(UsageError, match=r"run\.sh: learning_rate: \$LR: .* line 3"):
        c.take("learning_rate")


@pytest.fixture
def without_collections() -> Iterator[None]:
    """The garbage of all tests of this process is looked through now and then: half a second, in whoever's time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("word", ["{ ", "a\n", "$(", "then "])
def test_a_long_script_takes_no_longer_than_its_letters(word: str) -> None:
    """In processor seconds: ten times the letters take ten times as long, and a hundred times if each word is compared
    with all before it."""

    def seconds(words: int) -> float:
        start = time.process_time()
        with pytest.raises(UsageError):
            Command.read(FILE, word * words)
        return time.process_time() - start

    assert min(seconds(30_000) for _ in range(2)) < 40 * sorted(seconds(3_000) for _ in range(5))[2]
