"""Rules that the list of config rules does not have: of several nodes, single commands, and optional packages."""

from __future__ import annotations

from grpo_cli.checks.engine import Changes, Found, View, broken, declare, error, gt, state
from grpo_cli.checks.engines import back_on_trainer_devices, own_devices


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
    why="""trainer.nnodes is above 1 and trainer.rdzv_endpoint is null: the launchers of the nodes have nowhere to meet.
    Set trainer.rdzv_endpoint=HOST:PORT, the same on every node, with the first node as HOST.""",
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
