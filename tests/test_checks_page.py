"""docs/rules.md is what the rules say."""

from pathlib import Path

import pytest

from grpo_cli.checks import RULES, explain
from grpo_cli.checks.page import TITLES, page

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"


def test_the_page_is_written_from_the_rules():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m grpo_cli.checks.page > docs/rules.md"


def test_every_rule_stands_under_a_title():
    assert {rule.topic for rule in RULES.values()} == set(TITLES)
    assert all(page().count(f"\n| `{rule}` |") == 1 for rule in RULES)


@pytest.mark.parametrize("rule", RULES)
def test_explain_tells_id_severity_and_a_reason_of_a_sentence_or_more(rule):
    head, reason = explain(rule).split("\n\n", 1)
    assert head.startswith(f"{rule} ({RULES[rule].severity}, ")
    assert len(reason) > 40
    assert reason.split("\nReads")[0].strip()[-1] in ".)"


def test_explain_of_an_unknown_rule_names_the_nearest():
    with pytest.raises(KeyError, match="lr_positive"):
        explain("lr_positiv")
    with pytest.raises(KeyError, match=r"no rule foo; docs/rules\.md lists them all"):
        explain("foo")
