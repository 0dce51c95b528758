"""What `--help` says: the groups, options and experiments are read from conf/, never listed by hand."""

from __future__ import annotations

import shutil
import textwrap

from grpo_cli.options import Groups, conf_dir, read_groups

SUMMARIES = {
    "train": "validate a config and train; -m sweeps",
    "validate": "check everything that the config alone can tell, in a second",
    "plan": "derived numbers: batches, updates, passes, memory",
    "replay": "recompute advantages and loss on dumped rollouts",
    "eval": "avg@k and pass@k of a checkpoint or model",
    "report": "one HTML page about one or several runs",
    "doctor": "check versions, devices, engines and weight sync",
    "export": "checkpoint -> Hugging Face model directory",
    "status": "state of a run and the fate of every prompt",
    "completion": 'shell completion: eval "$(grpo completion bash)"',
}

_EXAMPLES = (
    "grpo train +experiment=smoke",
    "grpo train +experiment=dapo model.path=Qwen/Qwen3-1.7B data=jsonl data.train=math.jsonl",
    "grpo train -m +experiment=grpo loss=ppo_clip,gspo,cispo trainer.lr=1e-6,3e-6",
)


def overview() -> str:
    """The text of `grpo --help`."""
    groups = read_groups([conf_dir()])
    commands = [f"  {name:<11}{summary}" for name, summary in SUMMARIES.items()]
    return "\n".join(
        [
            "grpo: GRPO-family reinforcement learning of language models",
            "",
            "usage: grpo COMMAND [options] [GROUP=OPTION ...] [KEY=VALUE ...]     (grpo COMMAND --help)",
            "",
            *commands,
            "",
            *_optional_groups(groups),
            "",
            *_examples(),
            "",
            "exit codes: 0 done, 1 failed, 2 wrong usage, config or data, 3 stopped by a guard, 128+N signal N",
        ]
    )


def composition() -> str:
    """The part of `grpo train --help` about what can be overridden."""
    groups = read_groups([conf_dir()])
    lines = ["groups (GROUP=OPTION; * is the default):"]
    for group, default in groups.defaults.items():
        options = groups.options.get(group, ())
        if len(options) > 1:
            names = [f"{option}*" if option == default else option for option in options]
            lines += _wrapped(f"  {group:<11}", " ".join(names))
    sections = [group for group in groups.defaults if len(groups.options.get(group, ())) == 1]
    lines += [f"keys only:   {' '.join(sections)}", "", *_optional_groups(groups), "", *_examples()]
    return "\n".join(lines)


def _optional_groups(groups: Groups) -> list[str]:
    lines: list[str] = []
    for group in groups.optional:
        lines += _wrapped(f"+{group}=  ", " ".join(groups.options[group]))
    return lines


def _examples() -> list[str]:
    return ["examples:", *(f"  {example}" for example in _EXAMPLES)]


def _wrapped(head: str, text: str) -> list[str]:
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
