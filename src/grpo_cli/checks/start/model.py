"""The model's config and tokenizer: readable, long enough, with the modules that adapters name; no weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from grpo_cli.checks.model import LOCAL_SIGNS
from grpo_cli.checks.quantities import completion_limits
from grpo_cli.checks.start.report import Report
from grpo_cli.errors import ConfigError
from grpo_cli.model.builtin import locate
from grpo_cli.model.tokenizer import load_tokenizer
from grpo_cli.schema import Config

ATTENTION_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn",
}
"""Package behind each attention name of transformers that torch itself does not have."""

PLAIN_ATTENTION = ("eager", "sdpa", "flex_attention")


def check(cfg: Config, report: Report) -> Any | None:
    """The rules on the model; returns the tokenizer where there is one."""
    tokenizer = read_tokenizer(cfg, report)
    if tokenizer is not None:
        config = _read_config(cfg, report)
        if config is not None:
            _check_context(cfg, config, report)
            _check_adapter_targets(cfg, config, report)
    _check_attention(cfg, report)
    _check_reference(cfg, report)
    return tokenizer


def read_tokenizer(cfg: Config, report: Report) -> Any | None:
    """The tokenizer of model.path; None, and a finding, where it has none."""
    try:
        path = locate(cfg.model.path)
        if cfg.model.path.startswith(LOCAL_SIGNS) and not Path(path).is_dir():
            report.add("model_readable", f"model.path={path}: no such directory.", "model.path of a model directory")
            return None
        if not cfg.model.trust_remote_code and (module := own_code(Path(path))):
            report.add(
                "model_readable",
                f"model.path={cfg.model.path} asks for its own code ({module}), and model.trust_remote_code=false.",
                "remove auto_map from its config.json and tokenizer_config.json",
                {"model.trust_remote_code": True},
                keys=("model.path", "model.trust_remote_code"),
            )
            return None
        if cfg.model.path.startswith(LOCAL_SIGNS) and not any(Path(path).glob("*.safetensors")):
            report.add(
                "model_readable",
                f"model.path={cfg.model.path} holds no weights in safetensors{pickles(Path(path))}.",
                "model.path of a model in safetensors",
            )
        return load_tokenizer(cfg.model)
    except ConfigError as error:
        report.take_error(error)
        return None


def pickles(folder: Path) -> str:
    """What a message adds where a model's weights are pickles."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    return f" but {names[0]}: a pickle can run code and is never read" if names else ""


def own_code(folder: Path) -> str | None:
    """The Python module beside a local model that its configs ask for; None where they ask for none. Runs nothing."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        asked = content.get("auto_map") if isinstance(content, dict) else None
        for reference in _references(asked):
            module = f"{reference.rpartition('--')[2].partition('.')[0]}.py"
            if "--" in reference or (folder / module).is_file():
                return module
    return None


def _references(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [reference for child in children for reference in _references(child)]


def _read_config(cfg: Config, report: Report) -> Any | None:
    from transformers import AutoConfig

    hub = {"revision": cfg.model.revision, "trust_remote_code": cfg.model.trust_remote_code}
    try:
        return AutoConfig.from_pretrained(locate(cfg.model.path), **hub)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for one mistake of a user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        report.add(
            "model_readable",
            f"model.path={cfg.model.path} has no readable config: {reason}",
            "model.path of a directory or hub id with config.json (and model.revision of a commit that has it)",
        )
        return None


def _check_context(cfg: Config, config: Any, report: Report) -> None:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = completion_limits(cfg, report.command)
    key = max(limits, key=lambda name: limits[name])
    asked = cfg.rollout.max_model_len or cfg.data.max_prompt_tokens + limits[key]
    if not isinstance(positions, int) or positions < 2 or asked <= positions:
        return
    prompt = cfg.data.max_prompt_tokens
    if prompt + cfg.rollout.max_new_tokens > positions:
        prompt = min(prompt, positions // 2)
    fix: dict[str, Any] = {} if cfg.rollout.max_model_len is None else {"rollout.max_model_len": positions}
    fix |= {name: positions - prompt for name, limit in limits.items() if limit > positions - prompt}
    if prompt != cfg.data.max_prompt_tokens:
        fix["data.max_prompt_tokens"] = prompt
    name = "rollout.max_model_len" if cfg.rollout.max_model_len else f"data.max_prompt_tokens + {key}"
    report.add(
        "context_fits_model",
        f"{name} = {asked} tokens, but model.path={cfg.model.path} has {positions} positions.",
        fix,
    )


def _check_attention(cfg: Config, report: Report) -> None:
    name = cfg.model.attn_implementation
    if name in PLAIN_ATTENTION:
        return
    sdpa = {"model.attn_implementation": "sdpa"}
    package = "kernels" if "/" in name else ATTENTION_PACKAGES.get(name)
    if package is None:
        known = ", ".join([*PLAIN_ATTENTION, *ATTENTION_PACKAGES])
        report.add("attention_installed", f"model.attn_implementation={name} is none of {known}.", sdpa)
    elif importlib.util.find_spec(package) is None:
        message = f"model.attn_implementation={name} needs the package {package}, which cannot be found."
        report.add("attention_installed", message, sdpa, f"pip install {package.replace('_', '-')}")


def _check_adapter_targets(cfg: Config, config: Any, report: Report) -> None:
    if cfg.model.lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        message = "model.lora needs the package peft, which cannot be found."
        report.add("lora_package_installed", message, "pip install 'grpo[lora]'", {"model.lora": None})
    names = linear_names(config)
    missing = [
        target
        for target in cfg.model.lora.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in names)
    ]
    if missing:
        known = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        found = [target for target in cfg.model.lora.target_modules if target not in missing]
        report.add(
            "lora_targets_exist",
            f"model.lora.target_modules names {', '.join(missing)}, which model.path={cfg.model.path} does not have; "
            f"it has {', '.join(known)}.",
            {"model.lora.target_modules": found or known},
        )


def linear_names(config: Any) -> list[str]:
    """Names of the linear layers of a model with this config, output head left out; made without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    kinds = (torch.nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


def _check_reference(cfg: Config, report: Report) -> None:
    if cfg.model.lora is None or cfg.loss.kl_coef == 0:
        return
    if Path(cfg.model.path).expanduser().joinpath("adapter_config.json").is_file():
        report.add(
            "lora_reference_is_start_policy",
            f"model.path={cfg.model.path} holds an adapter: with model.lora the reference of loss.kl_coef="
            f"{cfg.loss.kl_coef:g} would be the bare base model.",
            {"loss.kl_coef": 0},
            "merge the adapter into model.path",
        )
