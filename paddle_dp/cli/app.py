"""The verbs of `paddle-dp` together, and `main`, which turns an error into its message and exit status."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Annotated

import typer

import paddle_dp
from paddle_dp.cli.help import Verb, Verbs
from paddle_dp.cli.proofs import audit, certificate, verify
from paddle_dp.cli.recipes import check, doctor, import_, new, parts, plan, schema
from paddle_dp.cli.runs import compare, dashboard, export, generate, merge, predict, report, why
from paddle_dp.cli.scale import scale
from paddle_dp.cli.sweeps import sweep
from paddle_dp.cli.training import cluster, evaluate, launch, train
from paddle_dp.errors import InstallError, PaddleDPError, UsageError
from paddle_dp.launch.steady import open_standard_files
from paddle_dp.mesh.heartbeat import heartbeat

# In the order of --help.
VERBS = (
    train, sweep, why, report, compare, evaluate, verify, audit, certificate, merge, generate, predict, export, launch,
    cluster, dashboard, parts, check, plan, scale, new, import_, doctor, schema,
)  # fmt: skip

# Errors of a path that was given, not of this program.
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)

app = typer.Typer(
    name="paddle-dp",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
# All arguments after the script, including options, are passed to it.
FOREIGN = {"allow_extra_args": True, "allow_interspersed_args": False}
for verb in VERBS:
    app.command(cls=Verb, context_settings=FOREIGN if verb in (audit, launch) else None)(verb)
command = cache(partial(typer.main.get_command, app))  # Typer reads the verbs' signatures for 0.1 seconds


def _version(requested: bool) -> None:
    if requested:
        print(f"paddle-dp {paddle_dp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed training for PaddlePaddle that is provably the single-device run, only faster."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: prints only the message of a PaddleDPError to stderr, and exits with its status."""
    open_standard_files()
    words = with_resume_value(sys.argv[1:] if arguments is None else arguments)
    try:
        command()(args=words, prog_name="paddle-dp")
    except PaddleDPError as error:
        _leave(error)
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        _leave(InstallError.missing_paddle())
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        _leave(UsageError(f"{error.filename}: {error.strerror}. Give another path."))
    except KeyboardInterrupt:  # nothing has started yet; later typer handles it
        sys.exit(130)
    finally:
        if (
            arguments is None
        ):  # the process ends: its threads and exit handlers have watch.patience, as on a rank
            heartbeat.enter("done")


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Turns a bare `--resume` into `--resume=newest`: an option, KEY=VALUE or a recipe after it is not its value.

    Only `train` is changed: a `--resume` after `launch` or `audit` may belong to the script.
    """
    if not arguments or arguments[0] != "train":
        return list(arguments)
    following = [*arguments, "-"][1:]
    bare = re.compile(r"-.*|[A-Za-z_][\w.]*=.*|.*\.ya?ml", re.DOTALL)
    return [
        "--resume=newest" if argument == "--resume" and bare.fullmatch(after) else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _leave(error: PaddleDPError) -> None:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
