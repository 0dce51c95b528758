"""`grpo train`: compose, check, then hand the config to the launcher; `-m` does that for every job of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_cli.compose import Loaded, load
from grpo_cli.errors import ConfigError
from grpo_cli.terminal.parser import Parser, show
from grpo_cli.terminal.usage import composition


def main(arguments: Sequence[str]) -> int:
    """Exit code of the run, or of the sweep (see sweep.py)."""
    parser = Parser("train", "Validates a config, then trains.", composition)
    parser.add_argument("-m", "--multirun", action="store_true", help="one job for each combination of KEY=A,B,…")
    parser.add_overrides()
    asked = parser.read(arguments)
    if asked.multirun:
        from grpo_cli.sweep import sweep

        return sweep(asked.overrides, asked.config_dir)
    return run(load(asked.overrides, "train", asked.config_dir))


def run(loaded: Loaded) -> int:
    """Shows the findings of the config, then those of the run's start, and launches where there is no error.

    Raises ConfigError with the errors, so that a mistake never gets past the first of the two stages that sees it.
    """
    show(loaded.warnings)
    config = loaded.require()
    from grpo_cli.checks.start import check

    found = check(config)
    show(finding for finding in found if finding.severity == "warning")
    if errors := [finding for finding in found if finding.severity == "error"]:
        raise ConfigError(errors)
    from grpo_cli.launch import launch

    assert loaded.resolved is not None
    return launch(loaded.resolved, Path(config.run.dir))
