"""The typed form of a config: name, type, choices and a sentence for each key. No defaults: YAML is the only source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Dtype = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """A config group: strict types, unknown keys refused, immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Run(Section):
    name: str
    """Name of the run: one path component, also the name in W&B."""
    dir: str
    """Run directory; relative to where the command is typed."""
    seed: int
    """Seed of every random stream: data order, sampling, initialisation."""


class Lora(Section):
    rank: int
    """Rank of the adapter matrices."""
    alpha: float
    """Scale: the update is multiplied by alpha / rank."""
    dropout: float
    """Dropout on the adapter's input while training."""
    target_modules: list[str]
    """Names of the linear layers that get an adapter."""


class Model(Section):
    path: str
    """Local directory, hub id, or a built-in model (builtin:tiny, builtin:smollm2-135m)."""
    dtype: Dtype
    """Compute type; master weights are fp32."""
    attn_implementation: str
    """Attention kernel of transformers, for example sdpa, eager, flash_attention_2."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool
    """Run Python code from the model repository."""
    revision: str | None
    """Commit, tag or branch of a hub model; null is its default."""
    lora: Lora | None
    """Train low-rank adapters instead of all weights; null trains all."""


class _Data(Section):
    train: str | None
    """Training rows: a file, or a data set id; null where the rows are generated."""
    eval: str | None
    """Held-out rows; null is none (generated data have their own)."""
    prompt_key: str | None
    """Column that holds the prompt: text, or a chat list."""
    answer_key: str | None
    """Column that holds the gold answer."""
    system_prompt: str | None
    """System message put before every prompt."""
    chat_template: str | None
    """Jinja template instead of the tokenizer's own; a path to a file, or the text."""
    max_prompt_tokens: int
    """Longest prompt in tokens, after templating."""
    on_long_prompt: Literal["error", "drop"]
    """What happens to a longer one."""
    shuffle: bool
    """Visit the rows in a new seeded order each epoch."""


class ArithmeticData(_Data):
    name: Literal["arithmetic"]
    train_size: int
    """Number of training rows."""
    eval_size: int
    """Number of held-out rows; no problem is in both."""
    min_operand: int
    """Smallest operand of a + b."""
    max_operand: int
    """Largest operand of a + b."""


class ReasoningGymData(_Data):
    name: Literal["reasoning_gym"]
    task: str
    """Name of the procedural data set in the package reasoning-gym."""
    train_size: int
    """Number of training rows."""
    eval_size: int
    """Number of held-out rows, from other seeds."""


class JsonlData(_Data):
    name: Literal["jsonl"]


class HfData(_Data):
    name: Literal["hf"]


Data = Annotated[ArithmeticData | ReasoningGymData | JsonlData | HfData, Field(discriminator="name")]


class _Term(Section):
    reads_answer: ClassVar[bool] = False
    """Whether a completion is compared with the gold answer."""
    weight: float
    """Factor of this term in the reward."""


class ExactTerm(_Term):
    reads_answer = True
    name: Literal["exact"]


class NumberTerm(_Term):
    reads_answer = True
    name: Literal["number"]


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError("regular_expression", "{reason}", {"reason": str(error)}) from error
    return pattern


class RegexTerm(_Term):
    name: Literal["regex"]
    pattern: Annotated[str, AfterValidator(_compilable)]
    """Python regular expression; a completion scores 1 where it is found."""


class MathTerm(_Term):
    reads_answer = True
    name: Literal["math"]


class ReasoningGymTerm(_Term):
    name: Literal["reasoning_gym"]


class PythonTerm(_Term):
    name: Literal["python"]
    path: str
    """A .py file; naming it here is the opt-in to run it."""
    function: str
    """Name of a function defined in that file."""


Term = Annotated[
    ExactTerm | NumberTerm | RegexTerm | MathTerm | ReasoningGymTerm | PythonTerm, Field(discriminator="name")
]


WHOLE_REWARD = ("unshaped", "total")
"""What `filter.metric` may name beside a term: the weighted sum, without and with the overlong penalty."""


def term_names(terms: Iterable[Any]) -> list[str]:
    """Names of reward terms, typed or not yet: a python term's is its function, with the file's stem where two share
    that. The rule reward_term_names_unique keeps them apart."""
    terms = list(terms)
    functions = [term.function for term in terms if term.name == "python"]
    return [_term_name(term, functions) for term in terms]


def _term_name(term: Any, functions: list[str | None]) -> str:
    if term.name != "python" or term.function is None:  # a term of a dump has no function, whatever its name
        return term.name
    if functions.count(term.function) == 1:
        return term.function
    return f"{PurePath(str(term.path)).stem}.{term.function}"


class Overlong(Section):
    max_tokens: int
    """Length from which the full penalty counts."""
    buffer_tokens: int
    """Length of the ramp below `max_tokens`."""
    penalty: float
    """Full penalty, subtracted from the reward."""


class Reward(Section):
    terms: list[Term]
    """Terms of the reward; their weighted sum is the unshaped reward."""
    on_error: Literal["abort", "unscored"]
    """What an exception or a wrong return does: end the run, or leave the completion unscored."""
    timeout_s: float | None
    """Seconds that scoring one completion (python: one call) may take; longer is unscored."""
    workers: int
    """Processes that score."""
    overlong: Overlong | None
    """Soft penalty on long completions (DAPO); null is none."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term, by the name under which it logs and filters."""
        return dict(zip(self.term_names, (term.weight for term in self.terms), strict=True))

    @property
    def term_names(self) -> list[str]:
        """Name under which each term logs, filters and is stored."""
        return term_names(self.terms)


class _Rollout(Section):
    num_generations: int
    """Completions a prompt: the group size G."""
    max_new_tokens: int
    """Longest completion in tokens."""
    temperature: float
    """Sampling temperature; logits are divided by it in every pass."""
    top_p: float
    """Nucleus sampling; 1.0 is off."""
    top_k: int | None
    """Sample from the k likeliest tokens; null, 0 or -1 is off."""
    min_p: float | None
    """Drop tokens below this share of the likeliest one's probability; null or 0 is off."""
    stop: list[str] | None
    """Texts that end a completion."""
    dtype: Literal["auto", "bfloat16", "float32"]
    """Type that the engine computes in; auto is model.dtype."""
    max_model_len: int | None
    """Longest sequence of the engine in tokens; null is the model's own."""
    weight_sync: Literal["in_process", "disk", "nccl", "ipc"]
    """How new weights reach the engine."""
    sync_tolerance: float | None
    """Largest logprob gap between engine and trainer after a sync, beyond what rounding explains."""
    max_staleness: int
    """Steps that generation may run ahead of training; 0 is synchronous."""


class HfRollout(_Rollout):
    name: Literal["hf"]


class VllmRollout(_Rollout):
    name: Literal["vllm"]
    tensor_parallel_size: int
    """Devices that share one engine."""
    gpu_memory_utilization: float
    """Fraction of a device's memory that the engine may take."""
    sleep_level: Literal[0, 1, 2] | None
    """While training: 0 awake, 1 weights to CPU, 2 weights discarded."""
    devices: list[int] | None
    """Device indices of the engine; null: the trainer's own, in turn."""


class VllmServerRollout(_Rollout):
    name: Literal["vllm_server"]
    server_url: str | None
    """A running server; null starts and stops one on this host."""


Rollout = Annotated[HfRollout | VllmRollout | VllmServerRollout, Field(discriminator="name")]


class Filter(Section):
    name: Literal["none", "zero_std", "dynamic_sampling", "reward_range"]
    metric: str
    """Reward that decides: unshaped, total (with the overlong penalty), or one term's name."""
    max_rounds: int | None
    """Generation rounds a step until enough groups are kept (dynamic_sampling)."""
    surplus: Literal["carry", "discard"]
    """What happens to kept groups beyond the need (dynamic_sampling)."""
    max_empty_steps: int | None
    """The step that is empty for this many times in a row ends the run; null never does."""
    low: float | None
    """Drop groups whose mean is below (reward_range)."""
    high: float | None
    """Drop groups whose mean is above (reward_range)."""


class Advantage(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "opo", "passk", "maxrl"]
    normalize: Literal["group", "batch", "none"]
    """Deviation that the centred reward is divided by (grpo)."""
    leave_one_out: bool
    """Take the mean of the others as the baseline (grpo)."""
    eps: float
    """Added to the deviation."""
    clip: float | None
    """Largest absolute advantage; null is off."""


class Correction(Section):
    mode: Literal["none", "truncate", "mask"]
    """What is done with the weight exp(old - sampler) outside the bounds."""
    level: Literal["token", "sequence", "geometric"]
    """One weight a token, a product a sequence, or a geometric mean a sequence."""
    low: float | None
    """Lower bound of the weight."""
    high: float | None
    """Upper bound of the weight."""


class Loss(Section):
    name: Literal["ppo_clip", "dapo", "dr_grpo", "gspo", "cispo", "gmpo", "sapo", "reinforce"]
    ratio_level: Literal["token", "sequence"]
    """Importance ratio a token, or one a sequence (GSPO)."""
    clip_low: float | None
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float | None
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None
    """Second bound for negative advantages; null is off."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
    """How token losses become one number."""
    constant_length: int | None
    """Divisor of aggregation=constant, in tokens a sequence."""
    kl_coef: float
    """Weight of the KL to the reference; 0 never loads one."""
    kl_estimator: Literal["k1", "k2", "k3"]
    """Estimator of that KL."""
    use_kl_in_reward: bool
    """Put the KL into the reward instead of the loss (reinforce_pp family)."""
    force_on_policy_ratio: bool
    """Declare the ratio 1 and skip the old-logprob pass."""
    seq_logprob_error_threshold: float | None
    """Mask sequences whose mean exp|sampler - old| exceeds this; null is off."""
    correction: Correction
    entropy_coef: float
    """Weight of the entropy bonus."""
    top_entropy_quantile: float
    """Share of tokens, by entropy, that keep the policy term; 1.0 is all."""
    tau_pos: float | None
    """Gate temperature for positive advantages (sapo)."""
    tau_neg: float | None
    """Gate temperature for the others (sapo)."""
    mask_truncated: bool
    """Leave completions cut at max_new_tokens out of the loss."""


class Trainer(Section):
    steps: int | None
    """Number of steps (rollout batches); null with `epochs`."""
    epochs: int | None
    """Passes over the prompts; null with `steps`."""
    prompts_per_step: int
    """Prompts a rollout batch."""
    updates_per_step: int
    """Optimizer updates that share one rollout batch."""
    epochs_per_step: int
    """Passes over one rollout batch."""
    micro_batch_tokens: int
    """Tokens, prompts included, a forward pass of one process."""
    packing: Literal["none", "sequence", "shared_prefix"]
    """Padded rows; sequences end to end; or completions behind one copy of their prompt."""
    lr: float
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"]
    """Course of the learning rate after warm-up."""
    warmup_steps: int
    """Steps until the learning rate is at its peak."""
    weight_decay: float
    """AdamW's decoupled weight decay."""
    betas: list[float]
    """AdamW's two decay rates."""
    max_grad_norm: float | None
    """Gradients are scaled down to this norm; null is off."""
    zero_stage: Literal[0, 1, 2, 3]
    """DeepSpeed ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    offload_optimizer: bool
    """Keep optimizer state in CPU memory."""
    offload_param: bool
    """Keep parameters in CPU memory (stage 3)."""
    nproc_per_node: int
    """Processes a node, one a device."""
    nnodes: int
    """Nodes."""
    rdzv_endpoint: str | None
    """HOST:PORT where the nodes meet; null on one node."""
    save_every: int | None
    """Steps between checkpoints; one more follows the last step. Null is never."""
    keep_checkpoints: int | None
    """Newest checkpoints that are kept; null is all."""
    eval_every: int | None
    """Steps between evaluations; one more follows the last step. Null is never."""
    resume: str
    """auto (newest complete checkpoint of run.dir), never, or the path of one."""
    max_nonfinite_steps: int
    """The non-finite step that comes this many times in a row ends the run."""
    step_timeout_s: float
    """Seconds after which a rank that stands still is named and the run ends."""
    allow_config_change: bool
    """Resume although keys that change the mathematics differ."""


class Eval(Section):
    samples: int
    """Completions a prompt."""
    k: list[int]
    """The k of pass@k."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float
    """Nucleus sampling; 1.0 is off."""
    max_new_tokens: int
    """Longest completion in tokens."""
    limit: int | None
    """Prompts that are evaluated; null is all."""


class Replay(Section):
    weights: dict[str, float] | None
    """Weight of each stored reward term; null is 1 each."""


class Wandb(Section):
    mode: Literal["disabled", "offline", "online"]
    """Whether and how W&B is used."""
    project: str
    """W&B project."""
    entity: str | None
    """W&B team or user; null is the key's own."""
    group: str | None
    """W&B group of the run."""
    tags: list[str]
    """W&B tags of the run."""


class Logger(Section):
    console: Literal["auto", "rich", "plain", "off"]
    """Live display, plain lines, nothing; auto asks whether a terminal is there."""
    wandb: Wandb
    dump_rollouts: bool
    """Write every group of every step to RUN_DIR/rollouts."""


class Config(Section):
    """A whole resolved config: one section a group."""

    run: Run
    model: Model
    data: Data
    reward: Reward
    rollout: Rollout
    filter: Filter
    advantage: Advantage
    loss: Loss
    trainer: Trainer
    eval: Eval
    replay: Replay
    logger: Logger

    @property
    def sequences_per_step(self) -> int:
        """S = prompts_per_step x num_generations."""
        return self.trainer.prompts_per_step * self.rollout.num_generations

    @property
    def world_size(self) -> int:
        """W = processes of all nodes."""
        return self.trainer.nproc_per_node * self.trainer.nnodes

    @property
    def whitens_advantage(self) -> bool:
        """Whether the advantage is whitened over the step's tokens after it was assigned (reinforce_pp family)."""
        return self.advantage.name in ("reinforce_pp", "reinforce_pp_baseline")

    @property
    def rollout_dtype(self) -> str:
        """`rollout.dtype` with auto resolved."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype


def parse(resolved: dict[str, Any]) -> Config:
    """The typed config of a resolved plain dict; raises pydantic's ValidationError."""
    return Config.model_validate(resolved)
