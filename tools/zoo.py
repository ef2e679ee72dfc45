"""Examines the proof with the zoo: silent faults, each put into our own code, that it must catch, and honest models.

python tools/zoo.py                                   # all but the heaviest models: minutes
python tools/zoo.py --only "mean of means" "gpt, "    # cases whose names begin with these
python tools/zoo.py --heavy --page docs/zoo.md        # all of them, and the page with the results
python tools/zoo.py --heavy --folder FOLDER           # goes on where an earlier run with this folder was interrupted
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.proof.zoo.case import Fault, Honest
from tests.proof.zoo.cases import CASES, LIGHT
from tests.proof.zoo.faults import FILES
from tests.proof.zoo.marking import CASES_PER_JOB, Mark, examine
from tools.command_line import ROOT, parser_of
from tools.tables import table, table_row

WIDEST = 200  # characters of what was said, in a table

HEAD = """\
# The zoo: an exam for the proof

> {line}

Each fault below was put into the package's own code (or into a model) by a patch of a few lines, on both sides, like a
mistake of our own; none of them raises an error by itself, and with most of them the loss keeps falling. Then the proof
and the other checks ran. The list was made from published ones: [TTrace](https://arxiv.org/abs/2506.09280),
[Megatron-LM #7452](https://github.com/NVIDIA/Megatron-LM/issues/7452) and other trackers' issues, what fleet and Paddle
do themselves, and our own mistakes. The patches are in `tests/proof/zoo/faults`, the honest models in
`tests/proof/zoo/honest.py` and `models.py`. A tool writes this page, with its numbers:

    python tools/zoo.py --page docs/zoo.md

{machine}; {jobs}; {seconds} s for all sides, one after the other.

*Caught by*: **verify**, the comparison with one process, at the step named; **weights**, the same, and also the ranks'
digests of their weights, which every training compares; **gradients**, the check before the first update that every
gradient is exchanged; **evaluation**, **resume** and **rehearsal**, the training itself on both sides, with an
evaluation, a checkpoint, a second epoch and a resume (`paddle_dp/proof/rehearsal.py`);
**door**, refused before training.
"""


def line(marks: Sequence[Mark]) -> str:
    """ "94 of 94 silent faults caught, 65 of 65 honest models passed"."""
    faults = [mark for mark in marks if isinstance(mark.case, Fault)]
    honest = [mark for mark in marks if isinstance(mark.case, Honest)]
    caught, passed = sum(mark.passed for mark in faults), sum(mark.passed for mark in honest)
    return f"{caught} of {len(faults)} silent faults caught, {passed} of {len(honest)} honest models passed"


def page(marks: Sequence[Mark]) -> str:
    """docs/zoo.md, whole."""
    numbers = sorted({mark.case.setting.ranks for mark in marks} | {1})
    jobs = (
        f"{len(marks)} cases in jobs of {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} ranks, each of up to "
        f"{CASES_PER_JOB} cases"
    )
    machine = f"{os.cpu_count()}-core CPU machine, Paddle {version('paddlepaddle')}"
    seconds = round(sum(mark.seconds for mark in marks))
    parts = [HEAD.format(line=line(marks), machine=machine, seconds=seconds, jobs=jobs)]
    by_name = {mark.case.name: mark for mark in marks}
    for file in FILES:
        mine = [by_name[fault.name] for fault in file.FAULTS if fault.name in by_name]
        if mine:
            parts.append(_section(file.__doc__ or "", mine))
    honest = [mark for mark in marks if isinstance(mark.case, Honest)]
    rows = [table_row([mark.case.name, mark.case.says, _layout(mark), _word(mark)]) for mark in honest]
    head = "## Honest models\n\nNone of these may be blamed.\n\n| model | what it has | layout | |\n|---|---|---|---|"
    parts.append("\n".join([head, *rows, ""]))
    return "\n".join(parts)


def _section(sign: str, marks: Sequence[Mark]) -> str:
    title, _, more = sign.strip().partition("\n")
    names = ["fault", "what it is", "source", "layout", "caught by", "step", "what was said"]
    facts = (_source, _layout, _word, _step)
    rows = [[m.case.name, m.case.says, *(fact(m) for fact in facts), _cell(m.said)] for m in marks]
    introduction = f"{more.strip()}\n\n" if more.strip() else ""
    return f"## {title.rstrip('.')}\n\n{introduction}{table(names, rows)}\n"


def _source(mark: Mark) -> str:
    return mark.case.source if isinstance(mark.case, Fault) else ""


def _layout(mark: Mark) -> str:
    return f"{mark.case.setting.recipe}, {mark.case.setting.layout}"


def _step(mark: Mark) -> str:
    return "" if mark.step is None else str(mark.step)


def _word(mark: Mark) -> str:
    if isinstance(mark.case, Fault):
        return (mark.guard or "**nobody**") + ("" if mark.passed else " (**not as expected**)")
    if mark.passed:
        return "the same" if mark.case.told is None else f"told: {mark.case.told}"
    return f"**{mark.guard}**: {_cell(mark.said)}"


def _cell(said: str) -> str:
    # Folders of this run.
    flat = re.sub(r"/\S*?/(?=trace/)", "…/", " ".join(said.split())).replace("|", "\\|")
    return flat if len(flat) <= WIDEST else flat[:WIDEST].rsplit(" ", 1)[0] + " …"


def as_json(marks: Sequence[Mark]) -> str:
    """All cases as one JSON object."""
    rows = [
        {"name": mark.case.name, "kind": type(mark.case).__name__.lower(), "source": _source(mark),
         "layout": _layout(mark), "guard": mark.guard, "step": mark.step, "said": mark.said, "passed": mark.passed,
         "seconds": round(mark.seconds, 1)}
        for mark in marks
    ]  # fmt: skip
    return json.dumps({"line": line(marks), "cases": rows}, indent=2)


def write_claims(marks: Sequence[Mark]) -> None:
    """Writes the result of a whole run into the lines of both READMEs that claim it."""
    caught = sum(isinstance(mark.case, Fault) for mark in marks if mark.passed)
    passed = sum(isinstance(mark.case, Honest) for mark in marks if mark.passed)
    for name in ("README.md", "README_zh.md"):
        text = re.sub(
            r"(?m)^> \d+ of \d+ silent faults caught.*$", f"> {line(marks)}", (ROOT / name).read_text()
        )
        text = re.sub(r"\d+ 个静默错误", f"{caught} 个静默错误", text)
        text = re.sub(r"\d+ 个正确的模型", f"{passed} 个正确的模型", text)
        (ROOT / name).write_text(text)


def main() -> int:
    """Returns 0 if every fault is caught by the guard that should catch it, and every honest model passes; else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--heavy", action="store_true", help="also models that take gigabytes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page here as well")
    parser.add_argument(
        "--folder", type=Path, help="keep what the cases leave (gigabytes), and go on from there"
    )
    given = parser.parse_args()
    names = [name for name in (CASES if given.heavy else LIGHT) if name.startswith(tuple(given.only))]
    with (
        nullcontext(given.folder)
        if given.folder
        else tempfile.TemporaryDirectory(prefix="paddle-dp-zoo-") as scratch
    ):
        marks = examine(names, Path(scratch).resolve())
    if given.json:
        print(as_json(marks))
    else:
        for mark in marks:
            sign = "  " if mark.passed else "!!"
            print(
                f"{sign} {mark.case.name:32} {mark.guard or 'the same':11} {_step(mark):2} {_cell(mark.said)}"
            )
        print(line(marks))
    if given.page:
        given.page.write_text(page(marks))
        if names == list(CASES):
            write_claims(marks)
    return 0 if all(mark.passed for mark in marks) else 1


if __name__ == "__main__":
    sys.exit(main())
