"""`grpo status RUN_DIR`: how a run stands and what became of every prompt, from its files alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.checkpoint import manifest
from grpo_cli.errors import EXIT_FAILED, EXIT_OK, ConfigError, Finding
from grpo_cli.files.jsonio import read_rows
from grpo_cli.files.ledger import TRAINED, add_up
from grpo_cli.files.rundir import RunDir
from grpo_cli.terminal.parser import Parser, one_line

LOST = "It ended without a word: killed, or the machine went down. The same command goes on (trainer.resume=auto)."


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1 where the files contradict each other. Raises ConfigError where there is no run."""
    parser = Parser("status", "Says how a run stands and what became of every prompt, from its files alone.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.read(arguments)
    told = status(asked.run_dir)
    print(json.dumps(told) if asked.json else "\n".join(one_line(line) for line in lines(told)))
    return EXIT_FAILED if told["faults"] else EXIT_OK


def status(path: Path) -> dict[str, Any]:
    """The facts as JSON values. Reads files only: works while the run goes on, after it, and on a copy elsewhere."""
    run_dir = RunDir(path)
    state = run_dir.state()
    if not state:
        message = f"{run_dir.path} holds no run.json that can be read."
        raise ConfigError(Finding("run_dir_is_fresh", ("run.dir",), message, "the path of a run directory"))
    alive = run_dir.owner() is not None
    how, reason = state.get("status"), state.get("reason")
    if how in ("starting", "running") and not alive:
        how, reason = "lost", LOST
    fates = add_up(read_rows(run_dir.ledger_path))
    checkpoints = []
    for step, directory in reversed(list(manifest.newest_first(run_dir.checkpoints))):
        problems = manifest.quick_problems(directory)
        checkpoints.append({"step": step, "whole": not problems, "problems": problems})
    return {
        "run_dir": str(run_dir.path),
        "status": how,
        "alive": alive,
        "reason": reason,
        "exit_code": state.get("exit_code"),
        "step": state.get("step"),
        "steps": state.get("steps"),
        "attempts": len(state.get("previous", [])) + 1,
        "checkpoints": checkpoints,
        "model": run_dir.model.is_dir(),
        "prompts": {
            "rows": fates.rows,
            "total": fates.total,
            "drawn": fates.drawn,
            "trained": fates.counts.get(TRAINED, 0),
            "dropped": {fate: n for fate, n in sorted(fates.counts.items()) if fate != TRAINED},
            "pending": fates.pending,
            "epochs": fates.epochs,
        },
        "faults": fates.faults(),
    }


def lines(told: dict[str, Any]) -> list[str]:
    """What a person reads."""
    of = f" of {told['steps']}" if told["steps"] is not None else ""
    code = f", exit code {told['exit_code']}" if told["exit_code"] is not None else ""
    text = [f"{told['run_dir']}: {told['status']}{code}, step {told['step']}{of}, attempt {told['attempts']}"]
    if told["reason"]:
        text.append(f"  {told['reason']}")
    for checkpoint in told["checkpoints"]:
        verdict = "whole" if checkpoint["whole"] else f"passed over: {'; '.join(checkpoint['problems'][:2])}"
        text.append(f"  checkpoint of step {checkpoint['step']}: {verdict}")
    prompts = told["prompts"]
    epochs = f", {prompts['epochs']:.2f} passes over {prompts['rows']} rows" if prompts["epochs"] is not None else ""
    text.append(f"Prompts drawn: {prompts['drawn']}{epochs}")
    text.append(f"  trained {prompts['trained']}")
    text.extend(f"  dropped {count} ({reason})" for reason, count in prompts["dropped"].items())
    text.append(f"  pending {prompts['pending']}")
    if prompts["total"] is not None:
        text.append(f"  not drawn yet {prompts['total'] - prompts['drawn']} of {prompts['total']}")
    text.extend(f"The ledger contradicts itself: {fault}." for fault in told["faults"])
    return text
