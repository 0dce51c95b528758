"""Memory of one process, estimated from the model's config.json alone; no torch, no weights, no network."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.model.builtin import BUILDERS, PREFIX, cache_dir
from grpo_cli.passes import decide_passes
from grpo_cli.schema import Config

BYTES = {"bfloat16": 2, "float32": 4}
LOGIT_BYTES = 256 * 2**20
"""Float32 logits that the model makes at a time; the same as in model/network.py, which this module must not import."""
_GATED = ("llama", "mistral", "qwen2", "qwen3")
_QKV_BIAS = ("qwen2",)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that its parameters and activations follow from.

    >>> Shape.of({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    ...           "num_attention_heads": 2, "vocab_size": 300}).parameters
    120640
    """

    vocab: int
    hidden: int
    layers: int
    intermediate: int
    query: int
    """Width of all query heads together."""
    key: int
    """Width of all key heads together; the values' is the same."""
    biases: int
    """Bias and extra norm parameters of one layer."""
    matrices: dict[str, tuple[int, int]]
    """Linear layers of one decoder layer: name -> (inputs, outputs)."""
    outside: int
    """Parameters outside the layers: embeddings, output head, last norm."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From the content of config.json. ValueError: an architecture whose formula is not known here."""
        kind = config.get("model_type")
        try:
            if kind == "gpt2":
                return cls._gpt2(config)
            if kind in _GATED:
                return cls._gated(config, str(kind))
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"config.json of this {kind} lacks {error}") from error
        raise ValueError(f"no formula for model_type {kind}")

    @classmethod
    def _gated(cls, config: dict[str, Any], kind: str) -> Shape:
        hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
        biases = 2 * hidden
        if config.get("attention_bias") or kind in _QKV_BIAS:
            biases += query + 2 * key
        if config.get("attention_bias") and kind not in _QKV_BIAS:
            biases += hidden
        if config.get("mlp_bias"):
            biases += 2 * intermediate + hidden
        if kind == "qwen3":
            biases += 2 * head
        matrices = {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, intermediate),
            "up_proj": (hidden, intermediate),
            "down_proj": (intermediate, hidden),
        }
        tied = config.get("tie_word_embeddings", False)
        outside = vocab * hidden * (1 if tied else 2) + hidden
        return cls(vocab, hidden, config["num_hidden_layers"], intermediate, query, key, biases, matrices, outside)

    @classmethod
    def _gpt2(cls, config: dict[str, Any]) -> Shape:
        hidden, vocab = config["n_embd"], config["vocab_size"]
        inner = config.get("n_inner") or 4 * hidden
        matrices = {
            "c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }
        biases = 4 * hidden + 3 * hidden + hidden + inner + hidden
        outside = (vocab + config["n_positions"]) * hidden + 2 * hidden
        return cls(vocab, hidden, config["n_layer"], inner, hidden, hidden, biases, matrices, outside)

    @property
    def parameters(self) -> int:
        """All parameters; a tied output head is counted once."""
        layer = sum(rows * columns for rows, columns in self.matrices.values()) + self.biases
        return self.layers * layer + self.outside

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Parameters of LoRA adapters: rank x (inputs + outputs) for every linear layer that a target names.

        A target that names one decoder layer counts for all of them.
        """
        ends = [f".{target}" for target in targets]
        wanted = [
            size
            for name, size in self.matrices.items()
            if any(end.endswith(f".{name}") or f".{name}".endswith(end) for end in ends)
        ]
        return self.layers * sum(rank * (rows + columns) for rows, columns in wanted)


def find_config(path: str, revision: str | None = None) -> Path:
    """config.json of a model that is on this machine: a directory, a built-in model, or the hub's cache.

    Raises ValueError with the reason where there is none.
    """
    if path.startswith(PREFIX):
        name = path.removeprefix(PREFIX)
        if name not in BUILDERS:
            raise ValueError(f"there is no built-in model {name}")
        folder = cache_dir() / "models" / f"{name}-v{BUILDERS[name][0]}"
        reason = f"{path} is made at its first use"
    elif path.startswith(("/", ".", "~")):
        folder, reason = Path(path).expanduser(), f"{path} has no config.json"
    else:
        home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")) / f"models--{path.replace('/', '--')}"
        reference = hub / "refs" / (revision or "main")
        snapshot = reference.read_text().strip() if reference.is_file() else revision or "none"
        folder, reason = hub / "snapshots" / snapshot, f"{path} is not in the hub's cache on this machine"
    if not (folder / "config.json").is_file():
        raise ValueError(reason)
    return folder / "config.json"


def read_shape(path: str, revision: str | None = None) -> Shape:
    """The sizes of a model on this machine; ValueError with the reason where they are not known."""
    return Shape.of(_read_config(path, revision))


def read_positions(path: str, revision: str | None = None) -> int | None:
    """Longest sequence in tokens of a model on this machine; None where it is not known."""
    try:
        config = _read_config(path, revision)
    except ValueError:
        return None
    config = config.get("text_config") or config
    return config.get("max_position_embeddings") or config.get("n_positions")


def _read_config(path: str, revision: str | None) -> dict[str, Any]:
    file = find_config(path, revision)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def estimate(config: Config) -> dict[str, Any]:
    """Bytes of one process at every ZeRO stage, with the config's offload; null and a reason for an unknown model.

    N parameters, of which n are trained (LoRA: the adapters; else all), W processes, b bytes of `model.dtype`:

        weights     N·b, with LoRA (N + n)·b: / W at stage 3, where offload_param puts them on the host
        gradients   n·4, accumulated in float32: / W at stages 2 and 3
        optimizer   n·8 of Adam and n·4 of master weights: / W from stage 1 on, where offload_optimizer puts them on the
                    host; float32 at stage 0 has no second copy of the weights
        reference   N·b where the reference pass runs and there is no LoRA: / W at stage 3
        activations of T = micro_batch_tokens, see `activations`

    Fragmentation, buffers of collectives, KV cache and the rollout engine come on top.
    """
    try:
        shape = read_shape(config.model.path, config.model.revision)
    except ValueError as error:
        return {"parameters": None, "trained_parameters": None, "reason": f"{error}.", "stages": None}
    width, processes = BYTES[config.model.dtype], config.world_size
    total = shape.parameters
    lora = config.model.lora
    trained = shape.adapter_parameters(lora.rank, lora.target_modules) if lora else total
    held = total + trained if lora else total
    reference = total * width if decide_passes(config).reference.runs and not lora else 0
    stages = {}
    for stage in range(4):
        split = [1 if stage < needed else processes for needed in (3, 2, 1)]
        optimizer = trained * (8 if width == 4 and stage == 0 else 12)
        weights, gradients, states = (
            math.ceil(size / parts) for size, parts in zip((held * width, trained * 4, optimizer), split, strict=True)
        )
        row = {
            "weights": weights,
            "gradients": gradients,
            "optimizer": states,
            "reference": math.ceil(reference / split[0]),
            "activations": activations(shape, config),
        }
        on_host = {
            "optimizer": config.trainer.offload_optimizer and stage > 0,
            "weights": config.trainer.offload_param and stage == 3,
        }
        host = sum(row[name] for name, offloaded in on_host.items() if offloaded)
        stages[str(stage)] = {**row, "device_total": sum(row.values()) - host, "host_total": host}
    return {"parameters": total, "trained_parameters": trained, "reason": None, "stages": stages}


def activations(shape: Shape, config: Config) -> int:
    """Bytes that one micro-batch of T tokens keeps for the backward pass: an estimate from above.

    A layer keeps, a token and in `model.dtype`: its input, two norms and the attention's output projection (4·hidden),
    queries and attention output (2·query), keys and values (2·key), gate, up, their product (3·intermediate; gpt2: 2).
    With gradient checkpointing only the input of each layer stays, and one layer is whole at a time. Logits, their
    probabilities and their gradient are float32 and made in chunks of at most `LOGIT_BYTES`.
    """
    tokens, width = config.trainer.micro_batch_tokens, BYTES[config.model.dtype]
    inner = 3 if "gate_proj" in shape.matrices else 2
    layer = (4 * shape.hidden + 2 * shape.query + 2 * shape.key + inner * shape.intermediate) * width
    kept = shape.layers * shape.hidden * width + layer if config.model.gradient_checkpointing else shape.layers * layer
    return tokens * kept + 3 * min(tokens * shape.vocab * 4, LOGIT_BYTES)
