"""The documentation is true: its tables, its tree, its links. Its commands are run by tests/ranks/test_commands.py."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
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


SOURCE = REPOSITORY / "src/phalanx"
_NAMED = re.compile(r"(?<![\w./])[\w/]+(?:\.(?:py|c|h)\b|/(?!\w))")
"""A file or a directory, in a line about a directory."""


def _tree() -> Iterator[tuple[list[Path], list[Path]]]:
    """Of every line of the tree in docs/architecture.md: what it is about, and what it names of that."""
    page = (REPOSITORY / "docs/architecture.md").read_text()
    above = {0: REPOSITORY}
    for line in page.partition("## The tree\n")[2].split("```")[1].strip().splitlines():
        about, _, text = line.strip().partition("  ")
        if about and not about.startswith("#"):
            indent = len(line) - len(line.lstrip())
            found = [above[indent] / name for name in about.split()]
            above[indent + 2] = found[0]
            yield found, [found[0] / name for name in _NAMED.findall(text) if found[0].suffix == ""]


def test_the_tree_is_true() -> None:
    """Every package stands in it, and every module directly below phalanx; and nothing that is not there."""
    lines = list(_tree())
    about = {path for found, _ in lines for path in found}
    packages = {path.parent for path in SOURCE.rglob("__init__.py")}
    assert {path for path in about if SOURCE in (path, *path.parents)} == packages | set(SOURCE.glob("*.py"))
    assert [path for path in about if not path.exists()] == []
    named = [path for _, names in lines for path in names]
    assert [path for path in named if not path.exists()] == []
    assert len(named) > len(packages), "most lines name modules"


def test_paths_in_the_page_on_architecture_exist() -> None:
    """Paths are those of the repository or below src/phalanx; a bare name is that of one module."""
    text = "".join((REPOSITORY / "docs/architecture.md").read_text().split("```")[::2])
    paths = [name for name in re.findall(r"`([^`\s]+)`", text) if "/" in name or Path(name).suffix]
    assert len(paths) > 40
    for path in paths:
        is_module = "/" not in path and len(list(SOURCE.rglob(path))) == 1
        assert is_module or (REPOSITORY / path).exists() or (SOURCE / path).exists(), path


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
    assert _messages(english, "message") == _messages(chinese, "提示")
    assert re.findall(r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", english) == re.findall(
        r"\| [^|]*?([\d.]+) (?:s|MiB|秒) ", chinese
    )


def _links(text: str) -> set[str]:
    """Without the place on the page, whose name is translated, and whichever language a page is in."""
    targets = {target.partition("#")[0].replace(".zh-CN", "") for target in re.findall(r"\]\(([^)]+)\)", text)}
    return {target for target in targets if not target.endswith(("README.md", "many-machines.md"))}


def _messages(text: str, heading: str) -> list[str]:
    """Returns the first column of every table of messages."""
    tables = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [row.split("|")[1].strip() for table in tables for row in table.splitlines()]


PROOFS = {"simulated": "模拟", "fake": "替身", "on CPUs": "在 CPU 上", "not run": "未运行"}


def _proofs(page: str, what: str) -> list[tuple[set[str], list[str]]]:
    """What stands behind each row on GPUs: the words for it, and the tests."""
    text = (REPOSITORY / "docs" / page).read_text()
    tables = re.findall(rf"^\| {what} \| .*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.strip("|").split("|") for table in tables for row in table.splitlines()]
    return [(set(re.split(r", |、", how.strip())), re.findall("`(.*?)`", tests)) for _, how, tests in rows]


def test_every_claim_about_gpus_has_a_test_or_was_not_run() -> None:
    english, chinese = _proofs("gpu.md", "what"), _proofs("gpu.zh-CN.md", "内容")
    assert len(english) > 40
    for how, tests in english:
        assert how <= set(PROOFS), how
        assert ("not run" in how) == (not tests), (how, tests)
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name or 'test_'}" in (REPOSITORY / file).read_text(), test
    assert [({PROOFS[word] for word in how}, tests) for how, tests in english] == chinese


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
