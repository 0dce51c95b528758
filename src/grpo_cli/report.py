"""`grpo report`: one self-contained HTML page about one run, or several side by side. Loads nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import EXIT_OK, ConfigError, Finding
from grpo_cli.files.jsonio import read_rows, write_lines
from grpo_cli.files.redact import redact
from grpo_cli.files.rundir import RunDir
from grpo_cli.terminal.parser import Parser

TOPICS = (
    ("Reward", ("reward", "rewards", "frac_reward_zero_std")),
    ("Evaluation", ("eval",)),
    ("Policy", ("loss", "kl", "entropy", "ratio", "clip_frac", "grad_norm", "lr")),
    ("Groups and completions", ("groups", "completions", "filter", "data")),
    ("Sampler against trainer", ("sync", "sampling", "correction", "staleness")),
    ("Speed", ("time", "rollout", "tokens", "memory")),
)
"""Heading and the first words of the metric keys below it; what fits nowhere comes last, under Other."""

_WINDOW = 5
"""Steps at either end of a run whose mean the summary shows."""


@dataclass(frozen=True, slots=True)
class RunView:
    """What the page shows of one run; `rows` holds one row a step, the newest where a resumed run wrote it twice."""

    label: str
    path: str
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    """Full key -> value, for example `trainer.lr`."""
    rows: Mapping[int, Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    colour: str
    dashed: bool


def main(arguments: Sequence[str]) -> int:
    """Writes RUN_DIR/report.html, or report.html here for several runs, and says where it is."""
    parser = Parser("report", "Makes one HTML page with the plots of one run, or of several side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the page goes")
    asked = parser.read(arguments)
    output = asked.output or (asked.runs[0] if len(asked.runs) == 1 else Path()) / "report.html"
    write_report(asked.runs, output)
    print(output)
    return EXIT_OK


def write_report(runs: Sequence[Path], output: Path) -> None:
    """The page about these run directories, whole or not at all; secrets of the environment are left out."""
    text = redact(page(read_runs(runs)))
    if not output.parent.is_dir():
        raise ConfigError(Finding("report_writable", ("--output",), f"{output.parent}: no such directory.", "-o FILE"))
    write_lines(output, [text])


def read_runs(paths: Sequence[Path]) -> list[RunView]:
    """The runs in these directories; ConfigError names every one that is none."""
    homes = [RunDir(path) for path in paths]
    bad = [home.path for home in homes if not home.config_path.is_file()]
    if bad:
        raise ConfigError(
            [
                Finding(
                    "run_dir_readable",
                    ("RUN_DIR",),
                    f"{path} is no run directory: it has no config.yaml.",
                    "grpo report RUN_DIR",
                )
                for path in bad
            ]
        )
    from grpo_cli.plots import COLOURS

    views = []
    for number, (home, label) in enumerate(zip(homes, labels([home.path for home in homes]), strict=True)):
        views.append(
            RunView(
                label=label,
                path=str(home.path),
                state=home.state(),
                config=dict(flatten(home.read_config())),
                rows=by_step(read_rows(home.metrics_path)),
                samples=samples(home),
                colour=COLOURS[number % len(COLOURS)],
                dashed=number >= len(COLOURS),
            )
        )
    return views


def labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; the same directory twice gets a number.

    >>> labels([Path("/runs/a/1"), Path("/runs/b/1")])
    ['a/1', 'b/1']
    """
    depth = 1
    deepest = max(len(path.parts) for path in paths)
    ends = [path.name for path in paths]
    while len(set(ends)) < len(set(paths)) and depth < deepest:
        depth += 1
        ends = [str(Path(*path.parts[-depth:])) for path in paths]
    seen: dict[str, int] = {}
    for end in ends:
        seen[end] = seen.get(end, 0) + 1
    return ends if len(seen) == len(ends) else [f"{end} ({number})" for number, end in enumerate(ends, 1)]


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested config that is no mapping, with its full key; lists stay whole."""
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from flatten(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """One row a step, in the order of steps: the last one written wins."""
    found = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return dict(sorted(found.items()))


def samples(home: RunDir) -> list[dict[str, Any]]:
    """Best and worst completion of one group of the first and of the last rollout dump."""
    files = list(home.rollout_files())
    chosen = []
    for step, path in files if len(files) < 2 else (files[0], files[-1]):
        groups = [group for group in read_rows(path) if group.get("completions")]
        if not groups:
            continue
        group = max(groups, key=lambda group: _spread(group["completions"]))
        ranked = sorted(group["completions"], key=lambda completion: _number(completion.get("reward"), -math.inf))
        shown = [ranked[-1]] if len(ranked) == 1 else [ranked[-1], ranked[0]]
        chosen.append({"step": step, "prompt": group.get("prompt"), "completions": shown})
    return chosen


def _spread(completions: Sequence[Mapping[str, Any]]) -> float:
    rewards = [reward for completion in completions if isinstance(reward := completion.get("reward"), (int, float))]
    return max(rewards) - min(rewards) if rewards else -1.0


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise


def page(runs: Sequence[RunView]) -> str:
    """The whole HTML document."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = (Path(__file__).parent / "report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        runs=runs, summary=summary(runs), differences=differences(runs), topics=plots(runs)
    )


def summary(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """(what, one text a run) for the table on top; a row that no run can fill is left out."""
    table = [
        ("status", [str(run.state.get("status") or "") for run in runs]),
        ("reason", [str(run.state.get("reason") or "") for run in runs]),
        ("steps", [f"{max(run.rows, default=0)} of {run.state.get('steps') or '?'}" for run in runs]),
        ("started (UTC)", [str(run.state.get("started") or "") for run in runs]),
        ("versions", [", ".join(f"{k} {v}" for k, v in (run.state.get("versions") or {}).items()) for run in runs]),
    ]
    keys = ["reward", *sorted({key for run in runs for key in metric_keys(run) if key.startswith("eval/avg@")})]
    table += [(f"{key}, first → last", [first_and_last(run, key) for run in runs]) for key in keys]
    table += [(key, [_text(mean(run, key)) for run in runs]) for key in ("rollout/tokens_per_s",)]
    return [(what, texts) for what, texts in table if any(texts)]


def first_and_last(run: RunView, key: str) -> str:
    """Means of the first and last steps: of five of them, or of one where it is measured now and then."""
    values = present(run, key)
    if not values:
        return ""
    window = _WINDOW if len(values) >= 2 * _WINDOW else 1
    return f"{_text(sum(values[:window]) / window)} → {_text(sum(values[-window:]) / window)}"


def present(run: RunView, key: str) -> list[float]:
    """The numbers of a metric, in the order of steps."""
    return [value for row in run.rows.values() if (value := finite(row.get(key))) is not None]


def mean(run: RunView, key: str) -> float | None:
    values = present(run, key)
    return sum(values) / len(values) if values else None


def finite(value: Any) -> float | None:
    """A metric's value; None for what is no number, `null` in metrics.jsonl included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def metric_keys(run: RunView) -> set[str]:
    """Keys that hold at least one number in some step."""
    return {key for row in run.rows.values() for key in row if key != "step" and finite(row[key]) is not None}


def differences(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """(key, one value a run) where the configs differ; of a single run, everything."""
    keys = sorted({key for run in runs for key in run.config})
    table = [(key, [repr(run.config[key]) if key in run.config else "–" for run in runs]) for key in keys]
    return [(key, values) for key, values in table if len(runs) == 1 or len(set(values)) > 1]


def plots(runs: Sequence[RunView]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(topic, [(key, svg)]) for every metric that is a number somewhere."""
    from markupsafe import Markup

    from grpo_cli.plots import Line, line_plot

    keys_of = [metric_keys(run) for run in runs]
    topics: dict[str, list[tuple[str, str]]] = {name: [] for name in (*(name for name, _ in TOPICS), "Other")}
    for key in sorted(set().union(*keys_of), key=_rank):
        lines = []
        for run, keys in zip(runs, keys_of, strict=True):
            if key in keys:
                measured = [(step, finite(row[key])) for step, row in run.rows.items() if key in row]
                lines.append(Line([s for s, _ in measured], [v for _, v in measured], run.colour, run.dashed))
        topics[topic(key)].append((key, Markup(line_plot(lines))))
    return [(name, drawn) for name, drawn in topics.items() if drawn]


def topic(key: str) -> str:
    """The heading under which a metric stands."""
    return next((name for name, words in TOPICS if _known(key, words)), "Other")


def _known(key: str, words: Sequence[str]) -> str | None:
    """The word of `words` that the key begins with: `reward` for reward, reward/error_count and reward_std."""
    first = key.partition("/")[0]
    return next((word for word in words if first == word or first.startswith(f"{word}_")), None)


def _rank(key: str) -> tuple[bool, int, str]:
    """Whole quantities before their details, then in the order of TOPICS' words."""
    words = [word for _, words in TOPICS for word in words]
    known = _known(key, words)
    return ("/" in key, len(words) if known is None else words.index(known), key)
