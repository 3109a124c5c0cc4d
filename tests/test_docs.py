"""The README and the pages: links lead somewhere, the example is the interface, CI runs the README's commands."""

import re
from pathlib import Path

import pytest

import k3dsl

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_linked_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert [p.name for p in PAGES[1:] if p.name != "index.md" and f"({p.name})" not in index] == []


def test_the_first_two_commands_make_an_environment_and_run_demo_and_tests():
    commands = re.findall(r"^\$ (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)[:2]
    assert all(
        c.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e '.[nvidia,dev]' && ") for c in commands
    )
    assert [c.split(" && ")[-1] for c in commands] == [".venv/bin/k3dsl demo", ".venv/bin/pytest -q -n auto"]
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_example_uses_names_that_there_are():
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    compile(example, "README.md", "exec")
    names = set(re.findall(r"k3dsl\.(\w+)", example))
    assert names
    assert names <= set(k3dsl.__all__)
