"""Rewrites links of the pages for the site: a hook of mkdocs (mkdocs.yml).

On GitHub and in an editor a page links to files of the repository and to its Chinese twin. The site holds neither file:
the first becomes the name of the file, the second the page under zh/. mkdocs warns of a link that leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

FENCE = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$|`[^`\n]*`(?!\]))", re.S | re.M)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
# The site has a switch of languages.
TO_TWIN = re.compile(r"^\[(?:中文|English)\]\([^)]*\)\n| *\[(?:中文|English)\]\([^)]*\)$", re.M)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of one page, outside code."""
    source = PurePosixPath(page.file.src_uri)
    docs = Path(config["docs_dir"])

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(docs / source.parent / target)
        if not os.path.exists(path):
            return match[0]  # mkdocs warns
        inside = os.path.relpath(path, docs)
        if inside.startswith(".."):
            file = os.path.relpath(path, docs.parent)
            return text if PurePosixPath(file).name in text else f"{text} (`{file}`)"
        twin = f"{inside.removesuffix('.md')}.zh.md"
        to_chinese = inside.endswith(".zh.md") and not page.url.startswith("zh/")
        to_english = source.name.endswith(".zh.md") and (docs / twin).exists()
        if to_chinese or to_english:  # mkdocs-static-i18n would stay within the page's language
            url = os.path.relpath(_url(inside), PurePosixPath(page.url).parent)
            return f'<a href="{url}{anchor}">{text}</a>'
        if inside.endswith(".zh.md"):
            return f"[{text}]({target.removesuffix('.zh.md')}.md{anchor})"
        if os.path.isdir(path):
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return match[0]

    parts = FENCE.split(TO_TWIN.sub("", markdown))
    return "".join(part if number % 2 else LINK.sub(rewrite, part) for number, part in enumerate(parts))


def _url(page: str) -> str:
    """`start/install.zh.md` → `zh/start/install.html`: the place of a page on the site."""
    name = page.removesuffix(".md").removesuffix(".zh")
    name = f"{name.removesuffix('README')}index" if PurePosixPath(name).name == "README" else name
    return f"{'zh/' * page.endswith('.zh.md')}{name}.html"
