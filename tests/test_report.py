"""The report: what it reads, what it shows, and that nothing a model or a user wrote becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_cli import report
from grpo_cli.errors import ConfigError
from grpo_cli.plots import MAX_POINTS, Line, line_plot, thin

EVIL = '</pre><script>alert("x")</script>$x_$'


def make_run(path: Path, name: str = "demo", lr: float = 1e-6, rows: list[dict] | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        f"run: {{name: {json.dumps(name)}, seed: 0}}\ntrainer: {{lr: {lr}, betas: [0.9, 0.99]}}\n"
    )
    state = {"status": "done", "reason": None, "steps": 12, "started": "2026-01-01", "versions": {"grpo": "0.1"}}
    (path / "run.json").write_text(json.dumps(state))
    if rows is None:
        rows = [
            {"step": step, "reward": step / 12, "loss": None if step == 3 else 0.5, "time/step": 2.0}
            for step in range(1, 13)
        ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dump(path: Path, step: int, texts: list[tuple[str, float | None]]) -> None:
    (path / "rollouts").mkdir(exist_ok=True)
    completions = [{"text": text, "reward": reward, "finish_reason": "stop"} for text, reward in texts]
    group = {"step": step, "group_id": f"{step}-0", "prompt": EVIL, "completions": completions}
    (path / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(group) + "\n")


def test_one_run_makes_one_page_that_loads_nothing(tmp_path, capsys):
    run = make_run(tmp_path / "a", name=EVIL)
    dump(run, 1, [(EVIL, 0.0), ("good", 1.0), ("neither", 0.5)])
    dump(run, 12, [("late", None), ("only scored one", 0.25)])
    assert report.main([str(run)]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    html = page.read_text()
    assert html.count("<svg") == html.count("</svg>") == 3
    for caption in ("reward", "loss", "time/step"):
        assert f"<figcaption>{caption}</figcaption>" in html
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "good" in html
    assert "neither" not in html  # only the best and the worst
    assert "only scored one" in html
    # Nothing is fetched: no source, link or import; what is left of URLs are XML namespaces.
    assert not re.search(r'\b(src|href)\s*=\s*"(?!#)', html)
    assert "default-src 'none'" in html
    assert "0.25 → 0.8333" in html  # means of steps 1-5 and 8-12


def test_several_runs_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / name / "1", lr=lr) for name, lr in (("x", 1e-6), ("y", 3e-6))]
    assert report.main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == "report.html\n"
    html = (tmp_path / "report.html").read_text()
    assert "x/1" in html
    assert "y/1" in html
    assert html.count("<svg") == 3  # one plot a metric, a line a run
    differing = html[html.index("Config keys that differ") : html.index("</details>")]
    assert "trainer.lr" in differing
    assert "trainer.betas" not in differing


def test_output_goes_where_it_is_asked_for(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    assert report.main([str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    with pytest.raises(ConfigError, match="no such directory"):
        report.main([str(run), "-o", str(tmp_path / "nowhere" / "page.html")])


def test_every_directory_that_is_no_run_is_named(tmp_path):
    make_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as refused:
        report.main([str(tmp_path / name) for name in ("a", "empty", "missing")])
    assert [finding.message.split(" is no")[0] for finding in refused.value.findings] == [
        str(tmp_path / "empty"),
        str(tmp_path / "missing"),
    ]


def test_a_run_without_steps_says_so(tmp_path):
    run = make_run(tmp_path / "a", rows=[])
    assert report.main([str(run)]) == 0
    assert "No step has been logged yet." in (run / "report.html").read_text()


def test_one_value_a_step_the_newest(tmp_path):
    rows = [{"step": 2, "reward": 0.1}, {"step": 1, "reward": 0.0}, {"step": 2, "reward": 0.9}, {"no": "step"}]
    assert report.by_step(rows) == {1: {"step": 1, "reward": 0.0}, 2: {"step": 2, "reward": 0.9}}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/r/a"], ["a"]),
        (["/r/a/1", "/r/b/1"], ["a/1", "b/1"]),
        (["/x/a/1", "/y/a/1", "/y/b/2"], ["x/a/1", "y/a/1", "y/b/2"]),
        (["/r/a", "/r/a"], ["a (1)", "a (2)"]),
    ],
)
def test_labels_tell_runs_apart(paths, expected):
    assert report.labels([Path(path) for path in paths]) == expected


@pytest.mark.parametrize(
    ("key", "topic"),
    [
        ("reward", "Reward"),
        ("reward_std", "Reward"),
        ("rewards/exact/mean", "Reward"),
        ("eval/avg@1", "Evaluation"),
        ("clip_frac/low", "Policy"),
        ("groups/kept", "Groups and completions"),
        ("time/rollout", "Speed"),
        ("sync/logprob_gap_max", "Sampler against trainer"),
        ("something/new", "Other"),
    ],
)
def test_topics(key, topic):
    assert report.topic(key) == topic


def test_whole_quantities_come_before_their_details():
    keys = ["rewards/exact/mean", "reward_std", "reward/error_count", "frac_reward_zero_std", "reward", "zzz", "loss"]
    ordered = [
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "loss",
        "zzz",
        "reward/error_count",
        "rewards/exact/mean",
    ]
    assert sorted(keys, key=report._rank) == ordered


def test_long_lines_are_thinned_to_means():
    steps, values = thin(range(1, 3001), [float(step) for step in range(1, 3001)])
    assert len(steps) == len(values) == MAX_POINTS
    assert values[0] == pytest.approx((1 + 2 + 3) / 3)
    assert values[-1] == pytest.approx(2999.0)
    assert thin([1, 2], [None, 1.0]) == ([1, 2], [None, 1.0])


def test_a_gap_breaks_the_line_and_text_stays_text():
    whole = line_plot([Line([1, 2, 3], [1.0, 2.0, 3.0], "#000000")])
    broken = line_plot([Line([1, 2, 3], [1.0, None, 3.0], "#000000")])
    assert whole.startswith('<svg class="plot"')
    assert "<text" in whole  # numbers as text, not as outlines
    assert len(broken) < len(whole) + 200
    assert whole != broken
