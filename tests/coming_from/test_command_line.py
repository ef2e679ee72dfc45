"""Arguments in scripts and texts: what a shell would pass, without one, and refusals of what is not clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dp.coming_from.command_line import Command
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
        ("A=5\nexport B=$A-x\nt --learning_rate $A --name ${B}y --last ${C:-7} --open $D",
         {"learning_rate": 5, "name": "5-xy", "last": 7, "open": "$D"}),
        ("X=1 t --learning_rate 1 > log 2>&1; echo --learning_raet 3", {"learning_rate": 1}),
        ("t --learning_rate 1 \\\n  --seed 2 # --seed 3\n# --seed 4", {"learning_rate": 1, "seed": 2}),
        ("torchrun --nproc_per_node 8 t.py --learning_rate 1", {"nproc_per_node": 8, "learning_rate": 1}),
        ("t --learning_rate 1.2.3 --a 1_000 --b ０ --c 1e999", {"learning_rate": "1.2.3", "a": "1_000", "b": "０",
                                                              "c": float("inf")}),
        ("t --learning_rate 1 --seed 2 --seed 2", {"learning_rate": 1, "seed": 2}),
        ("t --learning_rate 1 --name $(rm x)", {"learning_rate": 1, "name": ["$(rm", "x)"]}),  # nothing is run
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
            "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 9 + "t --learning_rate $A",
            "A value is longer than 65536 letters",
        ),
    ],
)
def test_what_is_not_clear_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Command.read(FILE, text)
    assert said in str(caught.value)
