"""References in README and docs/ exist: files, anchors, modules, commands, benchmarks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.command_line import commands as every_command
from support.command_line import parsed

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "results" / "README.md",
    ]
)
OURS = ("src", "tests", "examples", "benchmarks", "deploy", "docs", "results", "tools", ".ci", ".github")
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in (*map(ROOT.joinpath, OURS), ROOT)
    for path in (folder.iterdir() if folder == ROOT else folder.rglob("*"))
    if path.is_file()
}
QUESTIONS = 17
"""number of questions in docs/architecture.md, each answered by definitions in files"""


def prose(page: Path) -> str:
    """Return a page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).lower().replace(" ", "-")
        for title in found
    }


def exists(name: str) -> bool:
    """Whether a file has this name, or a path that ends with it."""
    return name in FILES or any(path.endswith(f"/{name}") for path in FILES)


def test_the_pages_are_found() -> None:
    assert len(PAGES) > 25 and ROOT / "README.md" in PAGES and len(FILES) > 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_references_of_a_page_exist(page: Path) -> None:
    text = prose(page)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    dead += [name for name in re.findall(r"`([\w./-]+\.(?:py|yaml))`", text) if not exists(name)]
    whole = page.read_text()
    dead += [
        name
        for name in re.findall(r"-m benchmarks\.(\w+)", whole)
        if name != "NAME" and not exists(f"benchmarks/{name}.py")
    ]
    for module in re.findall(r"(?:^::: |python -m )(planaria(?:\.\w+)*)", whole, re.MULTILINE):
        path = f"src/{module.replace('.', '/')}"
        dead += [] if {f"{path}.py", f"{path}/__init__.py"} & FILES else [module]
    assert not dead


def test_every_command_on_a_page_exists() -> None:
    known = dict(every_command())
    groups = {name.partition(" ")[0] for name in known if " " in name}
    called = {
        (page.name, name)
        for page in PAGES
        for code in re.findall(r"^```.*?^```$|^ {4}[^\n]*$|`[^`\n]+`", page.read_text(), re.MULTILINE | re.DOTALL)
        for name in re.findall(r"^[ `]*(?:\$ |\.venv/bin/)?planaria ([a-z]+(?: [a-z]+)?)", code, re.MULTILINE)
    }
    assert len(called) > 40
    first = {(page, name): name.partition(" ")[0] for page, name in called}
    assert [
        (page, name) for (page, name), word in first.items() if (name if word in groups else word) not in known
    ] == []


def commands(page: Path) -> list[list[str]]:
    """The ``planaria`` command lines in a page's blocks of code, in words, without the program's name."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(block for language, block in blocks if language in ("", "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("planaria ")]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_every_command_on_a_page_parses(page: Path) -> None:
    for words in commands(page):
        if not words[0].startswith("-"):
            assert parsed(words).command.callback, words


def test_generated_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert (ROOT / "docs" / "settings.md").read_text() == reference.settings(), "run `python tools/reference.py`"
    assert (ROOT / "docs" / "commands.md").read_text() == reference.commands(), "run `python tools/reference.py`"


def test_the_readme_fits_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 500


OWN_LOOP = """
import planaria, torch
from transformers import LlamaConfig, LlamaForCausalLM

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        self.causal = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))

    def forward(self, batch):
        return self.causal(batch, labels=batch)

model = Own()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randint(32, (40, 8)), batch_size=4)
"""
"""what the README's own loop takes for granted"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    shell = re.findall(r"^(\w[^#\n]*?)(?: +#.*)?$", "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)), re.M)
    makes = [line.split()[1] for line in shell if line.startswith("make ")]
    ci = (ROOT / ".ci" / "run").read_text()
    assert makes and all(re.search(rf"^for target in .*\b{name}\b", ci, re.M) for name in makes), "run by .ci/run"
    assert "source .venv/bin/activate" in shell, "make demo installs there"
    lines = [line.split() for line in shell if not line.startswith(("make ", "source "))]
    assert len(lines) == 3
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(programs) == 2
    for words in lines:
        subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", programs[0]], cwd=tmp_path, check=True)
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", OWN_LOOP + programs[1]], cwd=tmp_path, check=True, env=environment)


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    commands = []
    for file in (ROOT / "benchmarks").glob("*.py"):
        for call in re.findall(
            r'^if __name__ == "__main__":\n    start\((.+?)\)$', file.read_text(), re.MULTILINE | re.DOTALL
        ):
            commands += [f"{file.stem} {case}" for case in re.findall(r"(\w+)=", call)] or [file.stem]
    assert len(commands) > 80 and not [name for name in commands if f"| `{name}` |" not in listed]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs | {"index.md", "contributing.md", "changelog.md", "results/README.md"} == set(nav)
    assert len(nav) == len(set(nav))


def test_the_questions_are_answered_by_existing_definitions() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is …?")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == QUESTIONS
    answer_form = re.compile(r"`(\w+)` in `([\w/]+\.py)`")
    for question, answer in rows:
        definitions = answer_form.findall(answer)
        assert question.strip().endswith("?") and definitions
        assert not re.sub(r"[,\s]", "", answer_form.sub("", answer)), "answers consist of names in files"
        for name, file in definitions:
            module = ast.parse((ROOT / "src" / "planaria" / file).read_text())
            defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert name in defined, f"docs/architecture.md: {file} does not define {name}"


def test_every_hint_to_install_an_extra_works_outside_the_checkout() -> None:
    """Messages take the command from ``errors.install_command``; pages write ``pip install 'planaria[EXTRA]'``."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module in (ROOT / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(module.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                place = {"install_command": 0, "missing_package": 2}.get(call.func.id)
                named = call.args[place] if place is not None and len(call.args) > place else None
                assert not isinstance(named, ast.Constant) or named.value in extras, (module, ast.unparse(call))
    hints = re.compile(r"pip install (?!the )(?:-e )?'?[.\w]*\[(\w+)]'?")
    for page in [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for hint in hints.finditer(page.read_text()):
            assert hint[0] == f"pip install 'planaria[{hint[1]}]'" and hint[1] in extras, (page, hint[0])


def test_pages_link_to_files_that_the_site_contains() -> None:
    """Of files beside docs/, the site has those in a few folders; ``mkdocs`` refuses links to others."""
    folders = re.search(r"^FOLDERS = (\(.*\))$", (ROOT / "tools" / "site.py").read_text(), re.MULTILINE)
    assert folders is not None
    contained = ast.literal_eval(folders[1])
    links = [
        (page.name, link)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for link in re.findall(r"\]\(\.\./([^)#]+)", page.read_text())
    ]
    assert len(links) > 20 and not [found for found in links if "/" in found[1] and not found[1].startswith(contained)]
