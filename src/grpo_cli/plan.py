"""`grpo plan`: the numbers that follow from a config, in steps and in updates, before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_cli.checks.overrides import read_first
from grpo_cli.compose import Loaded, load
from grpo_cli.errors import EXIT_OK, EXIT_USAGE, Finding
from grpo_cli.memory import estimate
from grpo_cli.passes import decide_passes
from grpo_cli.schema import Config
from grpo_cli.terminal.parser import Parser, show
from grpo_cli.terminal.usage import composition
from grpo_cli.trainer.deepspeed_config import batch_numbers


def total_steps(config: Config) -> tuple[int | None, str | None]:
    """Number of steps of the run, or None and the reason why it is not known before the run."""
    trainer = config.trainer
    if trainer.steps is not None:
        return trainer.steps, None
    if config.filter.name == "dynamic_sampling" or config.rollout.max_staleness > 0:
        return None, "an epoch's steps depend on how many groups are dropped"
    rows = getattr(config.data, "train_size", None)
    if rows is None:
        return None, "the rows of data.train are counted at run start"
    assert trainer.epochs is not None
    return math.ceil(trainer.epochs * rows / trainer.prompts_per_step), None


def derive(config: Config) -> dict[str, Any]:
    """Derived numbers of a typed config, valid or not: `*_steps` are rollout batches, `*_updates` optimizer steps."""
    trainer, rollout = config.trainer, config.rollout
    updates = trainer.updates_per_step * trainer.epochs_per_step
    steps, unknown = (None, "trainer.steps and trainer.epochs are null") if _endless(config) else total_steps(config)
    sequences = config.sequences_per_step
    tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
    return {
        "run_dir": config.run.dir,
        "model_dtype": config.model.dtype,
        "rollout_dtype": config.rollout_dtype,
        "processes": config.world_size,
        "prompts_per_step": trainer.prompts_per_step,
        "sequences_per_step": sequences,
        "sequences_per_update": sequences / max(trainer.updates_per_step, 1),
        "updates_per_step": updates,
        "max_tokens_per_sequence": tokens,
        "max_tokens_per_step": sequences * tokens,
        "max_completion_tokens_per_step": sequences * rollout.max_new_tokens,
        "total_steps": steps,
        "total_steps_unknown_because": unknown,
        "total_updates": None if steps is None else steps * updates,
        "warmup_steps": trainer.warmup_steps,
        "warmup_updates": trainer.warmup_steps * updates,
        "deepspeed": batch_numbers(config.world_size),
        "passes": asdict(decide_passes(config)),
    }


def _endless(config: Config) -> bool:
    return config.trainer.steps is None and config.trainer.epochs is None


def summary(config: Config) -> str:
    """What would run, in a few lines: the end of `grpo validate`."""
    numbers = derive(config)
    steps = numbers["total_steps"] if numbers["total_steps"] is not None else "an unknown number of"
    lines = [
        f"ok: {config.run.name}: {config.model.path} on data={config.data.name}, advantage={config.advantage.name},"
        f" loss={config.loss.name}, filter={config.filter.name}, rollout={config.rollout.name}",
        f"  {steps} steps of {numbers['prompts_per_step']} prompts x {config.rollout.num_generations} completions"
        f" = {numbers['sequences_per_step']} sequences, {numbers['updates_per_step']} updates a step,"
        f" {numbers['processes']} processes",
        *_pass_lines(numbers),
    ]
    return "\n".join(lines)


def _pass_lines(numbers: dict[str, Any]) -> list[str]:
    return [
        f"  {name if name == 'entropies' else f'{name} logprobs'}: {'computed' if step['runs'] else 'skipped'}."
        f" {step['reason']}"
        for name, step in numbers["passes"].items()
    ]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 2 where the config has errors; then only they are printed."""
    parser = Parser("plan", "Prints the numbers that follow from a config; loads nothing.", composition)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_overrides()
    asked = parser.read(arguments)
    loaded = load(asked.overrides, "plan", asked.config_dir)
    if asked.json:
        print(json.dumps(as_json(loaded, asked.config_dir), indent=2))
    else:
        show(loaded.findings)
    if loaded.errors or loaded.config is None:
        return EXIT_USAGE
    if not asked.json:
        print(render(loaded, asked.config_dir))
    return EXIT_OK


def as_json(loaded: Loaded, config_dir: Path | None) -> dict[str, Any]:
    """`validate --json` plus memory, and what following each warning would change."""
    ok = not loaded.errors
    return {
        "ok": ok,
        "errors": [finding.as_json() for finding in loaded.errors],
        "warnings": [
            {**finding.as_json(), "would_change": would_change(finding, loaded, config_dir) if ok else None}
            for finding in loaded.warnings
        ],
        "derived": derive(loaded.config) if loaded.config is not None else {},
        "memory": estimate(loaded.config) if loaded.config is not None else {},
    }


def would_change(warning: Finding, loaded: Loaded, config_dir: Path | None) -> dict[str, list[Any]] | None:
    """What following a warning changes: key or derived number -> [now, then]; None where the fix is no override."""
    try:
        fix = read_first(warning.fix)
    except ValueError:
        return None
    if loaded.config is None or not fix or not all("=" in word for word in fix):
        return None
    replaced = {word.partition("=")[0] for word in fix}
    kept = [word for word in loaded.overrides if word.lstrip("+~").partition("=")[0] not in replaced]
    then = load([*kept, *fix], "plan", config_dir)
    if then.config is None:
        return None
    before, after = (
        dict(_flat({**config.model_dump(), "derived": derive(config)})) for config in (loaded.config, then.config)
    )
    moved = ("run.dir", "derived.run_dir")
    return {
        key: [before.get(key), after.get(key)]
        for key in [*before, *(key for key in after if key not in before)]
        if key not in moved and before.get(key) != after.get(key)
    }


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for name, child in value.items() for leaf in _flat(child, f"{path}.{name}" if path else str(name))]


def render(loaded: Loaded, config_dir: Path | None) -> str:
    """The plan as text."""
    config = loaded.config
    assert config is not None
    numbers, warm_up = derive(config), config.trainer.warmup_steps
    rows = [
        ("run directory", numbers["run_dir"]),
        ("dtype", f"{numbers['model_dtype']} (rollout: {numbers['rollout_dtype']})"),
        ("prompts a step", numbers["prompts_per_step"]),
        ("sequences a step", f"{numbers['sequences_per_step']} = prompts x {config.rollout.num_generations}"),
        ("updates a step", f"{numbers['updates_per_step']}, of {numbers['sequences_per_update']:g} sequences each"),
        (
            "tokens a step",
            f"at most {numbers['max_tokens_per_step']}, {numbers['max_completion_tokens_per_step']} of them sampled",
        ),
        ("run", _length(numbers)),
        ("warm-up", f"{warm_up} steps = {numbers['warmup_updates']} updates"),
        ("processes", numbers["processes"]),
        ("DeepSpeed", ", ".join(f"{name}={value}" for name, value in numbers["deepspeed"].items())),
    ]
    lines = [f"{name:<18}{value}" for name, value in rows]
    lines += ["passes", *_pass_lines(numbers), "", *_memory_lines(config)]
    for warning in loaded.warnings:
        changes = would_change(warning, loaded, config_dir)
        lines += ["", f"{warning.rule}: following it ({warning.fix}) would change"]
        lines += [f"  {key}: {now} -> {then}" for key, (now, then) in (changes or {}).items()] or [
            "  the keys that it names"
        ]
    return "\n".join(lines)


def _length(numbers: dict[str, Any]) -> str:
    if numbers["total_steps"] is None:
        return f"steps not known yet: {numbers['total_steps_unknown_because']}"
    return f"{numbers['total_steps']} steps = {numbers['total_updates']} updates"


def _size(count: int) -> str:
    """Bytes in the unit that leaves at most four digits before the point."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _memory_lines(config: Config) -> list[str]:
    memory = estimate(config)
    if memory["stages"] is None:
        return [f"memory            not known: {memory['reason']}"]
    names = ("weights", "gradients", "optimizer", "reference", "activations", "device_total", "host_total")
    lines = [
        f"memory of one process, estimated; {memory['parameters']:,} parameters,"
        f" {memory['trained_parameters']:,} trained (* is the chosen stage)",
        "  ZeRO" + "".join(f"{name.replace('_', ' '):>14}" for name in names),
    ]
    for stage, row in memory["stages"].items():
        mark = "*" if int(stage) == config.trainer.zero_stage else " "
        lines.append(f"  {stage}{mark}  " + "".join(f"{_size(row[name]):>14}" for name in names))
    return lines
