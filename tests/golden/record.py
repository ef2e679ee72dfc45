"""Runs a case with `paddle-dp` of a tree, and reads all that a move of code must not change.

Nothing of paddle_dp is imported: commands are run as a user runs them, and their files are read as they are, so that
one reader serves every commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from tests.golden.cases import HERE, Case
from tests.golden.lane import Lanes

Record = dict[str, Any]

# Words of the screen that no two runs share, and what stands for them. The paths come first (`_normal`).
VARYING: tuple[tuple[str, str], ...] = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?|\d{1,2} [A-Z][a-z]{2} \d{4}", "<date>"),
    (r"127\.0\.0\.1:\d+", "<port>"),
    (r"\b(process|pid) \d+", r"\1 <pid>"),
    (r"[\d.]+(e[+-]\d+)? (samples|tokens|times)/s", r"<speed> \2/s"),
    (r"(?<![\w.])\d[\d.]* ?(h|min|s|ms|µs|us|ns|seconds?|minutes?)\b", "<time>"),
    (r"(?<![\w.])\d[\d.]* ?([kMGT]?i?B)\b", "<bytes>"),  # memory, and what heartbeats add to what is sent
    (r"  \d+% waiting for data", ""),  # said where it is a tenth or more, as under load
    (r"\bgoodput \d+%", "goodput <share>"),  # a share of seconds
    (r"CRC-32 [0-9a-f]{8}|its files: [0-9a-f]{8}", "<checksum of code>"),
    (r"\bline \d+", "line <number>"),
    (r"\(\d+ frames", "(<number> frames"),
    (r"-[0-9a-f]{12}\.json", "-<key>.json"),  # of a verdict: a digest of the code's files, too
    (r"recipe [0-9a-f]{12}", "recipe <digest>"),  # of a certificate: the run's folder is in it
)
# Keys of metrics, evaluation.json and state.json that hold times, hosts, and what depends on them.
MEASURED = frozenset({
    "time", "seconds", "samples_per_second", "tokens_per_second", "seconds_per_step", "waiting", "memory", "host",
    "seconds_stalled", "seconds_waiting", "seconds_writing", "job_seconds", "pause_seconds",
    "sent",  # heartbeats travel with it, as many as there is time for
    "first", "last",  # of the steps that a profile is about
})  # fmt: skip
SOMETIMES = frozenset(
    {"slowest_rank", "slowest_times_others", "measured"}
)  # there, or not, as the time allows
ENTROPY = ("rng.python", "rng.numpy")  # the recipe seeds Paddle's generator; the machine seeds these two
# Facts of a checkpoint that change with the files of the code, or tell apart as many samples as there was time to read.
STATE = ("code of ", "package paddle_dp", ".read.sample")
FILES = ((r"logs/(attempt-\d+)/.*", r"logs/\1/…"),)  # Paddle's launcher leaves there what it likes
DRAWN = ("report.html",)  # made of the other files


def record(case: Case, recipe_text: str, lanes: Lanes, scratch: Path) -> Record:
    """What the case's commands say and leave, with the package of the lanes' tree, in the new folder `scratch`."""
    scratch.mkdir(parents=True)
    recipe, run = scratch / f"{case.recipe}.yaml", scratch / "run"
    recipe.write_text(recipe_text)
    words = {
        "recipe": recipe, "run": run, "ranks": case.ranks, "here": HERE, "settings": shlex.join(case.settings),
    }  # fmt: skip
    paths = {
        str(run): "<run>",
        str(scratch): "<runs>",
        str(HERE): "<here>",
        str(lanes.tree): "<tree>",
        sys.prefix: "<python>",
        f" {platform.node()}": " <host>",
    }
    commands = []
    for command in case.commands:
        status, out, err = lanes.run(command.format(**words), scratch)
        screen = {"stdout": _normal(out, paths), "stderr": _normal(err, paths)}
        commands.append({"command": command, "status": status, **screen})
    result = {"case": case.name, "commands": commands, **_run_folder(run, paths)}
    return names_alone(result) if case.free else result


def environment(tree: Path) -> dict[str, str]:
    """That of the commands: without leftovers of other jobs, one thread a process, the package of `tree`."""
    leftovers = ("PADDLE_", "MASTER_", "FLAGS_", "PYTEST_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(leftovers)}
    path = os.pathsep.join([str(tree), str(HERE)])
    return {**rest, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": path}


def _normal(text: str, paths: Mapping[str, str]) -> list[str]:
    for path, word in paths.items():
        text = text.replace(path, word)
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return [re.sub(r"  +", "  ", line.rstrip()) for line in text.splitlines()]


def _spoken(value: Any, paths: Mapping[str, str]) -> Any:
    """JSON whose texts are those of any run."""
    if isinstance(value, dict):
        return {key: _spoken(part, paths) for key, part in value.items()}
    if isinstance(value, list):
        return [_spoken(part, paths) for part in value]
    return "\n".join(_normal(value, paths)) if isinstance(value, str) else value


def _run_folder(run: Path, paths: Mapping[str, str]) -> Record:
    """The files of a run: what each step, evaluation and checkpoint says."""
    result: Record = {"files": _files(run)}
    if (run / "metrics.jsonl").exists():
        result["metrics"] = _spoken(_metrics((run / "metrics.jsonl").read_text()), paths)
    if (run / "evaluation.json").exists():
        result["evaluation"] = _leaves(_json(run / "evaluation.json"))
    if (run / "recipe.yaml").exists():
        result["recipe"] = _normal((run / "recipe.yaml").read_text(), paths)
    for checkpoint in sorted((run / "checkpoints").glob("step-*"))[-1:]:
        result["checkpoint"] = {"name": checkpoint.name, **_checkpoint(checkpoint, paths)}
    return result


def _json(file: Path) -> Any:
    return json.loads(file.read_text(), parse_constant=str)  # NaN is no number that equals itself


def _files(run: Path) -> list[str]:
    names = {file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()} - {*DRAWN}
    for pattern, word in FILES:
        names = {re.sub(pattern, word, name) for name in names}
    return sorted(names)


def _metrics(text: str) -> Record:
    """By event: its keys, and each key's numbers, one for each time that it was said."""
    columns: dict[str, dict[str, Any]] = {}
    for line in (json.loads(line, parse_constant=str) for line in text.splitlines()):
        if line["event"] in SOMETIMES:
            continue
        event = columns.setdefault(line["event"], {})
        for key in sorted(line.keys() - SOMETIMES - {"event"}):
            if key in MEASURED:
                event[key] = None
            else:
                event.setdefault(key, []).append(line[key])
    return columns


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested JSON by dotted name, without what was measured."""
    if isinstance(value, dict) and value:
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        parts = enumerate(value)
    else:
        return {name: value}
    return {
        leaf: content
        for key, part in parts
        if key not in MEASURED
        for leaf, content in _leaves(part, f"{name}.{key}" if name else str(key)).items()
    }


def _checkpoint(folder: Path, paths: Mapping[str, str]) -> Record:
    """Digests of whole tensors by name, who has which piece of each, and everything else that it says."""
    wholes: dict[str, np.ndarray[Any, Any]] = {}
    facts: dict[str, str] = {}
    placement: dict[str, list[str]] = {}
    ranks: dict[str, dict[str, str]] = {}
    for file in sorted(folder.glob("rank-*.json")):
        says, tensors = _json(file), _safetensors(file.with_suffix(".safetensors"))
        for key, piece in says["pieces"].items():
            name, data = piece["name"], tensors[key]
            region = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["size"], strict=True))
            whole = wholes.setdefault(name, np.zeros([*piece["shape"], data.shape[-1]], np.uint8))
            whole[region] = data.reshape([*piece["size"], data.shape[-1]])
            facts[name] = f"{piece['dtype']}{piece['shape']}"
            placement.setdefault(name, []).append(f"{file.stem} {piece['offset']} {piece['size']}")
        own = {f"{key}.{name}": part for key, parts in says["own"].items() for name, part in parts.items()}
        ranks[file.stem] = {
            key: digest(json.dumps(own[key], sort_keys=True)) for key in sorted(own) if key not in ENTROPY
        }
    state = _json(folder / "state.json")
    recipe = state.pop("recipe", None)
    leaves = {name: leaf for name, leaf in _leaves(state).items() if not any(word in name for word in STATE)}
    return {
        "tensors": {name: f"{facts[name]} {digest(wholes[name].tobytes())}" for name in sorted(wholes)},
        "placement": {name: placement[name] for name in sorted(placement)},
        "own": ranks, "state": _spoken(leaves, paths), "recipe's keys": sorted(recipe or {}),
        "manifest": sorted(_leaves(_json(folder / "manifest.json"))),
    }  # fmt: skip


def _safetensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor as bytes: [elements, bytes of an element]."""
    tensors = {}
    for name, entry in deserialize(path.read_bytes()):
        elements = int(np.prod(entry["shape"], dtype=np.int64))
        content = np.frombuffer(entry["data"], np.uint8)
        tensors[name] = content.reshape(elements, len(content) // max(elements, 1))
    return tensors


def digest(content: bytes | str) -> str:
    return hashlib.blake2b(
        content.encode() if isinstance(content, str) else content, digest_size=5
    ).hexdigest()


def names_alone(value: Record) -> Record:
    """The record of a case whose numbers are never the same twice: its names, shapes and statuses."""
    metrics = {event: sorted(columns) for event, columns in value.get("metrics", {}).items()}
    commands = [
        {
            **command,
            **{
                # Which steps' lines have a number yet depends on time, too.
                out: sorted(
                    {
                        re.sub(r"[\d.]+(e[+-]\d+)?", "#", line)
                        for line in command[out]
                        if not line.startswith("[epoch ")
                    }
                )
                for out in ("stdout", "stderr")
            },
        }
        for command in value["commands"]
    ]
    checkpoint = value.get("checkpoint", {})
    tensors = {name: said.rpartition(" ")[0] for name, said in checkpoint.get("tensors", {}).items()}
    shape = {"tensors": tensors, "state": sorted(checkpoint.get("state", {}))}
    return {
        **value,
        "metrics": metrics,
        "commands": commands,
        "evaluation": sorted(value.get("evaluation", {})),
        "checkpoint": shape,
    }
