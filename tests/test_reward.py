"""The scorer: terms become one reward, None is never zero, and findings come before the run."""

from __future__ import annotations

import pytest
from rewards import asked, python_term, reward_config, scoring, values

from grpo_cli.data.columns import Columns
from grpo_cli.data.rows import Row
from grpo_cli.errors import ConfigError
from grpo_cli.reward import make_scorer
from grpo_cli.reward.check import RewardCheck
from grpo_cli.schema import JsonlData, parse

BY_TEXT = "def {name}(completions): return [{table}[text] for text in completions]"


def test_a05_a_none_term_is_left_out_and_all_none_is_unscored(tmp_path):
    one = python_term(tmp_path, BY_TEXT.format(name="one", table="{'a': 1.0, 'b': None, 'c': None}"), "one")
    two = python_term(tmp_path, BY_TEXT.format(name="two", table="{'a': 0.5, 'b': 0.5, 'c': None}"), "two", weight=2.0)
    with scoring(one, two) as scorer:
        (group,) = scorer.score([asked("5", "a", "b", "c")])
    a, b, c = group.completions
    assert a.rewards == {"one": 1.0, "two": 0.5}
    assert (a.unshaped, a.reward) == (2.0, 2.0)  # 1 x 1.0 + 2 x 0.5
    assert b.rewards == {"one": None, "two": 0.5}
    assert b.reward == 1.0
    assert (c.unshaped, c.reward) == (None, None)
    assert group.scored == [a, b]


def test_every_built_in_term_at_once():
    terms = [{"name": "exact"}, {"name": "number"}, {"name": "regex", "pattern": r"^\d+$"}, {"name": "math"}]
    with scoring(*terms) as scorer:
        (group,) = scorer.score([asked("7", "7", "It is 7", "")])
    assert [c.rewards for c in group.completions] == [
        {"exact": 1.0, "number": 1.0, "regex": 1.0, "math": 1.0},
        {"exact": 0.0, "number": 1.0, "regex": 0.0, "math": 1.0},
        {"exact": 0.0, "number": 0.0, "regex": 0.0, "math": 0.0},
    ]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("prompt_tokens", [1, 500])
def test_a16_overlong_counts_the_completion_alone(length, penalty, factor, prompt_tokens):
    overlong = {"max_tokens": 100, "buffer_tokens": 20, "penalty": factor}
    with scoring({"name": "exact"}, overlong=overlong) as scorer:
        group = asked("7", "7")
        group.prompt.token_ids.extend([1] * prompt_tokens)
        group.completions[0].token_ids = [1] * length
        scorer.score([group])
    completion = group.completions[0]
    assert completion.unshaped == 1.0
    assert completion.reward == pytest.approx(1.0 + factor * penalty)


def test_an_unscored_completion_gets_no_penalty_either():
    with scoring({"name": "exact"}, overlong={"max_tokens": 2, "buffer_tokens": 1, "penalty": 1.0}) as scorer:
        (group,) = scorer.score([asked(None, "7")])
    assert group.completions[0].reward is None


def test_no_groups_and_a_closed_scorer():
    with scoring({"name": "math"}) as scorer:
        assert scorer.score([]) == []


# ---------------------------------------------------------------- before the run


def rows(*columns: dict, answer_key: str | None = "answer") -> list[Row]:
    reader = Columns("prompt", answer_key)
    read = [reader.read({"prompt": "p", **row}, f"d.jsonl:{i + 1}") for i, row in enumerate(columns)]
    assert all(isinstance(row, Row) for row in read)
    return read


def start_findings(cfg, seen: list[Row]):
    check = RewardCheck(cfg)
    for row in seen:
        check.see(row)
    return check.findings()


def test_a14_a_signature_that_cannot_be_served_lists_what_can_be_passed(tmp_path):
    good = python_term(tmp_path, "def good(prompts, completions, answer, level, more=1, **kw): ...", "good")
    bad = python_term(tmp_path, "def bad(prompts, completions, solution): ...", "bad")
    missing = python_term(tmp_path, "def other(): ...", "missing")
    absent = {"name": "python", "path": str(tmp_path / "no.py"), "function": "absent"}
    positional = python_term(tmp_path, "def positional(completions, /): ...", "positional")
    starred = python_term(tmp_path, "def starred(*given): ...", "starred")
    seen = rows({"answer": "1", "level": 2})
    found = start_findings(reward_config(good, bad, missing, absent, positional, starred), seen)
    assert [f.rule for f in found] == ["python_reward_callable"] * 5
    assert [f.keys[0] for f in found] == [f"reward.terms.{i}.path" for i in (1, 2, 3, 4, 5)]
    listed = "prompts, completions, answer, completion_ids, prompt, level"
    assert f"bad asks for solution; what can be passed is {listed}" in found[0].message
    assert "defines no function missing; it defines: other" in found[1].message
    assert "cannot be read: No such file" in found[2].message
    assert "by position only" in found[3].message
    assert "starred takes *given by position only" in found[4].message


def test_a_function_that_takes_the_answer_needs_its_column(tmp_path):
    takes = python_term(tmp_path, "def takes(completions, answer): ...", "takes")
    may = python_term(tmp_path, "def may(completions, answer=None, **kw): ...", "may")
    without = {"name": "jsonl", "train": "d.jsonl", "prompt_key": "prompt", "answer_key": None}
    for terms, data, reads, found in (
        ((may, takes), without, True, ["answer_reward_needs_answer_key"]),
        ((may,), without, False, []),
        ((takes,), {**without, "answer_key": "gold"}, True, []),
        ((takes,), {}, True, []),  # generated data
    ):
        cfg = reward_config(*terms)
        resolved = cfg.model_dump()
        if data:
            resolved["data"] = {key: resolved["data"].get(key) for key in JsonlData.model_fields} | data
        check = RewardCheck(parse(resolved))
        for row in rows({"gold": "7"}, answer_key=None):
            check.see(row)
        assert check.reads_answer == reads
        findings = check.findings()
        assert [finding.rule for finding in findings] == found
        for finding in findings:
            assert finding.fix == "data.answer_key of one of the columns gold, or answer=None in the signature"


def test_columns_are_not_blamed_when_no_row_could_be_read(tmp_path):
    term = python_term(tmp_path, "def f(completions, solution): ...")
    assert start_findings(reward_config(term), []) == []


def test_h10_golds_that_do_not_parse_are_counted_and_the_first_is_named():
    seen = rows({"answer": "5"}, {"answer": "see figure"}, {"answer": r"\frac{1}{"}, {"answer": r"\frac{1}{2}"})
    (finding,) = start_findings(reward_config({"name": "math"}), seen)
    assert (finding.rule, finding.severity) == ("gold_answers_parse", "warning")
    assert finding.message.startswith("2 answers that reward term math cannot parse; the first is d.jsonl:2")
    (finding,) = start_findings(reward_config({"name": "number"}), seen)
    assert finding.message.startswith("3 answers that reward term number cannot parse; the first is d.jsonl:2")


def test_plain_numbers_are_not_asked_about(monkeypatch):
    monkeypatch.setattr("grpo_cli.reward.check.Pool", None)
    assert start_findings(reward_config({"name": "math"}), rows({"answer": "5"}, {"answer": "-0.5"})) == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = start_findings(reward_config({"name": "math"}, {"name": "reasoning_gym"}), [])
    assert [f.rule for f in found] == ["reward_packages_installed"] * 2
    assert [f.fix for f in found] == ["pip install math-verify==0.9.0", "pip install 'grpo[reasoning_gym]'"]


def test_reasoning_gym_needs_its_own_rows():
    pytest.importorskip("reasoning_gym")
    (finding,) = start_findings(reward_config({"name": "reasoning_gym"}), rows({"answer": "1"}))
    assert finding.rule == "data_has_keys"
    assert "d.jsonl:1" in finding.message


def test_reasoning_gym_scores_with_the_task():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", seed=1, size=1)[0]
    answer = entry["answer"]
    with scoring({"name": "reasoning_gym"}) as scorer:
        texts = [answer, f"<answer>{answer}</answer>", f"x <answer>{int(answer) + 1}</answer>"]
        group = asked(answer, *texts, question=entry["question"], metadata=entry["metadata"])
        (got,) = values(scorer, [group], "reasoning_gym")
    assert got[:2] == [1.0, 1.0]
    assert got[2] < 0.2


def test_a_pattern_that_does_not_compile_is_a_typed_error():
    resolved = reward_config({"name": "regex", "pattern": "x"}).model_dump()
    resolved["reward"]["terms"][0]["pattern"] = "(x"
    with pytest.raises(ValueError, match="unterminated subpattern"):
        parse(resolved)
    from grpo_cli.checks import check

    _, found = check(resolved, "train")
    (finding,) = [f for f in found if f.rule == "value_type"]
    assert "a Python regular expression" in finding.message


def test_make_scorer_reports_a_bad_term_before_it_starts_anything(tmp_path):
    with pytest.raises(ConfigError, match="defines no function f"):
        make_scorer(reward_config({"name": "math"}, python_term(tmp_path, "")))
