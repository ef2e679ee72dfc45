"""The training_args.bin that Hugging Face's Trainer writes next to its checkpoints: a pickle, not run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.unpickle import PickleName, RecordMachine, UnreadObject

BEGINNING = b"PK\x03\x04"  # a zip archive, as of torch.save since 1.6
EARLIER = b"\x80"  # a pickle alone
_LARGEST = 2**22  # bytes of the pickle in it
_MOST = 100_000  # operations
_COMPUTED = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args")


def read_training_args(file: Path, content: bytes) -> Mapping[str, Any]:
    """The arguments in a file of torch.save. Raises UsageError for any other archive, and for other objects."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            name = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if name.file_size > _LARGEST:
                raise ValueError(f"its pickle is larger than {_LARGEST >> 20} MB")
            record = RecordMachine(_MOST).run(archive.read(name))
    except Exception as error:  # a damaged archive or pickle may raise anything
        raise UsageError(f"{file} is no training_args.bin: {error or type(error).__name__}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{file} is no training_args.bin: it holds a {type(record).__name__}")
    return {
        str(key): _named(value)
        for key, value in record.items()
        if not str(key).startswith("_") and key not in _COMPUTED
    }


def _named(value: Any) -> Any:
    """A dtype such as torch.bfloat16 is a name in the pickle; other names, and bytes, are of objects."""
    if isinstance(value, PickleName):
        module, _, name = value.name.rpartition(" ")
        return name if module == "torch" else UnreadObject(f"{module}.{name}")
    return UnreadObject("bytes") if isinstance(value, bytes) else value
