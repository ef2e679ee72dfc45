"""The documentation says what is: links lead somewhere, commands exist, examples run, lists are the code's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.part.aliases import find_hint
from paddle_dp.recipe import read_recipe
from tests.certificate.proven import assert_proven
from tests.house.command_service import command_line
from tests.house.forked_commands import run_command, run_script
from tests.house.programs import ROOT, run_program, shell_variables
from tests.house.runs import events
from tools import document

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
CHINESE = [page for page in PAGES if page.name.endswith(".zh.md")]
ENGLISH = sorted({*PAGES} - {*CHINESE, ROOT / "README_zh.md", ROOT / "CHANGELOG.md"})
# The English page lists every key and every part: tools/document.py writes them, and the Chinese page leads there.
WITHOUT_LISTS = ROOT / "docs/recipes.zh.md"
TRAIN = "paddle-dp train configs/digits_mlp.yaml --ranks 2 --verify"
PARTS = "docs/add-a-part.md"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def write_files(page: str, folder: Path) -> list[str]:
    """Writes the blocks of a page whose first line names a file into a folder, and returns the files' names."""
    named = [(m[1], text) for _, text in blocks(page) if (m := re.match(r"# (\S+\.(?:py|yaml))\n", text))]
    for name, text in named:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return [name for name, _ in named]


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its `id` attributes, and its headings as GitHub and the site spell them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.*)", text, re.M))
    return {heading.replace(" ", "-") for heading in headings} | {*re.findall(r'\bid="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r'(?:\]\(|src="|href=")([^")\s]+)', page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = "://" in link or (target.exists() and (not anchor or anchor in anchors(target)))
        dead += [] if known else [link]
    assert not dead, f"{page.name} links to what is not there: {dead}"


def test_modules_that_the_map_and_the_decisions_name_exist() -> None:
    """A reader who looks for what they name finds it: `learner/update.py` is paddle_dp/learner/update.py."""
    pages = [ROOT / "docs/map.md", *(ROOT / "docs/decisions").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"(?<![\w/.])((?:[\w-]+/)+\w+\.py)\b", text))
    folders = (ROOT, ROOT / "paddle_dp", ROOT / "paddle_dp/strategies")
    missing = [
        path
        for path in named
        if "NAME" not in path and not any((folder / path).exists() for folder in folders)
    ]
    assert len(named) > 30 and not missing, (
        f"docs/map.md or docs/decisions name modules that are not there: {missing}"
    )


def test_pages_that_the_code_names_exist() -> None:
    named = {
        m for f in ROOT.glob("paddle_dp/**/*.py") for m in re.findall(r"docs/[\w/.-]+\.md", f.read_text())
    }
    missing = [page for page in named if not (ROOT / page).exists()]
    assert not missing, f"the code sends its reader to pages that are not there: {missing}"


def test_the_map_shows_every_package() -> None:
    tree = (ROOT / "docs/map.md").read_text().split("```\npaddle_dp/")[1].split("## The layers")[0]
    shown = set(re.findall(r"\b([a-z_]+)/", tree)) - {"paddle_dp"}
    folders = {f.parent.name for f in ROOT.glob("paddle_dp/*/__init__.py")} | {
        "models", "configs", "examples", "tools", "tests", "docs",
    }  # fmt: skip
    assert folders <= shown, f"docs/map.md does not show {folders - shown}"
    gone = {name for name in shown - {"faults", "decisions"} if name not in folders}
    assert not gone, f"docs/map.md shows folders that are not there: {gone}"


def test_commands_in_the_documentation_exist() -> None:
    from paddle_dp.cli import app

    verbs = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    said = {verb for page in PAGES for verb in re.findall(r"paddle-dp ([a-z]+)\b", page.read_text())}
    assert said <= verbs, f"not verbs of paddle-dp: {said - verbs}"
    assert verbs <= said, f"no page speaks of {verbs - said}"


def test_the_index_leads_to_every_page_and_both_readmes_to_the_index() -> None:
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    listed = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/README.md").read_text()))
    assert pages <= listed, f"docs/README.md lacks {sorted(pages - listed)}"
    chinese = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/README.zh.md").read_text()))
    twins = {re.sub(r"[._]zh\.md$", ".md", page) for page in chinese}
    missing = {re.sub(r"[._]zh\.md$", ".md", page) for page in pages} - twins
    assert not missing, f"docs/README.zh.md lacks {sorted(missing)}"
    for readme, index in {"README.md": "docs/README.md", "README_zh.md": "docs/README.zh.md"}.items():
        last = re.split(r"^## ", (ROOT / readme).read_text(), flags=re.M)[-1]
        assert f"]({index})" in last, f"the last section of {readme} does not lead to the index"


def test_both_readmes_show_the_same() -> None:
    """Every block of one is in the other, to the letter, and each names the same commands, keys and figures."""
    assert blocks("README.md") == blocks("README_zh.md")
    _assert_twins("README.md", "README_zh.md")


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_shows_what_the_english_one_shows(page: Path) -> None:
    english, chinese = str(page.relative_to(ROOT)).replace(".zh.md", ".md"), str(page.relative_to(ROOT))
    shown = [
        [(lang, re.sub(r"\s*#.*", "", text)) for lang, text in blocks(name)] for name in (english, chinese)
    ]
    if page == WITHOUT_LISTS:
        shown[0] = shown[0][: len(shown[1])]
    assert shown[0] == shown[1], "blocks differ in more than comments"
    if page != WITHOUT_LISTS:
        _assert_twins(english, chinese)


def _assert_twins(english: str, chinese: str) -> None:
    """Both have the same headings by level, table rows, words in `code`, and figures."""
    facts = []
    for page in (english, chinese):
        text = re.sub(r"^```.*?^```|<!--.*?-->", "", (ROOT / page).read_text(), flags=re.S | re.M)
        code, text = re.findall(r"`([^`\n]+)`", text), re.sub(r"`[^`\n]+`", "", text)
        figures = re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\]\([^)]*\)", "]", text))
        levels, rows = re.findall(r"^#+ ", text, re.M), len(re.findall(r"^\|", text, re.M))
        facts.append((levels, rows, sorted(set(code)), sorted(set(figures))))
    names = ("levels of headings", "table rows", "words in code", "figures")
    for name, said, meant in zip(names, *facts, strict=True):
        assert said == meant, f"{name} of {english} and {chinese} differ: {said} and {meant}"


def test_a_chinese_page_says_which_of_its_links_lead_to_english() -> None:
    """A link to a page of ours without a Chinese twin has （英文） after it; one with a twin leads to the twin."""
    for page in (ROOT / "README_zh.md", *CHINESE):
        text = page.read_text().replace("[English](", "(")
        for link, after in re.findall(r"\]\(([^):]+\.md)(?:#[^)]*)?\)(.{0,4})", text):
            if not link.endswith("zh.md"):
                assert after == "（英文）", f"{page.name}: no （英文） after {link}"
                stem = str(page.parent / link).removesuffix(".md")
                there = [end for end in (".zh.md", "_zh.md") if Path(stem + end).exists()]
                assert not there, f"{page.name}: {link} is there in Chinese"


def test_no_line_of_a_chinese_paragraph_ends_between_two_chinese_characters() -> None:
    """A browser shows a line break as a space, which Chinese does not have between words: a paragraph is one line."""
    wide = r"[\u2026\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
    for page in (ROOT / "README_zh.md", *CHINESE):
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
        broken = re.findall(rf".*{wide}\n *{wide}.*", prose)
        assert not broken, f"{page.relative_to(ROOT)}: join the lines of {broken[0]!r}"


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readme_is_short_and_plain(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(text.splitlines()) <= 130, "the README is a door: the rest belongs to docs/"
    assert not set("«»") & set(text)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_english_page_quotes_with_english_marks(page: Path) -> None:
    text = page.read_text().split("<!-- Below this line everything is written")[0]
    assert not re.findall(r".*[«»].*", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_its_question_its_task_or_its_answer(page: Path) -> None:
    """In the title or below it: a question, a bold task, or a claim that a tool has written."""
    if page.parent.name == "decisions" or "docs" not in page.parts:
        return
    title, first = [
        text for text in re.split(r"\n\s*\n", page.read_text()) if not text.startswith(("<", "[English]"))
    ][:2]
    assert re.search(r"[?？]", title + first) or first.startswith(("**", "> ")), first


def test_the_readme_translates_words_as_a_recipe_does() -> None:
    """Each row of its table: as many words of another tool as keys, and the hint for a word is that key."""
    rows = re.findall(r"^\| [\w ]+ \| (`.*) \| (`.*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 5
    for theirs, ours in rows:
        words, keys = re.findall(r"`(\w+)`", theirs), re.findall(r"`([\w.]+).*?`", ours)
        assert [find_hint(word, exactly=True).key for word in words] == keys  # type: ignore[union-attr]


def test_every_block_of_the_readme_is_covered() -> None:
    """By a test of this file that runs it; but for `pip install` and the whole suite, which .ci/run runs."""
    first, *others = blocks("README.md")
    assert [line.split(" && ")[-1] for line in first[1].splitlines()] == [TRAIN, "pytest -n auto"]
    assert "pip install --quiet -e '.[cpu,test]'" in (ROOT / ".ci/run").read_text()
    assert "pytest -n auto" in (ROOT / ".ci/run").read_text()
    kinds = {lang or text.split()[1] + " " + text.split()[2] for lang, text in others}
    assert kinds == {"diff", "yaml", "paddle-dp verify", "paddle-dp audit"}, "a new block needs a test"
    (recipe,) = [text for lang, text in others if lang == "yaml"]
    assert recipe in (ROOT / "configs/digits_mlp.yaml").read_text()


@pytest.mark.parametrize("verb", ["train", "verify", "audit"])
def test_the_commands_of_the_readme_print_what_it_shows(verb: str, tmp_path: Path) -> None:
    """Each line that it shows is printed, in its order, numbers aside. The training is one epoch long, the audit of two
    steps an epoch (the one audit of CI that starts for real and ends well). The comparison is of two steps, in forks,
    with fewer channels: `train --verify` starts one for real.
    """
    shown = {text.split()[2]: text.splitlines() for _, text in blocks("README.md") if text.startswith("$ ")}
    command, *lines = {"train": [f"$ {TRAIN} train.length=1epoch"], **shown}[verb]
    lines = lines or ["SAME: 2 ranks learn what one process learns, to rounding."]
    words = command.split()[2:] + [f"output_dir={tmp_path / 'run'}"] * (verb != "audit")
    if verb == "audit":
        words[1:1] = ["--steps", "1"]  # what stands behind the script is the script's
    if verb == "verify":
        said = run_command([*words, "--steps", "2", "model.widths=[8, 16]"], ROOT)
    else:
        done = run_program(
            *command_line(), *words, env={"COLUMNS": "100"}, timeout=200, status=int(verb == "audit")
        )
        said = done.stdout + done.stderr
    printed = [_without_numbers(line) for line in said.splitlines()]
    for line in lines:
        if "…" not in line:
            assert _without_numbers(line) in printed, f"{line!r} is not printed: {said}"
            del printed[: printed.index(_without_numbers(line)) + 1]
    if verb == "verify":
        assert "=49" in said  # the batch that cannot be shared equally
        assert "of a parameter's gradient on one rank would show" in " ".join(said.split())
        assert max(len(line) for line in said.splitlines() if str(tmp_path) not in line) <= 100
    if verb == "train":
        assert_proven(done.stdout, tmp_path / "run")


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e-]*", "N", line).rstrip()


def test_the_line_on_the_readmes_is_the_zoos_own() -> None:
    """No number of the examination is written by hand: the page is its tool's."""
    (line,) = re.findall(r"^> \d+ of \d+ silent faults .*$", (ROOT / "docs/zoo.md").read_text(), re.M)
    caught, faults, passed, honest = map(int, re.findall(r"\d+", line))
    loud = "ends the job with an error" in line  # one that is noticed, but not by the guard that should
    assert caught + loud == faults >= 40 and passed == honest >= 25
    assert line in (ROOT / "README.md").read_text()
    assert f"{faults} 个静默错误" in (ROOT / "README_zh.md").read_text()
    assert f"{honest} 个正确的模型" in (ROOT / "README_zh.md").read_text()


def test_every_yaml_in_the_pages_is_a_recipe(tmp_path: Path) -> None:
    """A whole one, or lines of one: those stand in the place of the GPT recipe's."""
    pages = ("README.md", "docs/recipes.md", "docs/parallelism.md", "docs/reliability.md")
    recipes = [text for page in pages for lang, text in blocks(page) if lang == "yaml"]
    recipes.append(blocks("docs/fine-tuning.md")[0][1])
    assert len(recipes) >= 6
    for text in recipes:
        if not all(f"{key}:" in text for key in ("model", "dataset", "optimizer", "train")):
            shown = {line.split(":")[0] for line in text.splitlines()}
            whole = (ROOT / "configs/gpt_tiny.yaml").read_text().split("callbacks:")[0].splitlines()
            text = "\n".join([text.rstrip(), *(line for line in whole if line.split(":")[0] not in shown)])
        (tmp_path / "shown.yaml").write_text(text)
        read_recipe(tmp_path / "shown.yaml")


def test_the_lists_in_the_docs_are_what_the_code_says() -> None:
    assert document.main(["--check"]) == 0


def test_check_prints_the_micro_batches_that_the_page_shows() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    ((command, shown),) = re.findall(r"`(paddle-dp check [^`]*)`\):\n\n```\n(.*?)```", page, re.S)
    printed = run_command([*shlex.split(command)[1:], "--no-run"], ROOT)
    assert {*shown.splitlines()} <= {*printed.splitlines()}, printed


@pytest.mark.long
def test_check_plans_the_bytes_that_the_page_shows() -> None:
    page = (ROOT / "docs/fine-tuning.md").read_text()
    (command,) = [text for _, text in blocks("docs/fine-tuning.md") if text.startswith("paddle-dp check")]
    for stage, sizes in (
        (3, r"plans ([\d.]+) GB on a rank, ([\d.]+)"),
        (2, r"stage 2 it is ([\d.]+) GB, ([\d.]+)"),
    ):
        printed = run_command([*shlex.split(command)[1:], f"strategy.sharding_stage={stage}"], ROOT)
        (planned,) = re.findall(r"weights ([\d.]+) GB,.*: ([\d.]+) GB in all", printed)
        assert re.findall(sizes, page) == [planned[::-1]], printed


def test_a_line_that_the_audit_of_a_page_names_is_the_loader_s(tmp_path: Path) -> None:
    page = (ROOT / "docs/start/your-script.md").read_text()
    (name, number) = re.findall(r"^FAULT · (\S+):(\d+) · samples-not-shared", page, re.M)[0]
    write_files("docs/start/your-script.md", tmp_path)
    assert "DataLoader" in (tmp_path / name).read_text().splitlines()[int(number) - 1]


def _assert_it_learned(printed: str, held_out: int) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+\] held-out: loss (\d+\.\d+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0] < 0.69, f"it did not learn: {printed}"
    assert f"each of the {held_out} held-out samples counted once" in printed


def test_both_scripts_of_the_readme_run_on_two_ranks(tmp_path: Path) -> None:
    """The plain loop, and the one with the six lines that replace its own, in forks that have what Paddle's launcher
    gives; tests/launch/test_script.py has `paddle-dp launch`."""
    (diff,) = [text.splitlines() for lang, text in blocks("README.md") if lang == "diff"]
    assert sum(line.startswith("+") for line in diff) == 6, "the README speaks of six lines in"
    assert {line[0] for line in diff} == set("+- ")
    for name, sign in (("plain.py", "-"), ("own.py", "+")):
        (tmp_path / name).write_text("\n".join(line[1:] for line in diff if line[0] in f" {sign}") + "\n")
    run_script(tmp_path / "plain.py")
    _assert_it_learned(run_script(tmp_path / "own.py"), 360)


def test_the_script_without_yaml_runs_on_two_ranks(tmp_path: Path) -> None:
    """docs/library.md, in forks that have what Paddle's launcher gives."""
    (script,) = [text for lang, text in blocks("docs/library.md") if lang == "python"]
    (tmp_path / "own.py").write_text(script)
    _assert_it_learned(run_script(tmp_path / "own.py"), 297)


# Blocks of docs/start that no test runs: the audit (tests/audit runs others), and a layout (tests/axes).
NOT_RUN = {
    "paddle-dp audit --ranks 2 plain.py",
    "paddle-dp verify conv.yaml --ranks 2 model.use=mine.model.WaveChain",
}


def test_every_command_of_the_first_pages_is_run_or_listed() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/start/*.md") if page.suffixes == [".md"])
    unmarked = re.findall(r"(?<!<!-- run -->\n)^```bash\n(.*?)^```", pages, re.S | re.M)
    assert all(any(block.startswith(known) for known in NOT_RUN) for block in unmarked), unmarked
    assert len(unmarked) == len(NOT_RUN)


@pytest.mark.parametrize(
    "page",
    # first-run: kill -9 and --resume of real jobs are in tests/train/test_resume.py and tests/faults in every run
    ["install", pytest.param("first-run", marks=pytest.mark.long), "your-script", "your-data", "your-model"],
)
def test_the_marked_commands_of_the_first_pages_run(page: str, tmp_path: Path) -> None:
    """`<!-- run -->` above a block of bash; files are the blocks whose first line names them, of any of the pages."""
    for other in ROOT.glob("docs/start/*.md"):
        write_files(str(other.relative_to(ROOT)), tmp_path)
    marked = re.findall(
        r"^<!-- run -->\n```bash\n(.*?)^```", (ROOT / f"docs/start/{page}.md").read_text(), re.S | re.M
    )
    assert marked
    printed = "".join(_typed("\n".join(marked), tmp_path))
    said = {"install": "ready", "first-run": "the same numbers", "your-model": "SAME: 2 ranks"}
    assert printed.count(said.get(page, "held-out samples counted once")) == 1 + (page == "your-data")


def _typed(block: str, folder: Path) -> Iterator[str]:
    """What the commands of a block print. Those that start ranks, or check, do so in forks; tests of this file start
    the README's and the worked example's for real."""
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    if "&" in block:
        lines = [["bash", "-ec", block]]
    env = shell_variables(folder / "bin")
    for words in filter(None, lines):
        if words[0] == "paddle-dp" and words[1] in ("train", "verify", "check"):
            yield run_command(words[1:], folder)
        elif words[:4] == ["paddle-dp", "launch", "--ranks", "2"]:
            yield run_script(folder / words[4])
        else:
            yield run_program("bash", "-ec", '"$@"', "-", *words, folder=folder, env=env, timeout=200).stdout


def module_of(page: str, name: str) -> ModuleType:
    """The module that a page's file is."""
    (code,) = [text for _, text in blocks(page) if text.startswith(f"# {name}\n")]
    module = ModuleType(name.removesuffix(".py").replace("/", "."))
    exec(code, vars(module))
    return module


def test_every_file_of_the_page_on_parts_is_the_reader_s_and_imports_public_names(tmp_path: Path) -> None:
    files = write_files(PARTS, tmp_path)
    assert len(files) == len(set(files)) == 15
    assert all(re.fullmatch(r"mine/\w+\.py|\w+\.yaml", name) for name in files), files
    private = re.compile(r"^(?:from|import) .*(?:\.| import )_.*$", re.M)
    assert not [line for name in files for line in private.findall((tmp_path / name).read_text())]


def test_the_worked_example_trains(tmp_path: Path) -> None:
    """docs/add-a-part.md, done as it says, on two ranks in forks: a recipe whose parts are all the reader's. Ranks that
    start for real, in the reader's folder, find them, too."""
    write_files(PARTS, tmp_path)
    used = ("model", "data", "losses", "optimizers", "schedules", "callbacks")
    checked = run_command(["check", "moons.yaml"], tmp_path)
    assert f"imported: {', '.join(f'mine/{name}.py' for name in used)}\n" in checked
    trained = run_command(["train", "moons.yaml", "--ranks", "2"], tmp_path)
    assert re.search(r"^stopped at step \d+: the loss is 0\.0\d+$", trained, re.M)
    words = ("train", "moons.yaml", "--ranks", "2", "train.length=1 step", "output_dir=started")
    assert "1 step in " in run_program(*command_line(), *words, folder=tmp_path).stdout
    assert events(tmp_path / "runs/moons", "evaluated")[-1]["acc1"] > 0.9
    assert all((tmp_path / f"runs/moons/code/mine/{name}.py").exists() for name in used)


@pytest.mark.parametrize("loss", ["mine.pairs.Alike", "mine.terms.Terms"])
def test_with_the_strategy_and_the_pairs_of_the_page_two_ranks_are_one_process(
    loss: str, tmp_path: Path
) -> None:
    write_files(PARTS, tmp_path)
    words = f"--steps 2 strategy.use=mine.strategies.Plain loss='{{use: {loss}}}'"
    printed = run_command(shlex.split(f"verify moons.yaml --ranks 2 {words}"), tmp_path)
    assert "SAME: 2 ranks learn what one process learns" in printed


@pytest.mark.parametrize(
    "words",
    [
        "lines.yaml",
        "lines.yaml strategy='{use: hybrid, pipeline: 2}' train.micro_batches=2",
        "towers.yaml",
        "moons.yaml model='{use: mine.deep, depth: 6}' optimizer='{use: paddle.optimizer.RAdam, weight_decay: 0.01}' "
        "schedule='{use: paddle.optimizer.lr.StepDecay, learning_rate: 0.1, step_size: 100}' strategy.recompute=full",
    ],
)
def test_the_other_examples_of_the_page_on_parts_train(words: str, tmp_path: Path) -> None:
    write_files(PARTS, tmp_path)
    printed = run_command(shlex.split(f"train {words} --ranks 2 train.length='4 steps'"), tmp_path)
    assert "held-out samples counted once" in printed and "4 steps in " in printed


@pytest.mark.parametrize(
    ("file", "change", "command", "told"),
    [
        ("lines.yaml", ("linear1", "linaer1"), "check lines.yaml", ""),
        ("moons.yaml", ("mine.model.MoonNet, width: 16", "mine.deep, depth: 3"), "check moons.yaml", ""),
        (
            "lines.yaml",
            ('    "encoder.layers.*.linear2": rowwise\n', ""),
            "train lines.yaml --ranks 2",
            "Cut encoder.layers.0.linear2 as rowwise",
        ),
        (
            "moons.yaml",
            ("train: ", "strategy: {use: hybrid, pipeline: 2}\ntrain: "),
            "train moons.yaml --ranks 2",
            "needs all of a model in its `blocks`",
        ),
    ],
)
def test_a_mistake_in_an_example_is_answered_as_the_page_says(
    file: str, change: tuple[str, str], command: str, told: str, tmp_path: Path
) -> None:
    """An answer without `told` stands on the page. Ranks are forks; tests/faults/test_refused_start.py starts refused
    jobs, whose status is 2."""
    write_files(PARTS, tmp_path)
    recipe = tmp_path / file
    assert change[0] in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(*change))
    said = run_command(shlex.split(command), tmp_path, status=2 if command.startswith("check") else 1)
    shown = [text for _, text in blocks(PARTS) if text.startswith(f"{file}:")]
    assert told in said if told else any(text in said for text in shown), said


def test_the_blocks_of_paddle_s_resnet_are_those_of_the_page() -> None:
    from paddle_dp.part import read_part
    from paddle_dp.recipe.yaml_document import parse

    (text,) = [text for _, text in blocks(PARTS) if "use: paddle.vision.models" in text]
    settings = parse(text, "page").values["model"]
    assert read_part("models", settings).annotation is not None  # its names are compared with the layers
    settings["blocks"][0][0] = "conv2"
    with pytest.raises(RecipeError, match="no layer is called 'conv2'"):
        read_part("models", settings)


def test_the_loss_of_the_page_is_its_formula_and_without_gamma_cross_entropy() -> None:
    import numpy as np
    import paddle

    focal = module_of(PARTS, "mine/losses.py").Focal
    draw = np.random.default_rng(0)
    scores, targets = draw.normal(size=(7, 3)).astype("float32"), draw.integers(0, 3, 7)
    p = (np.exp(scores) / np.exp(scores).sum(1, keepdims=True))[np.arange(7), targets]
    given = paddle.to_tensor(scores), paddle.to_tensor(targets)
    for gamma in (0.0, 1.5):
        total, count = focal(gamma=gamma)(*given)
        assert count == 7 and abs(float(total) - float((-((1 - p) ** gamma) * np.log(p)).sum())) < 1e-5
    assert float(focal().scores(*given)["acc1"]) == (scores.argmax(1) == targets).sum()


def test_the_several_terms_of_the_page_are_their_means() -> None:
    import paddle
    from paddle.nn import functional as F

    outputs, targets = paddle.to_tensor([[2.0, 1.0], [0.5, 3.0], [1.0, 1.5]]), paddle.to_tensor([0, 1, 0])
    losses = F.cross_entropy(outputs, targets, reduction="none")
    total, count = module_of(PARTS, "mine/terms.py").Terms()(outputs, targets)
    assert abs(float(total) / count - float(losses.mean() + 2 * losses[1])) < 1e-6


def test_the_loss_over_pairs_of_the_page_is_its_formula() -> None:
    import numpy as np
    import paddle

    draw = np.random.default_rng(0)
    outputs, targets = draw.normal(size=(7, 3)).astype("float32"), draw.integers(0, 3, 7)
    unit = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    others = np.exp(unit @ unit.T) * (1 - np.eye(7))
    alike = (targets[:, None] == targets) & ~np.eye(7, dtype=bool)
    wanted = -np.log(others / others.sum(1, keepdims=True) + np.eye(7))[alike].sum()
    total, count = module_of(PARTS, "mine/pairs.py").Alike()(
        paddle.to_tensor(outputs), paddle.to_tensor(targets)
    )
    assert float(count) == alike.sum() > 0
    assert abs(float(total) - wanted) < 1e-4


def test_the_callback_of_the_page_ends_a_training() -> None:
    """docs/add-a-part.md: the callback is given a recipe's run or none, and every method that it names is one."""
    from types import SimpleNamespace

    from paddle_dp.train.overrides import MOMENTS

    page = (ROOT / PARTS).read_text()
    enough = module_of(PARTS, "mine/callbacks.py").Enough
    said: list[str] = []
    moment = SimpleNamespace(numbers={"loss": 0.4}, trainer=SimpleNamespace(stop=said.append))
    for callback in (enough(None, below=0.3), enough(below=0.5)):
        callback.step(moment)
    assert said == ["the loss is 0.4"]
    section = page.split("## A callback")[1].split("\n## ")[0]
    written = re.findall(r"`(\w+\(moment.*?\))`", section)
    assert sorted(written) == sorted(f"{name}({', '.join(given)})" for name, given in MOMENTS.items())
