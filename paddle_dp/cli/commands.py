"""The verbs of `paddle-dp`, and `main`, which turns an error into its message and exit status.

A verb declares its options and calls another package; `--help` does not import paddle.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import paddle_dp
from paddle_dp.cli.help import Verb, Verbs
from paddle_dp.cli.options import (
    Averaged,
    Checkpoint,
    Devices,
    Master,
    NodeRank,
    NodesOrSpan,
    OutputDir,
    Overrides,
    Ranks,
    RanksOrSpan,
    RecipeFile,
    RunFolder,
    averaged,
    numbers,
    recipes_and_settings,
    require,
    span,
    words,
)
from paddle_dp.errors import InstallError, PaddleDPError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.units import Duration, LinkSpeed, Quantity

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

_PLAIN = ("strategy.use=single", "train.precision=float32")  # the model as one process has it


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: RanksOrSpan = None,
    devices: Devices = None,
    nodes: NodesOrSpan = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: OutputDir = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[CHECKPOINT]",
            help="Go on from the newest checkpoint, or from this one: best, a step or a path.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Start again after a failure, from the newest good checkpoint: N times, and N times anew after each "
            "new checkpoint (docs/reliability.md).",
        ),
    ] = 0,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,…", help="What --resume may find changed: loss,optimizer.clip (docs/checks.md)."
        ),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="Show where the time of the steps goes, and what would make them shorter."
        ),
    ] = False,
) -> None:
    """Train a recipe on any number of processes."""
    if accept is not None and resume is None:
        raise UsageError(
            f"--accept {accept}: it says what --resume may find changed, and there is no --resume."
        )
    least_ranks, most_ranks = span("--ranks", ranks)
    least_nodes, most_nodes = span("--nodes", nodes)
    _run(
        Job(
            recipe=recipe,
            overrides=tuple(overrides or ()),
            ranks=most_ranks,
            least_ranks=least_ranks,
            devices=numbers(devices),
            nodes=most_nodes,
            least_nodes=least_nodes,
            master=master,
            node_rank=node_rank,
            output_dir=output_dir,
            resume=resume,
            restarts=restarts,
            extra={**({"accept": words(accept)} if accept else {}), **({"why": True} if why else {})},
        )
    )


def why(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Tell where the time of a run's steps goes, on each rank, and what would make them shorter.

    Reads what the run has recorded, while it runs or afterwards: every training measures a few of its steps, after 10,
    100, 1000, … (docs/why-slow.md). `paddle-dp train --why` shows it every 50 steps.
    """
    from paddle_dp.cli.why import told

    typer.echo(told(run, json=json))


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
) -> None:
    """Evaluate a run's checkpoint on every held-out sample, each exactly once."""
    from paddle_dp.recipe import resolved

    _run(
        Job(
            entry_point="evaluate",
            recipe=resolved(run),
            overrides=tuple(overrides or ()),
            ranks=ranks,
            devices=numbers(devices),
            output_dir=run,
            extra={"checkpoint": checkpoint, **averaged(ema)},
        )
    )


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to compare with one.")] = 2,
    steps: Annotated[int, typer.Option(metavar="K", help="How many of the recipe's own steps.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Also an evaluation, a checkpoint, a second epoch and a resume."),
    ] = False,
) -> None:
    """Run a recipe's first steps on 1 and on N processes, compare every gradient and update, and say where they differ.

    Two steps in float64, where rounding hides nothing, and K as the recipe has them. What rounding may do is measured
    on one process, not chosen (docs/proof.md).

    Exit status: 0 the same; 1 different; 2 something to type differently, such as a layout that does not fit; 3 nothing
    was learned, so nothing is proven; 4 a side could not be run; 128 + n ended by signal n.
    """
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    from paddle_dp import proof

    status = proof.verify(recipe, tuple(overrides or ()), ranks, steps, as_text=not json, rehearse=rehearse)
    raise typer.Exit(status)


def audit(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Any script for paddle.distributed.launch.")
    ],
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to run it on.")] = 2,
    steps: Annotated[
        int, typer.Option(metavar="K", help="Updates to watch in each of the first two epochs.")
    ] = 3,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="End the script when it does nothing for so long.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a script that knows nothing of paddle_dp on N ranks and tell what is silently wrong with it.

    Options of audit stand before SCRIPT; what stands behind it are the script's own arguments. The script really runs,
    with all that it writes.

    Exit status: 0 nothing found; 1 findings; 2 something to type differently; 3 the script itself failed.
    """
    from paddle_dp.audit import Options, audit

    options = Options(ranks=ranks, steps=steps, patience=patience, json=as_json)
    raise typer.Exit(audit(script, context.args, options))


def launch(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Any script for paddle.distributed.launch.")
    ],
    as_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    ranks: Ranks = None,
    devices: Devices = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Machines; run the command on each of them.")
    ] = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "--out", metavar="DIR", help="Where logs go, in place of runs/<script>.launch."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(metavar="N", help="Start the script again after a failure, N times at most.")
    ] = 0,
) -> None:
    """Run a script that may know nothing of paddle_dp on N ranks, supervised.

    Options of launch stand before SCRIPT; what stands behind it are the script's own arguments. When a rank fails, the
    first cause is the last thing on the screen, with its traceback, and no process is left. A script that is started
    again goes on from what it finds itself.

    Exit status: 0 done; of the rank that failed first; 2 something to type differently; 128 + n ended by signal n.
    """
    behind = [word for word in context.args if word.partition("=")[0] in ("--ranks", "--nodes", "--devices")]
    if behind and (ranks, devices, nodes) == (None, None, None):
        raise UsageError(
            f"{behind[0]} stands behind {script}, so it is the script's own, and the job would have one rank. Options "
            f"of launch stand before the script: paddle-dp launch --ranks 2 {script} … If the script does take such an "
            "option, give launch its own, too."
        )
    words = [*(["-m"] if as_module else []), script, *context.args]
    _run(
        Job(
            script=tuple(words),
            ranks=ranks,
            devices=numbers(devices),
            nodes=nodes,
            master=master,
            node_rank=node_rank,
            output_dir=output_dir,
            restarts=restarts,
        )
    )


def certificate(
    run: RunFolder,
    replay: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Train N intervals between checkpoints again; of many, evenly spread."
        ),
    ] = 0,
    step: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="Train again up to this update.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="No more updates of an interval than K.")
    ] = None,
) -> None:
    """Show how a run came about, check its checkpoints against it, and train parts of it again on one process.

    The certificate names the data, the versions, every attempt with its number of ranks, and a digest of the weights at
    each checkpoint, the same in any layout. An interval is trained from the checkpoint before it; losses and weights
    are compared with what the run recorded, in units of what rounding does to one process (docs/proof.md).

    Intervals lie between checkpoints that are still there: with keep: 3 the first is all from the beginning to the
    oldest of three, and may take most of the run's time. --steps K ends each after K updates.

    Exit status: 0 all as certified; 1 something is not; 2 something to type differently.
    """
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    from paddle_dp.proof import certified

    raise typer.Exit(certified.certificate(run, replay, step, steps))


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint's.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with an adapter: the adapter alone.")
    ] = False,
) -> None:
    """Write a checkpoint of any layout as one safetensors file: the plain one-process model.

    An adapter is added to the weights that it stands on, and the file is the plain model's, too.
    """
    from paddle_dp import checkpoint as checkpoints

    folder = run / "checkpoints"
    found = checkpoints.find(checkpoint if folder.is_dir() else run, folder)
    is_adapter = checkpoints.is_adapter(found)
    if adapter and not is_adapter:
        raise UsageError(f"--adapter: {found} holds no adapter.")
    if adapter or not is_adapter:
        typer.echo(f"{out}: {checkpoints.merge(found, out, ema=ema)} tensors of {found}")
        return
    folder = found.resolve().parent.parent
    _of_run("merge", folder, {"to": str(out), "checkpoint": str(found), **averaged(ema)}, _PLAIN)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A language model's run: runs/gpt_single.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(metavar="N", min=0, help="How many tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="0: the likeliest token; 1: as learned.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Draw from the K likeliest only.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds draw equally.")] = 0,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
) -> None:
    """Write text on from a prompt with what a language model's run has learned.

    On a terminal, characters that do not print are shown as escapes such as \\x1b; a file or a pipe gets them as they
    are.
    """
    options = {
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "checkpoint": checkpoint,
        **averaged(ema),
    }
    alone = ("strategy.use=single",)
    _of_run("generate", run, options, alone)


def predict(
    run: RunFolder,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES…", help="Images, texts or arrays (.npy, .npz, .csv, .jsonl); or folders."
        ),
    ],
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="How many classes to show.")] = 3,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table with all outputs.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also write all outputs to this .npz file."),
    ] = None,
) -> None:
    """Give files to a run's model: classes with probabilities, the loss of a text, or plain outputs.

    Files are read as the run's data set reads held-out samples; arrays have the shape of one sample, or of n. Several
    inputs stand in .npz, .csv or .jsonl under their names (docs/predict.md). The data set itself is not needed.
    """
    options = {
        "files": files,
        "checkpoint": checkpoint,
        **averaged(ema),
        "top": top,
        "csv": as_csv,
        "out": None if out is None else str(out if out.suffix else out.with_suffix(".npz")),
    }
    _of_run("predict", run, options, _PLAIN)


def export(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to; by default RUN/export.")
    ] = None,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, through paddle2onnx.")] = False,
    hf: Annotated[
        Path | None,
        typer.Option(
            "--hf", metavar="DIR", help="Instead write what Hugging Face's transformers read, or torchvision."
        ),
    ] = None,
) -> None:
    """Write a run's model as a program that runs without this package, proven equal to the model."""
    if hf is not None and (onnx or out is not None):
        raise UsageError("--hf DIR writes weights alone: call export again for a program.")
    if onnx:
        require("--onnx", "onnx", "paddle2onnx", "onnxruntime")
    options = {
        "to": str(target) if (target := hf or out) else None,
        "checkpoint": checkpoint,
        **averaged(ema),
        "onnx": onnx,
    }
    _of_run("export" if hf is None else "export_weights", run, options, _PLAIN)


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the folder of all runs.")],
    port: Annotated[int, typer.Option(metavar="PORT", help="Where it listens, on 127.0.0.1.")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)


def parts(
    shelf: Annotated[str | None, typer.Argument(metavar="SHELF", help="models, datasets, losses, …")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One part of the shelf.")] = None,
) -> None:
    """List the shelves, the parts of one shelf with their settings, or one part."""
    from rich.console import Console

    from paddle_dp.recipe import listing

    Console().print(listing.listing(shelf, name))


def check(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE… [KEY=VALUE…]", help="Recipes to check, and other settings."),
    ],
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Also say what a rank of N would hold.")
    ] = None,
    build: Annotated[
        int | None, typer.Option(metavar="RANK", help="Also build what this rank of --ranks would hold.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Also say how long a step's exchange takes: '10 Gbit/s'."),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Also say the shortest step for so long a compute: '60 ms'."),
    ] = None,
) -> None:
    """Check recipes without starting anything: every mistake with its file and line; and plan what each rank holds."""
    from paddle_dp.launch.initial import check_weights
    from paddle_dp.recipe.check import check_all

    def given(recipe: Recipe) -> list[str]:
        return check_weights(recipe.load, recipe.model) if recipe.load is not None else []

    raise typer.Exit(check_all(*recipes_and_settings(words), _forecast(ranks, build, link, compute), given))


def _forecast(
    ranks: int | None, build: int | None, link: str | None, compute: str | None
) -> Callable[[Recipe], Iterator[str]] | None:
    """What `check --ranks` adds to a recipe's line; None without --ranks."""
    if ranks is None:
        for option, given in (("--build", build), ("--link", link), ("--compute", compute)):
            if given is not None:
                raise UsageError(f"{option} {given} needs --ranks N: how many ranks there are.")
        return None
    if compute is not None and link is None:
        raise UsageError(f"--compute {compute} needs --link SPEED: what the ranks exchange over.")
    from paddle_dp.launch.plan import check_ranks
    from paddle_dp.launch.silence import import_paddle

    check_ranks(ranks)
    import_paddle()
    from paddle_dp.train.forecast import Wire, forecast

    wire = None
    if link is not None:
        speed = _quantity("--link", LinkSpeed, link)
        wire = Wire(
            link=speed, compute=None if compute is None else _quantity("--compute", Duration, compute)
        )
    return lambda recipe: forecast(recipe, ranks, build, wire)


def _quantity(option: str, kind: type[Quantity], text: str) -> Any:
    """The quantity that an option gives. Raises UsageError for a text that is none."""
    try:
        return kind.parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}.") from None


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the copies go: DIR/configs, DIR/models.")
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="Which shipped recipe to begin from.")
    ] = "digits_mlp",
) -> None:
    """Copy a shipped recipe and its model into a folder of your own, to begin from."""
    from paddle_dp.recipe import shipped

    made = shipped.copy(recipe, folder)
    print(*made, sep="\n")
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"{where}{shipped.command(made[0])}")


def doctor(
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes that are to run on this machine.")] = 2,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Machines; run the command on each of them.")
    ] = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "--out", metavar="DIR", help="Where the runs are to be.")
    ] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Examine this machine: Paddle, devices, memory, disk, network, and a real exchange between ranks.

    With --nodes, run it on each of them, as the training: the nodes meet, and compare their clocks.

    Exit status: 0 ready; 1 something to mend, with what to do; 2 something to type differently.
    """
    from paddle_dp.doctor import Asked, examine

    asked = Asked(ranks=ranks, nodes=nodes or 1, master=master, node_rank=node_rank, folder=output_dir)
    raise typer.Exit(examine(asked, json=json))


def schema() -> None:
    """Print the JSON schema of a recipe, for editors that know the YAML language server."""
    import json

    from paddle_dp.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))


def _of_run(entry_point: str, run: Path, options: Mapping[str, Any], overrides: tuple[str, ...]) -> NoReturn:
    """Calls an entry point with a run's recipe and these options, in one process, which prints all there is to say."""
    from paddle_dp.recipe import resolved

    _run(
        Job(
            entry_point=entry_point,
            recipe=resolved(run),
            overrides=overrides,
            ranks=1,
            output_dir=run,
            quiet=True,
            extra=options,
        )
    )


def _run(job: Job) -> NoReturn:
    """Runs a job, and exits with its status."""
    from paddle_dp.launch.start import run

    raise typer.Exit(run(job))


# In the order of --help.
VERBS = (
    train,
    why,
    evaluate,
    verify,
    audit,
    certificate,
    merge,
    generate,
    predict,
    export,
    launch,
    dashboard,
    parts,
    check,
    new,
    doctor,
    schema,
)

app = typer.Typer(
    name="paddle-dp",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
# All arguments after the script are the script's own, options too.
FOREIGN = {"allow_extra_args": True, "allow_interspersed_args": False}
for verb in VERBS:
    app.command(cls=Verb, context_settings=FOREIGN if verb in (audit, launch) else None)(verb)


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
    """The console script: prints only the message of a PaddleDPError to stderr, and exits with its status."""
    try:
        app(args=with_resume_value(sys.argv[1:] if words is None else words), prog_name="paddle-dp")
    except PaddleDPError as error:
        _leave(error)
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        _leave(InstallError.of_paddle())
    except KeyboardInterrupt:  # before there is anything to end; typer has its own answer later
        sys.exit(130)


def with_resume_value(words: Sequence[str]) -> list[str]:
    """Turns a bare `--resume` into `--resume=newest`: an option, KEY=VALUE or a recipe after it is not its value.

    Of `train` alone: behind `launch` and `audit` stands what belongs to the script.
    """
    if not words or words[0] != "train":
        return list(words)
    following = [*words, "-"][1:]
    bare = re.compile(r"-.*|[A-Za-z_][\w.]*=.*|.*\.ya?ml", re.DOTALL)
    return [
        "--resume=newest" if word == "--resume" and bare.fullmatch(after) else word
        for word, after in zip(words, following, strict=True)
    ]


def _leave(error: PaddleDPError) -> None:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
