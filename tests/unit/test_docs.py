"""The documentation is true: its tables, its tree, its links. Its commands are run by tests/ranks/test_commands.py."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from phalanx import env, torch_compat
from phalanx.diagnose.doctor import software
from tests.conftest import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


def test_every_variable_stands_in_the_page() -> None:
    page = (REPOSITORY / "docs/environment.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == {row.name: row.meaning for row in env.TABLE}


def test_the_tree_is_true() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    tree = page.partition("```\n")[2].partition("```")[0]
    for path in (REPOSITORY / "src/phalanx/launch").glob("[a-z]*.py"):
        assert path.name in tree, f"launch/{path.name} is missing from docs/architecture.md"
    for path in (REPOSITORY / "src/phalanx").iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert path.name in tree, f"{path.name} is missing from docs/architecture.md"
    for name in re.findall(r"^\s+([a-z_]+\.py)", tree, re.MULTILINE):
        assert list((REPOSITORY / "src/phalanx").rglob(name)), f"{name} is in docs/architecture.md and nowhere else"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


_READS = re.compile(
    r"(json|pickle|torch|marshal)\.loads?\(|\.unpack(_from)?\(|mmap\.mmap\(|messages\.(decode|fit|open_sealed)\(|\.recv\(|store\.get\("
    r"|run_files\.(read|open_to_read)\(|read_text\(|read_bytes\(|from_buffer_copy|(?<![\w.])(eval|exec)\(|literal_eval"
)


def test_every_reader_stands_in_the_page_on_security() -> None:
    source = REPOSITORY / "src/phalanx"
    page = (REPOSITORY / "docs/security.md").read_text()
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        if _READS.search(path.read_text()) and f"`{name.partition('/')[0]}/`" not in page:
            assert f"`{name}`" in page or name == "messages.py", f"{name} reads, and docs/security.md does not say what"


TRANSLATED = [*REPOSITORY.glob("*.zh-CN.md"), *REPOSITORY.glob("docs/*.zh-CN.md")]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translation_shows_the_same(page: Path) -> None:
    """The Chinese page has the same commands, messages, pictures, links and figures as the English one."""
    chinese = page.read_text()
    english = page.with_name(page.name.replace(".zh-CN", "")).read_text()
    fences = r"```(?:sh|python)?\n(.*?)```"
    strip = re.compile(r"\s*#.*")
    for ours, theirs in zip(
        re.findall(fences, english, re.DOTALL), re.findall(fences, chinese, re.DOTALL), strict=True
    ):
        assert [strip.sub("", line) for line in ours.splitlines()] == [
            strip.sub("", line) for line in theirs.splitlines()
        ]
    assert _links(english) == _links(chinese)
    assert _messages(english, "it says") == _messages(chinese, "提示")
    assert re.findall(r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", english) == re.findall(
        r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", chinese
    )


def _links(text: str) -> set[str]:
    """Without the place on the page, whose name is translated, and whichever language a page is in."""
    targets = {target.partition("#")[0].replace(".zh-CN", "") for target in re.findall(r"\]\(([^)]+)\)", text)}
    return {target for target in targets if not target.endswith(("README.md", "many-machines.md"))}


def _messages(text: str, heading: str) -> list[str]:
    """The first column of every table of what a program says."""
    tables = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [row.split("|")[1].strip() for table in tables for row in table.splitlines()]


def test_the_smoke_tests_exist() -> None:
    for line in (REPOSITORY / "tests" / "smoke.txt").read_text().splitlines():
        file, _, name = line.partition("[")[0].partition("::")
        assert f"def {name or 'test_'}" in (REPOSITORY / file).read_text(), line


def test_the_oldest_versions_are_the_same_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    oldest = torch_compat.as_text(torch_compat.OLDEST)
    assert f"torch>={oldest}" in project["dependencies"]
    assert f"{oldest} and newer" in (REPOSITORY / "docs" / "dependencies.md").read_text()
    assert project["requires-python"] == f">={'.'.join(map(str, software._OLDEST_PYTHON))}"
