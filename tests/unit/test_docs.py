"""The documentation is true: its tables, its tree, its links. Its commands are run by tests/ranks/test_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx import env
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


def test_both_readmes_show_the_same() -> None:
    """The Chinese page has the same commands, pictures, links and figures as the English one."""
    english, chinese = ((REPOSITORY / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    fences = r"```(?:sh|python)\n(.*?)```"
    strip = re.compile(r"\s*#.*")
    for ours, theirs in zip(
        re.findall(fences, english, re.DOTALL), re.findall(fences, chinese, re.DOTALL), strict=True
    ):
        assert [strip.sub("", line) for line in ours.splitlines()] == [
            strip.sub("", line) for line in theirs.splitlines()
        ]
    links = r"\]\(([^)]+)\)"
    assert set(re.findall(links, english)) - {"README.zh-CN.md"} == set(re.findall(links, chinese)) - {"README.md"}
    assert re.findall(r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", english) == re.findall(
        r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", chinese
    )
