"""Rules that the list of config rules does not have: of single commands, and of packages that are optional."""

from __future__ import annotations

from grpo_cli.checks.engine import declare

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
