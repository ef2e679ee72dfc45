"""Recipes with random mistakes: each is read, or refused with its mistakes; nothing else, in little time and memory.

`FUZZ_SEED=N pytest …` repeats what a failure has printed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle  # noqa: F401 - models are imported with it, whose seconds are not a recipe's
import pytest
from ruamel.yaml import YAML

from paddle_dp.errors import UsageError
from paddle_dp.recipe import foreign_code, read_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("configs/*.yaml"))
SECONDS, MEMORY = 5.0, 500 << 20
Draw = random.Random


def deep(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


HOSTILE: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (
        None, True, -1, 0, 1.5, 10**400, -(2**63), 1e308, float("inf"), float("nan"), "", " ", "x" * 20_000, "\0",
        "😀", "nan", ".nan", "1e999 epochs", "10 epochs", "-3 steps", "9" * 5000 + " steps", "1e400 MB", "0x10",
        "../../../..", "2026-01-01", [], {}, [None] * 200, {"": ""}, {"use": "os.system"}, {"use": "x" * 5000},
        {"use": ""}, {"use": "."}, {"use": ".."}, {"use": "mlp."}, {"use": ".mlp"}, {"use": None}, {"use": ["mlp"]},
        {"use": "paddle"}, {"use": "paddle.load", "path": "x"}, {"use": "paddle.nn.Layer"}, {"use": "no.such.module"},
        {"use": "_base"}, {"use": "../mlp"}, {"use": "mlp\0"}, {"use": "é.è"}, {"use": "mlp", "use ": "x"},
        {"use": "paddle_dp.part.part"}, {"use": "paddle.vision.models.resnet18", "cuts": {"*": "heads", "": "vocab"}},
    )),
    lambda: deep(60), lambda: deep(5000), lambda: {str(n): n for n in range(400)},
]  # fmt: skip
PIECES = [
    "{", "}", "[", "]", ":", "- ", "&a ", "*a", "<<: *a", "!!python/object:os.system ", "!!binary ", "? ", "|\n", ">",
    "%YAML 9.9", "---\n", "...", "#", '"', "'", "\t", "\r", "\x85", "\ufeff", "\\x", ",", "@", "`", "~", "\x00",
]  # fmt: skip


def slots(value: Any, levels: int = 20) -> list[tuple[Any, Any]]:
    """Every place in nested values, so many levels deep, as its container and key."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys if levels else ():
        found += [(value, key), *slots(value[key], levels - 1)]
    return found


def changed_values(text: str, draw: Draw) -> str:
    """The recipe with values replaced, removed, renamed or moved, as JSON, which is YAML."""
    values = YAML(typ="safe", pure=True).load(text)
    for _ in range(draw.randint(1, 3)):
        places = slots(values)
        if not places:
            break
        (holder, key), (other, where) = draw.choice(places), draw.choice(places)
        deed = draw.randrange(5)
        if deed == 0 and isinstance(holder, dict):
            holder[draw.choice(["use", "lr", "epochs", "x" * 50, f"{key}s", ""])] = holder.pop(key)
        elif deed == 1:
            del holder[key]
        elif deed == 2:
            holder[key] = other[where]  # or an ancestor of its own: then it is no JSON
        else:
            holder[key] = draw.choice(HOSTILE)()
    try:
        return json.dumps(values, default=str)
    except (RecursionError, ValueError):
        return "[" * draw.choice([50, 5000])


def changed_text(text: str, draw: Draw) -> str:
    """The recipe with characters and lines that were lost, doubled or put in."""
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        deed, lines = draw.randrange(6), text.splitlines(keepends=True) or [""]
        if deed == 0:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif deed == 1:
            text = text[:at] + text[min(end, at + 20) :]
        elif deed == 2:
            text = text[:end]
        elif deed == 3:
            lines.insert(draw.randrange(len(lines)), draw.choice(lines))
            text = "".join(lines)
        elif deed == 4:
            text = text[:at] + " " * draw.randrange(1, 4) + text[at:]
        else:
            text = (
                text[:at]
                + chr(draw.choice([draw.randrange(1, 128), draw.randrange(0xD7FF)]))
                + text[at + 1 :]
            )
    return text


def an_override(draw: Draw) -> str:
    keys = draw.choice(
        ["model.width", "train.batch", "callbacks.3.every", "dataset.use", "strategy", "a.b.c", "", "."]
    )
    try:
        value = str(draw.choice(HOSTILE)())[:200]
    except (RecursionError, ValueError):
        value = "[" * 5000
    return f"{keys}={draw.choice([value, value, draw.choice(PIECES)])}"


def outcome(file: Path, overrides: list[str]) -> str:
    """ "" of a recipe that is read, the message of one that is refused. Raises anything else."""
    try:
        foreign_code(file, overrides)
        read_recipe(file, overrides, tries=False)
    except UsageError as error:
        return str(error).strip() or "(no message)"
    return ""


def fuzz(times: int, seed: int, folder: Path) -> list[str]:
    """The outcomes of so many recipes with random mistakes."""
    draw, said, slowest = Draw(seed), [], 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(times):
        text = draw.choice(RECIPES).read_text()
        text = (changed_values if draw.random() < 0.6 else changed_text)(text, draw)
        file = folder / "fuzzed.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        overrides = [an_override(draw)] if draw.random() < 0.2 else []
        began = time.process_time()
        try:
            said.append(outcome(file, overrides))
        except Exception:  # noqa: BLE001 - any is what is looked for
            pytest.fail(
                f"FUZZ_SEED={seed}, number {number}, {overrides}\n{text[:2000]}\n{traceback.format_exc()}"
            )
        slowest = max(slowest, time.process_time() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert slowest < SECONDS and grown < MEMORY, f"FUZZ_SEED={seed}: {slowest:.1f} s, {grown >> 20} MB"
    assert "(no message)" not in said, f"FUZZ_SEED={seed}"
    return said


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(10**6)))


def test_recipes_with_random_mistakes_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    fuzz(30, seed, tmp_path)


def test_some_of_the_recipes_are_still_read(tmp_path: Path) -> None:
    """Of a fixed seed: one recipe in eight is, so that all 40 of one seed in 300 are refused."""
    assert 0 < fuzz(15, 1, tmp_path).count("") < 15


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_recipes_with_random_mistakes(tmp_path: Path, seed: int) -> None:
    fuzz(1000, seed, tmp_path)
