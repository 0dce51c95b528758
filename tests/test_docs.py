"""Commands in README and docs: every one that is complete passes the rules of its command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grpo_cli.compose import load
from grpo_cli.options import conf_dir, read_groups
from grpo_cli.overrides import jobs

TOP = Path(__file__).parents[1]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]


def commands() -> dict[str, list[str]]:
    """The words behind `grpo` of every line of a code block that starts or evaluates a run and leaves nothing open."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for line in re.split(r"\n|&&", block.replace("\\\n", " ")) if not language else ():
                command = re.match(r"\s*\S*\bgrpo (train|eval|validate|plan)\b", line)
                if command and "…" not in line:
                    found[f"{page.name}: {line.strip()}"] = shlex.split(line, comments=True)[1:]
    return found


COMMANDS = commands()


def test_the_commands_are_found():
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_docs_has_no_error(line):
    command, *words = COMMANDS[line]
    sweep, refused = jobs([word for word in words if word != "-m"], read_groups([conf_dir()]))
    assert not refused
    for job in sweep if "-m" in words else [words]:
        assert [finding.line() for finding in load([w for w in job if not w.startswith("--")], command).errors] == []
