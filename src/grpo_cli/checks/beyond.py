"""Rules beyond the list: of values that nothing reads, of several nodes, single commands and optional packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import PurePath
from typing import Any

from grpo_cli.checks.engine import Changes, Found, View, broken, declare, error, gt, state, warning
from grpo_cli.checks.engines import back_on_trainer_devices, own_devices
from grpo_cli.checks.quantities import corrects, file_data
from grpo_cli.checks.suggest import shipped_here

FILE_KEYS = ("data.train", "data.eval", "data.prompt_key", "data.answer_key")

READ_WHERE: tuple[tuple[str, str, Callable[[View], bool]], ...] = (
    *(
        (
            f"reward.{key}",
            "the terms regex, math, reasoning_gym and python",
            lambda c: any(term.name not in ("exact", "number") for term in c.reward.terms),
        )
        for key in ("workers", "timeout_s")
    ),
    ("rollout.max_model_len", "the engines of rollout=vllm and rollout=vllm_server", lambda c: c.rollout.name != "hf"),
    ("filter.metric", "filters other than none", lambda c: c.filter.name != "none"),
    ("filter.surplus", "filter=dynamic_sampling", lambda c: c.filter.name == "dynamic_sampling"),
    (
        "advantage.eps",
        "advantage=gdpo, advantage=passk and the normalize of advantage=grpo",
        lambda c: c.advantage.name in ("gdpo", "passk") or c.advantage.normalize != "none",
    ),
    ("loss.kl_estimator", "a loss.kl_coef other than 0", lambda c: c.loss.kl_coef != 0),
    ("loss.correction.level", "a loss.correction.mode other than none", corrects),
    ("trainer.rdzv_endpoint", "runs of several nodes (trainer.nnodes)", lambda c: c.trainer.nnodes > 1),
    ("trainer.allow_config_change", "runs that resume (trainer.resume)", lambda c: c.trainer.resume != "never"),
    *(
        (f"logger.wandb.{key}", "a logger.wandb.mode other than disabled", lambda c: c.logger.wandb.mode != "disabled")
        for key in ("project", "entity", "group", "tags")
    ),
)
"""Key, what reads it, and whether that is chosen. Keys of which null is what an option ships, and that would train
something else than was asked, have errors of their own."""

SAMPLING_OF_EVAL = {
    "rollout.temperature": "eval.temperature",
    "rollout.top_p": "eval.top_p",
    "rollout.top_k": None,
    "rollout.min_p": None,
}
"""Keys of the rollout that `grpo eval` does not read, with its own."""


@error(*FILE_KEYS, "data.name")
def file_keys_need_file_data(c: View) -> Found:
    """Generated rows come from no file and have no columns: nothing reads data.train, data.eval, data.prompt_key or
    data.answer_key there, and other data than the named ones would train. Choose data=jsonl or data=hf."""
    given = [key for key in FILE_KEYS if getattr(c.data, key.partition(".")[2]) is not None]
    if not file_data(c) and given:
        named = c.data.train or c.data.eval
        kind = "hf" if named and not PurePath(named).suffix else "jsonl"
        yield broken(
            f"{state(c, *given)} is read by data=jsonl and data=hf, not by data.name={c.data.name}, which generates "
            "its rows.",
            {"data": kind},
            dict.fromkeys(given),
            keys=(*given, "data.name"),
        )


@warning(*(key for key, _, _ in READ_WHERE), *SAMPLING_OF_EVAL)
def value_is_read(c: View) -> Found:
    """A value other than the shipped one stands at a key that the chosen options never read: it does nothing. Set it
    back, or choose what reads it. grpo eval samples by eval.temperature and eval.top_p, not by the rollout's values."""
    if c.command == "eval":
        yield from _sampling_of_eval(c)
        return
    for key, reader, is_read in READ_WHERE:
        value = _value(c, key)
        if value is not None and not is_read(c) and value != (shipped := shipped_here(key, c._values)):
            yield broken(f"{state(c, key)} does nothing: it is read by {reader} only.", {key: shipped}, keys=(key,))


def _sampling_of_eval(c: View) -> Found:
    for key, own in SAMPLING_OF_EVAL.items():
        value, shipped = _value(c, key), shipped_here(key, c._values)
        used = _value(c, own) if own else shipped
        if value in (None, shipped, used):
            continue
        instead = [{own: value}] if own and used == shipped_here(own, c._values) else []
        told = f"grpo eval samples with {state(c, own)}" if own else "grpo eval has no such filter"
        yield broken(f"{state(c, key)} does nothing: {told}.", *instead, {key: shipped}, keys=(key,))


def _value(c: View, key: str) -> Any:
    return reduce(getattr, key.split("."), c)


@error("trainer.nnodes", "rollout.server_url", "rollout.devices", "rollout.name")
def own_server_on_one_node(c: View) -> Found:
    """A server that the run starts listens on loopback, on the first node. Ranks of the other nodes would ask their own
    node for completions, where there is none."""
    if not gt(c.trainer.nnodes, 1):
        return
    message = f"{state(c, 'trainer.nnodes')}: the server that the run starts is reached on the first node alone"
    if c.rollout.name == "vllm_server" and c.rollout.server_url is None:
        yield broken(
            f"{message} ({state(c, 'rollout.server_url')}).",
            Changes({"rollout.server_url": "http://HOST:8000"}, "a server that all nodes reach"),
            {"trainer.nnodes": 1},
            keys=("rollout.server_url", "trainer.nnodes"),
        )
    elif own_devices(c):
        yield broken(
            f"{message} ({state(c, 'rollout.devices')}).",
            back_on_trainer_devices(c),
            {"trainer.nnodes": 1},
            keys=("rollout.devices", "trainer.nnodes"),
        )


declare(
    "nodes_have_a_meeting_point", "error", "beyond", "start", "trainer.rdzv_endpoint", "trainer.nnodes",
    why="""trainer.nnodes is above 1 and trainer.rdzv_endpoint is null, no HOST:PORT, or of an unknown host: the
    launchers of the nodes have nowhere to meet. Set trainer.rdzv_endpoint=HOST:PORT, the same on every node, with an
    address of the first node as HOST.""",
)  # fmt: skip
declare(
    "nodes_share_the_run_dir", "error", "beyond", "start", "run.dir", "trainer.nnodes",
    why="""The nodes of a run have run directories of their own: a run.dir with the time in it, or a disk of one node.
    Each rank writes its part of a checkpoint, so none would ever be whole. Name one directory that all nodes see.""",
)  # fmt: skip
declare(
    "bfloat16_is_emulated", "warning", "beyond", "start", "model.dtype", "rollout.dtype",
    why="""model.dtype or rollout.dtype is bfloat16 on a CPU without instructions on it: nothing is wrong, and
    everything takes many times as long (a step of a 135M model: 190 s against 15 s). Use float32 for both.""",
)  # fmt: skip
declare(
    "lora_package_installed", "error", "beyond", "start", "model.lora",
    why="""model.lora needs the package peft, which cannot be found: an import error after the weights are loaded.""",
)  # fmt: skip
declare(
    "eval_needs_data", "error", "beyond", "start", "data.eval",
    why="""grpo eval has no held-out rows: data.eval is null. Name a file.""",
)  # fmt: skip
declare(
    "replay_weights_known", "error", "beyond", "start", "replay.weights",
    why="""replay.weights names a reward term that the file does not hold; it would weigh nothing.""",
)  # fmt: skip
declare(
    "replay_old_logprobs_given", "warning", "beyond", "start",
    why="""The config reads logprobs of the old policy and the file has none. The detached logprobs of the current
    policy stand for them, so every ratio is 1.""",
)  # fmt: skip
declare(
    "run_dir_readable", "error", "beyond", "start",
    why="""A directory that a command was given holds no run, or its files cannot be read.""",
)  # fmt: skip
declare(
    "report_writable", "error", "beyond", "start",
    why="""The report cannot be written where it was asked for.""",
)  # fmt: skip
declare(
    "export_is_new", "error", "beyond", "start",
    why="""The directory that grpo export was given is there already and holds something. Name a new one.""",
)  # fmt: skip
