"""What `make docs` adds to mkdocs.yml: pages from outside docs/, formulas without JavaScript, plain docstring roles."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""files beside docs/ → what they are called on the site"""
FOLDERS = ("deploy", "examples", "results")
"""folders beside docs/ whose files pages link to"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the files that pages link to, which lie outside docs/."""
    for name, page in PAGES.items():
        text = re.sub(r"\[([^]]*)\]\((?:LICENSE|SECURITY\.md)\)", r"\1", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=_inside(text)))
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).iterdir()) if path.is_file()):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links out of docs/ at what :func:`on_files` has added."""
    markdown = markdown.replace("](../docs/", "](../")
    for folder in FOLDERS:
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw themselves: no script, no network."""
    return re.sub(r'<(span|div) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', _formula, html, flags=re.DOTALL)


class Roles(Extension):
    """``:func:`merge` `` in a docstring is ``merge`` on the page."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute that it reads."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = re.sub(r":(?:func|class|meth|data|mod):`~?([^`]*)`", r"`\1`", obj.docstring.value)


def _inside(text: str) -> str:
    """Links of a file beside docs/, as the site has them."""
    for name, page in PAGES.items():
        text = re.sub(rf"\]\({re.escape(name)}(#[\w-]+)?\)", rf"]({page}\1)", text)
    return text.replace("](docs/", "](")


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(re.sub(r"\\tag\{(.*?)\}", r"\\qquad(\1)", unescape(found[2])), display=display)
