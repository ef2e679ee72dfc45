"""Published runs as workloads: published_runs.jsonl, and vTrain's measured iterations where there is a network.

No constant is chosen here. Where a source leaves something unsaid, it is assumed here and nowhere else.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_dp.files import replacing
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.workload import Numbers, Workload, device_columns

ROWS = Path(__file__).with_name("published_runs.jsonl")
# Bang et al., vTrain, MICRO 2024 (arXiv:2312.12391). Fetched at this commit, and not part of this repository.
VTRAIN_COMMIT = "f8dda8473a48b373b1d25f51f52d685bff5150c5"
VTRAIN = f"https://raw.githubusercontent.com/VIA-Research/vTrain/{VTRAIN_COMMIT}/data/ground_truth_{{}}.csv"
VTRAIN_SHA256 = {
    "multi": "bea3aa76f8198da40d4a1e8f3fea74d0e7760a85d51ef59d25719f5a55063cdb",
    "single": "92589d1ff671e7294bd7585c2cc44df1ba044bad24bc01acb032fb8402314b47",
}
VTRAIN_COLUMNS = (
    "ranks", "batch", "micro", "width", "heads", "depth", "length", "tensor", "data", "pipeline", "milliseconds",
)  # fmt: skip
Rows = list[dict[str, Any]]

LLAMA = {  # shapes that some rows only name: Llama Team, arXiv:2407.21783, table 3
    "8B": {"depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256},
    "70B": {"depth": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256},
    "405B": {"depth": 126, "width": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248, "vocab": 128256},
}
NAMES = {  # a row's key → a workload's
    "layers": "depth", "hidden": "width", "heads": "heads", "kv_heads": "kv_heads", "ffn": "hidden", "vocab": "vocab",
    "seq": "length", "tensor": "tensor", "pipeline": "pipeline", "chunks": "virtual_stages", "data": "data",
    "context": "sequence", "micro": "micro",
}  # fmt: skip
MEGATRON = {"overlaps_data": 1, "overlaps_stages": 1}  # Megatron-Core's defaults since 2023
RECOMPUTE: dict[str, dict[str, float]] = {
    "none": {}, "selective": {"recomputed_scores": 1}, "full": {"recomputed_blocks": 1},
    "every other product": {"recomputed_products": 0.5},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of one source: their workload, measured seconds a step [n], global batch [n], and published memory in bytes
    [n] (0: none)."""

    load: Workload
    seconds: Numbers
    batch: Numbers
    memory: Numbers

    def take(self, mask: npt.NDArray[np.bool_]) -> Runs:
        columns = {name: getattr(self, name)[mask] for name in ("seconds", "batch", "memory")}
        return Runs(load=self.load.take(mask), **columns)

    def __len__(self) -> int:
        return len(self.seconds)


def published_rows() -> Rows:
    """All rows of published_runs.jsonl, as they are published."""
    return [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]


def published() -> dict[str, Runs]:
    """Runs of transformers with a layout, by source."""
    groups: dict[str, Rows] = {}
    for row in published_rows():
        source, settings = _case(row)
        if source:
            groups.setdefault(source, []).append(settings)
    return {source: _runs(rows) for source, rows in groups.items()}


def _case(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source and the settings of one row; "" for a row of other quantities."""
    source = row["source"]
    case = {NAMES[key]: row[key] for key in NAMES if key in row}
    case |= {
        "batch": row.get("batch", 0),
        "seconds": row.get("seconds", 0.0),
        "rate": row.get("tflops_per_card", 0),
    }
    case |= {"ranks": row.get("cards"), "memory": row.get("memory_gib", 0) * 2**30}
    case |= {"sequence_parallel": int(row.get("sequence_parallel", row.get("sp", False)))}
    recompute = row.get("recompute", "none")
    if source == "SC21 table 2":
        source = _sc21_table2(row, case)
    elif source.startswith("Megatron-Core"):
        _megatron_core(row, case)
    elif source.startswith("Llama 3"):
        case |= MEGATRON | {"micro": 1, "virtual_stages": 8, "flash": 1, "matrices": 3, "stage": 1}
        case |= {"sequence_parallel": 1, "gradient": 4, "batch": 2**24 / row["seq"]}
    elif source.startswith("torchtitan"):
        source, recompute = "torchtitan", _torchtitan(row, case)
    elif source.startswith("Megatron-Bridge"):
        source = "Megatron-Bridge"
        _megatron_bridge(row, case)
    elif source not in ("SC21 table 1", "MT-NLG", "2205.05198 table 5"):
        return "", {}
    case |= RECOMPUTE[recompute]
    case |= device_columns(DEVICES["h100" if "H100" in row["device"] else "a100-80"])
    return source, case


def _sc21_table2(row: dict[str, Any], case: dict[str, Any]) -> str:
    small = row["params_b"] < 200
    case["heads"] = 96 if small else 128
    if row["scheme"] == "ZeRO-3":
        case |= {"tensor": 1, "pipeline": 1, "data": row["cards"], "stage": 3}
        return "SC21 table 2, ZeRO-3"
    case |= {"tensor": 8, "pipeline": 12 if small else 35, "virtual_stages": 2 if small else 3}
    case["data"] = row["cards"] // row["model_parallel"]
    return "SC21 table 2"


def _megatron_core(row: dict[str, Any], case: dict[str, Any]) -> None:
    """Unpublished, and assumed: one sample a micro-batch, the stages on a rank, gradients in 16 bits."""
    stages = {1: 1, 2: 7, 4: 5, 6: 4, 8: 4, 16: 7}[row["pipeline"]]
    case |= MEGATRON | {"micro": 1, "virtual_stages": stages, "flash": 1, "stage": 1}
    case["sequence_parallel"] = int(row["tensor"] > 1)


def _torchtitan(row: dict[str, Any], case: dict[str, Any]) -> str:
    """Micro-batches are as many as stages, its default then. Its `selective` keeps every other product."""
    size = next(key for key in ("405B", "70B", "8B") if row["model"].startswith(key))
    tensor, pipeline, shards = row.get("tensor", 1), row.get("pipeline", 1), row["sharding"]
    case |= LLAMA[size] | {"tensor": tensor, "pipeline": pipeline, "data": shards, "flash": 1, "matrices": 3}
    case |= MEGATRON | {"micro": row["batch"] / shards / pipeline, "sequence_parallel": int(tensor > 1)}
    case |= {"stage": 3 if pipeline == 1 else 1, "fp8": int("fp8" in row["model"])}
    case["virtual_stages"] = 2 if pipeline > 1 and "interleaved" in row["model"] else 1
    return "full" if "full" in row["model"] else "every other product"


def _megatron_bridge(row: dict[str, Any], case: dict[str, Any]) -> None:
    size = next(key for key in ("405B", "70B", "8B") if key in row["model"])
    tensor, pipeline, context = (row.get(key, 1) for key in ("tensor", "pipeline", "context"))
    case |= LLAMA[size] | {"tensor": tensor, "pipeline": pipeline, "sequence": context}
    case |= MEGATRON | {"data": row["cards"] / tensor / pipeline / context, "flash": 1, "matrices": 3}
    case |= {"fp8": 1, "gradient": 4}
    case |= {"stage": 3 if "fsdp" in row else 1, "sequence_parallel": int(tensor > 1)}


def _runs(rows: Rows) -> Runs:
    """Rows of one source together. A row in TFLOP/s a card gets its seconds from the FLOPs of the workload."""
    for row in rows:
        row["micros"] = row["batch"] / row.get("data", 1) / row["micro"]
    load = Workload.stack(rows)
    seconds, rate, ranks, batch, memory = (
        np.array([row[key] for row in rows], float) for key in ("seconds", "rate", "ranks", "batch", "memory")
    )
    derived = load.flops / np.maximum(ranks * rate * 1e12, 1.0)
    return Runs(load=load, seconds=np.where(seconds > 0, seconds, derived), batch=batch, memory=memory)


def vtrain(which: str, folder: Path | None = None) -> Runs | None:
    """`single`: 1440 iterations on one node of 8 A100, nothing recomputed; `multi`: 109 on 64 to 512 A100, everything
    recomputed, 4 network cards of 200 Gbit/s a node. None if the file can neither be read nor fetched."""
    text = _vtrain_text(which, folder)
    if text is None:
        return None
    rows: Rows = []
    multi = which == "multi"
    device = device_columns(DEVICES["a100-80"]) | ({"node_link": 100e9} if multi else {})
    for line in list(csv.reader(io.StringIO(text)))[1:]:
        if not line or not line[0]:
            continue
        row: dict[str, Any] = dict(zip(VTRAIN_COLUMNS, map(float, line[multi:]), strict=True))
        row |= {"vocab": 51200, "memory": 0, "rate": 0, "recomputed_blocks": int(multi)}
        row["seconds"] = row.pop("milliseconds") / 1e3
        rows.append(row | device)
    return _runs(rows)


def _vtrain_text(which: str, folder: Path | None) -> str | None:
    """The file's text: kept in `folder` (by default a folder of temporary files) once it has been fetched. Raises
    ValueError for a file with another digest."""
    folder = folder or Path(tempfile.gettempdir()) / f"vtrain-{VTRAIN_COMMIT[:10]}"
    file = folder / f"ground_truth_{which}.csv"
    if not file.is_file():
        try:
            with urllib.request.urlopen(VTRAIN.format(which), timeout=20) as answer:
                content = answer.read()
        except OSError:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_bytes(content)
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != VTRAIN_SHA256[which]:
        raise ValueError(f"{file} has the digest {digest}, and vTrain's {VTRAIN_SHA256[which]}: delete it")
    return content.decode("utf-8-sig")
