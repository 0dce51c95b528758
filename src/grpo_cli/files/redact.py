"""Secrets of the environment: kept out of every file and line that a run writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_cli.errors import ConfigError, Finding

_SECRET_NAME = re.compile(
    r"((^|_)(KEY|PAT)|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)|^NETRC$", re.IGNORECASE
)
_PLACE_NAME = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)
"""Names that say where something is: such a value may stand in a config."""
_OURS = ("GRPO_", "WANDB_", "HF_", "HUGGING_FACE_", "HUGGINGFACE", "VLLM_")
_SHORTEST = 8
"""Shorter values are not looked for: they would match ordinary words."""


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a credential, by the words in it.

    >>> [is_secret(name) for name in ("GRPO_SERVER_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_PAT", "PATH", "KEYBOARD")]
    [True, True, True, False, False]
    """
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)


def is_own_secret(name: str) -> bool:
    """Whether it is a credential of this tool or of a service that it talks to, which no reward function needs."""
    return is_secret(name) and name.upper().startswith(_OURS)


def secrets_of(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name -> value of the environment variables that hold credentials, for example WANDB_API_KEY and HF_TOKEN."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if is_secret(name) and len(value) >= _SHORTEST}


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with the value of every secret replaced by its name."""
    for name, value in secrets_of(environ).items():
        text = text.replace(value, f"<{name}>")
    return text


def check_no_secrets(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where a value of the config holds a secret: the config is written to the run directory."""
    found = secrets_of(environ)
    findings = [
        Finding(
            "no_credentials_in_urls",
            (key,),
            f"{key} holds the value of {name}, and every config is written to config.yaml and to the logger.",
            f"Remove it from {key}; leave {name} in the environment, where it is read from.",
        )
        for key, text in _texts(config, "")
        for name, value in found.items()
        if value in text
    ]
    if findings:
        raise ConfigError(findings)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, key)
