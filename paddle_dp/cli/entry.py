"""The console script: all verbs behind one door, where a mistake becomes its message and its exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import paddle_dp
from paddle_dp.cli.foreign import audit
from paddle_dp.cli.learned import evaluate, export, generate, merge
from paddle_dp.cli.looking import check, dashboard, parts, schema
from paddle_dp.cli.training import train, verify
from paddle_dp.errors import InstallError, PaddleDPError

# In the order of --help.
VERBS = (train, evaluate, verify, audit, merge, generate, export, dashboard, parts, check, schema)

app = typer.Typer(
    name="paddle-dp",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What stands behind a foreign script is the script's own, options too.
FOREIGN = {"allow_extra_args": True, "allow_interspersed_args": False}
for verb in VERBS:
    app.command(context_settings=FOREIGN if verb is audit else None)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paddle-dp {paddle_dp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed training for PaddlePaddle that is provably the single-device run, only faster."""


def main(words: Sequence[str] | None = None) -> None:
    """The console script: a mistake is its message alone on stderr, with its own exit status."""
    try:
        app(args=with_resume_value(sys.argv[1:] if words is None else words), prog_name="paddle-dp")
    except PaddleDPError as error:
        _leave(error)
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        _leave(InstallError.of_paddle())


def with_resume_value(words: Sequence[str]) -> list[str]:
    """A bare `--resume` means the newest: an option, KEY=VALUE or a recipe behind it is not its value."""
    following = [*words[1:], "-"]
    bare = re.compile(r"-.*|[A-Za-z_][\w.]*=.*|.*\.ya?ml", re.DOTALL)
    return [
        "--resume=newest" if word == "--resume" and bare.fullmatch(after) else word
        for word, after in zip(words, following, strict=True)
    ]


def _leave(error: PaddleDPError) -> None:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
