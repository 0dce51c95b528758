"""The tokenizer of `model.path`, loaded the same way everywhere."""

from __future__ import annotations

from typing import Any

from grpo_cli.errors import ConfigError, Finding
from grpo_cli.model import builtin
from grpo_cli.schema import Model


def load_tokenizer(model: Model) -> Any:
    """The tokenizer, with a pad token (EOS where the model has none of its own: masks come from lengths, not from ids).

    Raises ConfigError (`model_readable`) when there is none, or when it could only be had by running code of the model
    repository and `model.trust_remote_code` is false.
    """
    path = builtin.locate(model.path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, … for what is one mistake to a user
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"model.path={model.path} has no readable tokenizer: {lines[0]}"
        fix = "model.path of a directory or hub id with a tokenizer (and model.revision of a commit that has it)"
        raise ConfigError(Finding("model_readable", ("model.path", "model.revision"), message, fix)) from error
    if tokenizer.eos_token_id is None:
        message = f"The tokenizer of model.path={model.path} has no EOS token: no completion could ever end."
        raise ConfigError(
            Finding("model_readable", ("model.path",), message, "model.path of a model with an EOS token")
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
