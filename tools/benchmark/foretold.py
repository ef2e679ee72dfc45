"""Foretold beside measured: every legal layout of a GPT and an MLP, over links of three speeds.

    python tools/benchmark/foretold.py                         # all of it: hours
    python tools/benchmark/foretold.py --on namespaces --nodes 2 --rounds 3 --csv foretold.csv --png foretold.png
    python tools/benchmark/foretold.py --on device --nodes 2 --models gpt --only "sharding 2"
    python tools/benchmark/foretold.py --table foretold.csv    # the table of earlier runs

Steps are foretold by step_events.py, with no constant fitted to a step. It gets the bytes of the layout by arithmetic,
the seconds that a rank computes from one process that trains 1/ranks of the batch alone, and the link:

namespaces  nodes are network namespaces on one switch, whose links `tc` shapes (namespaces.py; root is needed). The
            rate of many bytes is measured through one socket from node to node. Each node is a device of --node-flops,
            which sleeps: nodes share this machine's processors. With 0 it computes on them, all nodes at once.
device      ranks on the simulated accelerator (tests/sim; g++ is needed). Its products take the time of a device of
            --flops, and sleep; its link has the rate that it is told.

In both, exchange_costs.py measures what each kind of exchange takes beside its link.

On both sides the quickest quarter of the steps counts: whatever else the machine does slows down the others.
Rounds go through all layouts in turn, so that a busy minute is not one layout's; a row has the median of its rounds,
their spread, and how many processes wanted a processor meanwhile. Exit status 1 if a threshold is missed: a step of
100 ms or more at most 10 % off over namespaces, 7 % on the device; 3 if the machine was too busy to say.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.errors import UsageError
from paddle_dp.plan.legal import layouts
from paddle_dp.units import LinkSpeed
from tests.sim.build import why_not as why_no_device
from tools.benchmark.foretold_sites import MICRO_BATCHES, RECIPES, Choice, Device, Namespaces, Site
from tools.benchmark.foretold_table import Row, picture, table, verdict
from tools.benchmark.namespaces import cluster, end_on_sigterm, going_on, why_not
from tools.command_line import parser_of, tell
from tools.tables import read_csv, write_csv

SPEEDS = {
    "namespaces": ("1 Gbit/s", "300 Mbit/s", "100 Mbit/s"),
    "device": ("20 MB/s", "8 MB/s", "3 MB/s"),
}
FLOPS = 2e9  # of a simulated device: so slow that what Python takes on a shared core is a small part
NODE_FLOPS = 5e9  # of a node: a fifth of a core's, so that two of them do not wait for each other's products
DEVICE_STEPS = 12  # the first four do not count
BATCH = 16  # of the GPT: 4 ranks have a sample in each micro-batch


def choices(recipe: Path, model: str, ranks: int) -> Iterator[Choice]:
    """Every legal layout of a model on so many ranks whose bytes are counted: degrees, stages of sharding,
    sequence_parallel, virtual stages. Activations are counted for transformers only."""
    from paddle_dp.recipe import read_recipe
    from paddle_dp.verbs.forecast import between, layout_of

    for degrees in layouts(ranks):
        stages = (1, 2, 3) if degrees.sharding > 1 else (1,)
        along = (False, True) if degrees.tensor > 1 else (False,)
        chunks = (1, 2) if degrees.pipeline > 1 else (1,)
        for stage, parallel, chunk in ((s, a, c) for s in stages for a in along for c in chunks):
            settings = [
                f"{axis}: {degrees[axis]}" for axis in ("data", "sharding", "sequence", "pipeline", "tensor")
            ]
            settings += [f"sharding_stage: {stage}"] if stage > 1 else []
            settings += ["sequence_parallel: true"] if parallel else []
            settings += ["pipeline_schedule: interleaved, virtual_stages: 2"] if chunk > 1 else []
            words = (
                f"strategy={{use: hybrid, {', '.join(settings)}}}",
                f"train.micro_batches={MICRO_BATCHES}",
                *([f"train.batch={BATCH}"] if model == "gpt" else []),
            )
            try:
                layout = layout_of(read_recipe(recipe, words), ranks)
            except UsageError:
                continue
            counted = between(read_recipe(recipe, words), layout) is not None
            if not counted and max(degrees.tensor, degrees.sequence, degrees.pipeline) > 1:
                continue
            name = str(degrees) + (f", stage {stage}" if degrees.sharding > 1 else "")
            name += ", sequence_parallel" * parallel + f", {chunk} stages a rank" * (chunk > 1)
            yield Choice(model=model, ranks=ranks, name=name, words=tuple(words))


def waiting() -> float:
    """The processes that want a processor now, without this one."""
    return max(0.0, float(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)


def measured(site: Site, wanted: Sequence[Choice], rounds: int, failed: list[str]) -> Iterator[Row]:
    """The rows of these layouts: each round goes through all of them. A round that fails is named in `failed`."""
    times: dict[Choice, list[list[float]]] = {choice: [] for choice in wanted}
    loads: dict[Choice, list[float]] = {choice: [] for choice in wanted}
    for number in range(rounds):
        for choice in wanted:
            with going_on(f"{site.name}, {choice.model}, {choice.name}", failed):
                load = waiting()
                times[choice].append(site.steps(choice))
                loads[choice].append(load)
            if number == rounds - 1 and times[choice]:
                yield from site.rows(choice, times[choice], loads[choice])


def main() -> int:
    options, failed = arguments(), list[str]()
    if options.table:
        rows = read_csv(Row, *options.table)
    else:
        end_on_sigterm()
        rows = []
        for row in all_rows(options, failed):
            rows.append(row)
            milliseconds = f"{1e3 * row.foretold:.0f} ms foretold, {1e3 * row.measured:.0f} ms measured"
            tell(f"{row.place}, {row.model}, {row.layout} over {row.link}: {milliseconds}")
            if options.csv:
                write_csv(rows, options.csv)
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 2
    lines, status = verdict(rows)
    print(table(rows), "", *lines, *(f"failed: {name}" for name in failed), sep="\n")
    if options.png:
        picture(rows, options.png)
    return max(status, 1) if failed else status


def all_rows(options: argparse.Namespace, failed: list[str]) -> Iterator[Row]:
    """The rows of each place that this machine has; a sentence for one that it has not."""
    for place, ranks in itertools.product(options.on, options.nodes):
        links = options.links or [LinkSpeed.parse(speed) for speed in SPEEDS[place]]
        wanted = [
            choice
            for model in options.models
            for choice in choices(RECIPES[place][model], model, ranks)
            if not options.only or any(choice.name.startswith(name) for name in options.only)
        ]
        with ExitStack() as stack:
            reason, site = site_of(place, ranks, links, options, stack)
            if site is None:
                tell(f"{place}, {ranks} ranks: skipped: {reason}")
            else:
                yield from measured(site, wanted, options.rounds, failed)


def site_of(
    place: str, ranks: int, links: Sequence[LinkSpeed], options: argparse.Namespace, stack: ExitStack
) -> tuple[str, Site | None]:
    """The site, whose namespaces and files live as long as `stack`; or the reason why it is not here."""
    if reason := why_not() if place == "namespaces" else why_no_device():
        return reason, None
    if place == "device":
        return "", Device(links, options.flops, DEVICE_STEPS)
    try:
        box = stack.enter_context(cluster(ranks))
        box.limit(links[0])
    except (OSError, subprocess.SubprocessError) as error:
        return f"this kernel makes no namespaces or no shaped links: {error}", None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretold-")))
    return "", Namespaces(box, folder, links, options.steps, options.node_flops)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--on", nargs="+", choices=[*SPEEDS], default=[*SPEEDS], help="(default: both)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4], choices=range(2, 9), metavar="N")
    parser.add_argument("--models", nargs="+", choices=["gpt", "mlp"], default=["gpt", "mlp"])
    parser.add_argument("--links", nargs="+", type=LinkSpeed.parse, metavar="SPEED", help="(default: three)")
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", help="beginnings of their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="over each link, in namespaces")
    parser.add_argument(
        "--flops", type=float, default=FLOPS, help=f"of a simulated device (default {FLOPS:g})"
    )
    parser.add_argument(
        "--node-flops", type=float, default=NODE_FLOPS,
        help=f"each node is a device of so many FLOP/s, which sleeps; 0: a processor (default {NODE_FLOPS:g})",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these")
    options = parser.parse_args()
    options.steps += options.steps % 2
    return options


if __name__ == "__main__":
    sys.exit(main())
