"""The documentation as a site: it builds strictly, opens from disk, and fetches nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.house.programs import ROOT, run_python

NEEDED = ("mkdocs", "material", "mkdocs_static_i18n", "mkdocs_awesome_nav", "jieba")


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        pytest.skip(f"the site is not built: {', '.join(missing)} missing; pip install -e '.[docs]'")
    command = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    run_python(*command, env={"NO_MKDOCS_2_WARNING": "1"}, timeout=200)
    pages = {page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.html")} - {"404.html"}
    assert {"index.html", "start/install.html", "zh/which-strategy.html", "reference/api.html"} <= pages
    for page in pages:
        text = (tmp_path / page).read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert not fetched, f"{page} fetches {fetched}"
    assert '<a href="../recipes.html#the-recipe">English</a>' in (tmp_path / "zh/recipes.html").read_text()
    assert not (dead := dead_anchors(tmp_path)), f"links to anchors that are not there: {dead}"
    assert menu(tmp_path / "zh/index.html") == menu(tmp_path / "index.html")
    index = json.loads((tmp_path / "search/search_index.js").read_text(encoding="utf-8").partition("=")[2])
    pages_of_word = {entry["location"] for entry in index["docs"] if "参数\u200b服务器" in entry["text"]}
    assert "zh/which-strategy.html" in {location.partition("#")[0] for location in pages_of_word}, (
        "no search for Chinese words"
    )
    assert "start/install.html" in {entry["location"] for entry in index["docs"]}


def menu(page: Path) -> list[str]:
    """Returns the pages that the menu of a page of the site names, in order, relative to the language's folder."""
    links = re.findall(r'<a href="([^":#]+)" class="md-nav__link', page.read_text(encoding="utf-8"))
    return [link.removeprefix("../") for link in links]


def dead_anchors(site: Path) -> list[str]:
    """Returns `page: link` for each link to an anchor that its page lacks; mkdocs sees no link written as HTML."""
    texts = {
        page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"
    }
    ids = {page: set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text)) for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        for link in set(re.findall(r'<a\b[^>]*?href="([^":]*#[^"]+)"', text)):
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            if anchor not in ids.get(target, ()):
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead


def test_every_chinese_page_has_an_english_one() -> None:
    alone = [page for page in ROOT.glob("docs/**/*.zh.md") if not Path(f"{str(page)[:-6]}.md").exists()]
    assert not alone


def test_the_page_of_the_python_api_is_what_the_docstrings_say() -> None:
    run_python("tools/api_page.py", "--check")
