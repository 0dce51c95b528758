"""`grpo validate`: everything that the config alone can tell, in under a second; loads and starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from grpo_cli import checks
from grpo_cli.compose import load
from grpo_cli.errors import EXIT_OK, EXIT_USAGE, Finding
from grpo_cli.plan import derive, summary
from grpo_cli.terminal.parser import Parser, show
from grpo_cli.terminal.usage import composition


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 where there is no error, else 2. `--json` puts everything on stdout."""
    parser = Parser("validate", "Checks a config and says what would run; loads nothing.", composition)
    parser.add_argument("--json", action="store_true", help="print errors, warnings and derived numbers as JSON")
    parser.add_argument("--data", action="store_true", help="also read the data, the tokenizer and reward files")
    parser.add_argument("--explain", metavar="RULE", help="print the long reason of a rule")
    parser.add_overrides()
    asked = parser.read(arguments)
    if asked.explain is not None:
        return _explain(asked.explain)
    loaded = load(asked.overrides, "validate", asked.config_dir)
    findings = loaded.findings
    if asked.data and loaded.config is not None:
        from grpo_cli.checks.start import check_data

        findings = [*findings, *check_data(loaded.config)]
    errors = [finding for finding in findings if finding.severity == "error"]
    warnings = [finding for finding in findings if finding.severity == "warning"]
    if asked.json:
        derived = derive(loaded.config) if loaded.config is not None else {}
        print(
            json.dumps(
                {"ok": not errors, **_json("errors", errors), **_json("warnings", warnings), "derived": derived},
                indent=2,
            )
        )
        return EXIT_USAGE if errors else EXIT_OK
    show(findings)
    if errors:
        print(f"{len(errors)} error{'s' * (len(errors) > 1)}: nothing would run.", file=sys.stderr)
        return EXIT_USAGE
    assert loaded.config is not None
    print(summary(loaded.config))
    return EXIT_OK


def _explain(rule: str) -> int:
    try:
        print(checks.explain(rule))
    except KeyError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _json(name: str, findings: list[Finding]) -> dict[str, list[dict]]:
    return {name: [finding.as_json() for finding in findings]}
