"""docs/composes.md and the tests go together: each cell names tests that exist, each test of ours is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "composes.md").read_text(encoding="utf-8")
WITHOUT_TEST = ("–", "not tested")


def _cells() -> dict[tuple[str, str], str]:
    """(feature, column): what the table says."""
    lines = [line.strip("|\n ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
    columns = [column.strip() for column in lines[0]][-4:]
    return {(row[0].strip(), column): cell for row in lines[2:] for column, cell in zip(columns, row[1:], strict=True)}


def _named() -> dict[tuple[str, str], list[str]]:
    """(feature, column): the tests that the list below the table names."""
    found = {}
    for section in PAGE.split("\n### ")[1:]:
        feature, _, listed = section.partition("\n")
        for column, tests in re.findall(r"^- ([\w -]+): (.+)$", listed, re.MULTILINE):
            found[feature, column] = re.findall(r"`([^`]+)`", tests)
    return found


def _tests_in(file: str) -> set[str]:
    path = HERE / file
    assert path.is_file(), f"{file} is named in docs/composes.md and does not exist"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_cell_that_promises_something_names_its_tests() -> None:
    promising = {cell for cell, text in _cells().items() if text not in WITHOUT_TEST}
    assert len(promising) > 70
    assert promising == set(_named())


def test_every_test_that_is_named_exists() -> None:
    for cell, tests in _named().items():
        assert tests, cell
        for test in tests:
            file, _, name = test.partition("::")
            assert name in _tests_in(file), f"{cell} names {test}, which does not exist"


def test_every_test_of_composition_is_named() -> None:
    for path in HERE.glob("test_composes_*.py"):
        if path != Path(__file__):
            missing = [name for name in _tests_in(path.name) if name.startswith("test_") and name not in PAGE]
            assert not missing, f"docs/composes.md does not name {missing} of {path.name}"


def test_every_note_is_explained_and_every_explanation_used() -> None:
    used = {number for text in _cells().values() for number in re.findall(r"\[(\d)\]", text)}
    assert used == set(re.findall(r"^(\d)\. ", PAGE, re.MULTILINE))
