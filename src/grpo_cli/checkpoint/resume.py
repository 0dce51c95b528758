"""What resuming would mean, told from files alone before anything is loaded: whole, plain, and of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.checkpoint import manifest
from grpo_cli.checks.overrides import write
from grpo_cli.errors import Finding, RunError
from grpo_cli.files.jsonio import read_json
from grpo_cli.files.rundir import RunDir
from grpo_cli.schema import Config

AUTO, NEVER = "auto", "never"

NEVER_COMPARED = ("run.dir", "trainer.resume", "trainer.allow_config_change")

HARMLESS = (
    *(
        "run.name",
        "logger.",
        "eval.",
        "replay.",
        "data.eval",
        "model.gradient_checkpointing",
        "model.attn_implementation",
    ),
    *(
        "reward.workers",
        "filter.max_empty_steps",
        "rollout.weight_sync",
        "rollout.sync_tolerance",
        "rollout.max_model_len",
    ),
    *("rollout.tensor_parallel_size", "rollout.gpu_memory_utilization", "rollout.sleep_level", "rollout.devices"),
    *("rollout.server_url", "trainer.micro_batch_tokens", "trainer.packing"),
    *("trainer.zero_stage", "trainer.offload_optimizer", "trainer.offload_param", "trainer.nproc_per_node"),
    *(
        "trainer.nnodes",
        "trainer.rdzv_endpoint",
        "trainer.save_every",
        "trainer.keep_checkpoints",
        "trainer.eval_every",
    ),
    *("trainer.max_nonfinite_steps", "trainer.step_timeout_s"),
)
"""Keys (or sections) that change where or how fast a run goes, not what it computes."""

LENGTH = frozenset(("trainer.steps", "trainer.epochs"))
"""Keys that say how long a run goes: as harmless, unless the learning rate of a step depends on the number of steps."""

_ABSENT = "absent"


def find(cfg: Config) -> Path | None:
    """The checkpoint that `trainer.resume` means, by names and sizes; None: a fresh start. An explicit path is not
    judged."""
    if cfg.trainer.resume == NEVER:
        return None
    if cfg.trainer.resume != AUTO:
        return Path(cfg.trainer.resume).expanduser()
    for _, directory in manifest.newest_first(RunDir(cfg.run.dir).checkpoints):
        if not manifest.quick_problems(directory):
            return directory
    return None


def findings(cfg: Config, fingerprint: str | None = None) -> list[Finding]:
    """The rules on the checkpoint that would be resumed; empty for a fresh start.

    `fingerprint` is the hash of the training rows as `Data.fingerprint` gives it; None leaves the data to the workers,
    whose `Data.load_state` compares it too. Reads the whole checkpoint where `trainer.resume` names it, for the hashes.
    """
    directory = find(cfg)
    if directory is None:
        return []
    if cfg.trainer.resume != AUTO:
        plain = list(_pickles(directory))
        bad = manifest.quick_problems(directory) or manifest.hash_problems(directory)
        if bad or plain:
            return plain + ([_incomplete(directory, bad)] if bad else [])
        return run_findings(cfg, directory, fingerprint)
    for _, directory in manifest.newest_first(RunDir(cfg.run.dir).checkpoints):
        if manifest.quick_problems(directory):
            continue
        found = run_findings(cfg, directory, fingerprint)
        # The workers, who read every byte, pass over a damaged one and ask the same of the one that they take. So only
        # a refusal is worth reading it all here: its reason may be the damage.
        if not any(finding.severity == "error" for finding in found) or not manifest.hash_problems(directory):
            return found
    return []


def run_findings(cfg: Config, directory: Path, fingerprint: str | None = None) -> list[Finding]:
    """What a whole checkpoint and the config say about each other: another run, or a run that goes on otherwise."""
    try:
        saved = RunDir(directory).read_config()
    except RunError:
        saved = {}
    return [*_other_run(cfg, directory, saved, fingerprint), *_changes(cfg, directory, saved)]


def _incomplete(directory: Path, problems: list[str]) -> Finding:
    beside = [(step, path) for step, path in manifest.newest_first(directory.parent) if path != directory]
    older = [step for step, path in beside if not manifest.quick_problems(path)]
    whole = f" Whole ones beside it: steps {', '.join(map(str, sorted(older)))}." if older else ""
    return Finding(
        "resume_checkpoint_complete",
        ("trainer.resume",),
        f"trainer.resume={directory} cannot be used: {'; '.join(problems[:5])}.{whole}",
        f"trainer.resume={directory.parent / manifest.directory_name(max(older))}" if older else "trainer.resume=auto",
    )


def _pickles(directory: Path) -> Iterator[Finding]:
    bad = manifest.not_plain(directory)
    if bad:
        yield Finding(
            "checkpoint_is_plain_data",
            ("trainer.resume",),
            f"trainer.resume={directory} holds what is not plain data: {'; '.join(bad[:5])}. Loading could run code.",
            "trainer.resume=PATH of a checkpoint that grpo wrote, or trainer.resume=never.",
        )


def _other_run(cfg: Config, directory: Path, saved: Mapping[str, Any], fingerprint: str | None) -> Iterator[Finding]:
    before = dict(_leaves(saved)).get("model.path")
    differing = [f"model.path: {before} -> {cfg.model.path}"] if before != cfg.model.path else []
    keys = ["model.path"] if differing else []
    rows = _saved_fingerprint(directory)
    if fingerprint is not None and rows is not None and rows != fingerprint:
        differing.append(f"content of data.train (SHA-256): {rows[:12]}… -> {fingerprint[:12]}…")
        keys.append("data.train")
    if differing:
        yield Finding(
            "resume_matches_run",
            (*keys, "trainer.resume"),
            f"{directory} belongs to another run: {'; '.join(differing)}.",
            "Restore the listed keys and data, or trainer.resume=never with a new run.dir.",
        )


def _changes(cfg: Config, directory: Path, saved: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for keys that change the mathematics (an error unless allowed), one warning for the others."""
    changed = differences(saved, cfg.model_dump())
    changed.pop("model.path", None)
    decays = cfg.trainer.lr_schedule != "constant"
    weighty = {key: values for key, values in changed.items() if not _is_harmless(key, decays)}
    harmless = {key: values for key, values in changed.items() if key not in weighty}
    if _only_longer(harmless):
        harmless.pop("trainer.steps")
    if weighty:
        allowed = cfg.trainer.allow_config_change
        schedule = f" trainer.lr_schedule={cfg.trainer.lr_schedule} spreads the learning rate over the whole run."
        yield Finding(
            "resume_config_unchanged",
            (*weighty, "trainer.allow_config_change"),
            f"Keys that change the mathematics differ from {directory}: {_diff(weighty)}."
            + (schedule if decays and not LENGTH.isdisjoint(weighty) else ""),
            _restored(weighty) + ("" if allowed else ", or trainer.allow_config_change=true"),
            severity="warning" if allowed else "error",
        )
    if harmless:
        yield Finding(
            "resume_config_unchanged",
            tuple(harmless),
            f"Keys differ from {directory}: {_diff(harmless)}.",
            f"{_restored(harmless)} (if that was not meant)",
            severity="warning",
        )


def _restored(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Overrides that undo the changes; words where an option brought other keys."""
    if any(_ABSENT in (before, after) for before, after in changed.values()):
        return "Restore the listed keys"
    return write({key: before for key, (before, _) in changed.items()})


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (saved value, value now) of every leaf that differs."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return {
        key: (before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted({*before, *after})
        if before.get(key, _ABSENT) != after.get(key, _ABSENT) and key not in NEVER_COMPARED
    }


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _is_harmless(key: str, decays: bool) -> bool:
    if key in LENGTH:
        return not decays
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in HARMLESS)


def _only_longer(changed: Mapping[str, tuple[Any, Any]]) -> bool:
    before, after = changed.get("trainer.steps", (None, None))
    return isinstance(before, int) and isinstance(after, int) and after > before


def _diff(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key}: {_text(before)} -> {_text(after)}" for key, (before, after) in changed.items())


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _saved_fingerprint(directory: Path) -> str | None:
    state = read_json(directory / manifest.STATE)
    try:
        return state["run"]["source"]["data"]["fingerprint"]
    except (KeyError, TypeError):
        return None
