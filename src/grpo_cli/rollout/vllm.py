"""Rollout `vllm`: an engine inside each training process, sharing its device and taking turns with the trainer."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.model.weights import is_sharded
from grpo_cli.process.signals import Interrupted, stop
from grpo_cli.rollout import fingerprint
from grpo_cli.rollout.sampling import Sampling, completion_seed, eos_token_ids
from grpo_cli.rollout.sync import check_sync
from grpo_cli.rollout.vllm_requests import engine_options, make_completion, sampling_params, scoring_requests
from grpo_cli.schema import Config
from grpo_cli.schema import VllmRollout as Settings
from grpo_cli.types import Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout import Rollout

_AGREE_EVERY = 16
"""Engine steps, about one token of every sequence each, between two looks of a team at whether one was told to stop."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHER_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_")


def make(cfg: Config, policy: Any, ranks: Ranks) -> Rollout:
    """An engine in this process, or with `rollout.devices` servers of the run's own on those devices."""
    assert isinstance(cfg.rollout, Settings)
    if cfg.rollout.devices is not None:
        from grpo_cli.rollout import vllm_server

        return vllm_server.make(cfg, policy, ranks)
    return VllmRollout(cfg, policy, ranks)


class VllmRollout:
    """One engine a rank; with `tensor_parallel_size` T, T neighbouring ranks share one and ask it the same things."""

    def __init__(self, cfg: Config, policy: Any, ranks: Ranks):
        assert isinstance(cfg.rollout, Settings)
        self._cfg, self._policy, self._ranks = cfg, policy, ranks
        self._training = Sampling.of_rollout(cfg)
        self._eos_ids = eos_token_ids(getattr(policy.module, "generation_config", None), policy.tokenizer)
        self._on_cpu = ranks.device.type == "cpu"
        self._sleep_level = cfg.rollout.sleep_level or 0
        self._team = cfg.rollout.tensor_parallel_size
        self._team_group = team_group(ranks, self._team)
        self._asleep = self._discarded = False
        self._asked = 0
        self._llm: Any = _start(cfg, ranks, self._sleep_level)
        if self._sleep_level:
            self._sleep()

    def generate(
        self, prompts: list[tuple[str, Prompt]], step: int, version: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """See `Rollout.generate`. Afterwards the engine sleeps, if it is to."""
        sampling = sampling or self._training
        self._wake()
        asked = self._team_share(prompts)
        requests = [
            (prompt.token_ids, sampling_params(sampling, self._seed(group_id, index), self._eos_ids))
            for group_id, prompt in asked
            for index in range(sampling.n)
        ]
        outputs = iter(self._ask(requests, leave=True))
        groups = {}
        for group_id, prompt in asked:
            completions = [self._completion(next(outputs), sampling) for _ in range(sampling.n)]
            groups[group_id] = Group(group_id, prompt, completions, step, version)
        if self._sleep_level:
            self._sleep()
        return [groups[group_id] for group_id, _ in prompts]

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """See `Rollout.sync`: weights go in one by one, never the whole model at once."""
        start = time.perf_counter()
        self._wake(load=True)
        shown: dict[str, list[float]] = {}

        def weight_gap(name: str, tensor: Tensor) -> float | None:
            return fingerprint.gap(tensor, shown[name]) if name in shown else None

        def read() -> None:
            shown.update(self._llm.collective_rpc("grpo_fingerprints")[0])

        tolerance = self._cfg.rollout.sync_tolerance
        assert tolerance is not None, "rule sync_tolerance_positive refuses null"
        low = "bfloat16" in (self._cfg.model.dtype, self._cfg.rollout_dtype)
        metrics = check_sync(policy, self._ranks, self._score, weight_gap, tolerance, read, low)
        return {**metrics, "time/weight_sync": time.perf_counter() - start}

    def metrics(self) -> dict[str, float]:
        """Preemptions of this rank's engine since it started."""
        found = {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}
        return {"rollout/vllm_preemptions_total": float(found.get("vllm:num_preemptions", 0))}

    def close(self) -> None:
        """End the engine."""
        if self._llm is not None:
            with _own_process(self._on_cpu):
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    # ------------------------------------------------------------------------------------------------ requests

    def _seed(self, group_id: str, index: int) -> int:
        return completion_seed(self._cfg.run.seed, group_id, index)

    def _team_share(self, prompts: list[tuple[str, Prompt]]) -> list[tuple[str, Prompt]]:
        """The prompts of all ranks that share this engine, in rank order."""
        if self._team == 1:
            return prompts
        first = self._ranks.rank // self._team * self._team
        shares = self._ranks.gather(prompts)[first : first + self._team]
        return [prompt for share in shares for prompt in share]

    def _ask(self, requests: list[tuple[list[int], dict[str, Any]]], leave: bool = False) -> list[Any]:
        """vLLM's outputs, one `RequestOutput` a request, in their order. With `leave` a signal raises Interrupted."""
        if not requests:
            return []
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        first = self._asked
        self._asked += len(requests)
        outputs: dict[int, Any] = {}
        with _own_process(self._on_cpu):
            try:
                for number, (token_ids, params) in enumerate(requests, first):
                    prompt = TokensPrompt(prompt_token_ids=token_ids)
                    engine.add_request(
                        str(number), prompt, SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
                    )
                for step in count(1):
                    if not engine.has_unfinished_requests():
                        break
                    outputs.update((int(output.request_id), output) for output in engine.step() if output.finished)
                    if told_to_stop(step, self._team_group) and leave:
                        raise Interrupted
            except BaseException:
                engine.abort_request([str(number) for number in range(first, self._asked)])
                raise
        return [outputs[number] for number in range(first, self._asked)]

    def _completion(self, output: Any, sampling: Sampling) -> Any:
        only = output.outputs[0]
        token_ids = list(only.token_ids)
        logprobs = [shown[token].logprob for token, shown in zip(token_ids, only.logprobs or [], strict=True)]
        return make_completion(
            self._policy.tokenizer, self._eos_ids, sampling.stop, token_ids, logprobs, only.finish_reason
        )

    def _score(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        requests = scoring_requests(prompt_ids, completion_ids, self._training.temperature)
        outputs = self._ask([(request["token_ids"], request["sampling_params"]) for request in requests])
        if len(outputs) == 1 and len(completion_ids) > 1:
            shown = outputs[0].prompt_logprobs[len(prompt_ids) :]
        else:
            shown = [output.outputs[0].logprobs[0] for output in outputs]
        return [logprobs[token].logprob for logprobs, token in zip(shown, completion_ids, strict=True)]

    # ------------------------------------------------------------------------------------------------ weights and sleep

    def _load(self) -> None:
        """The policy's weights into the engine; collective under ZeRO-3."""
        with _own_process(self._on_cpu):
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": named_copies(self._policy), "is_checkpoint_format": True}
            )
            self._llm.collective_rpc("grpo_finish_load")

    def _wake(self, load: bool = False) -> None:
        """Device memory and, where asked or discarded, weights back to the engine."""
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=["weights"])
        if load or self._discarded:
            self._load()
            self._discarded = False
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if load and not self._llm.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache: it would sample from what older weights computed.")

    def _sleep(self) -> None:
        self._llm.sleep(level=self._sleep_level)
        self._asleep, self._discarded = True, self._sleep_level == 2
        torch.cuda.empty_cache()


def team_group(ranks: Ranks, size: int) -> Any:
    """The process group of the `size` neighbouring ranks that share this rank's engine; None where it has its own."""
    if size == 1:
        return None
    groups = [dist.new_group(range(first, first + size), backend="gloo") for first in range(0, ranks.world, size)]
    return groups[ranks.rank // size]  # every rank takes part in making each of them


def told_to_stop(step: int, team: Any) -> bool:
    """Whether a signal has come. A team steps together: its ranks agree, at every few steps of their engine."""
    told = stop.requested()
    if team is None:
        return told
    if step % _AGREE_EVERY:
        return False
    anyone = torch.tensor(int(told))
    dist.all_reduce(anyone, op=dist.ReduceOp.MAX, group=team)
    return bool(anyone)


def named_copies(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """`policy.gathered_parameters()` for a reader that keeps a layer's tensors until the layer is complete."""
    sharded = any(is_sharded(parameter) for parameter in policy.module.parameters())
    for name, tensor in policy.gathered_parameters():
        # A gathered tensor is only good until the next one is asked for.
        yield name, tensor.clone() if sharded else tensor


def _start(cfg: Config, ranks: Ranks, sleep_level: int) -> Any:
    """A `vllm.LLM` in this process."""
    assert isinstance(cfg.rollout, Settings)
    on_cpu = ranks.device.type == "cpu"
    options = engine_options(cfg, on_cpu, engines_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the run has pinned its ranks already
    else:
        options |= {"enable_sleep_mode": sleep_level > 0, "disable_custom_all_reduce": True}
    options["gpu_memory_utilization"] = cfg.rollout.gpu_memory_utilization
    # Several engines find each other, and each its device, by the launcher's variables; one alone must not see them.
    shared = cfg.rollout.tensor_parallel_size > 1 or (ranks.world > 1 and not on_cpu)
    if shared:
        options |= {
            "tensor_parallel_size": cfg.rollout.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
        }
    with _own_process(on_cpu, starting=True), _hidden_launcher(hide=not shared), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about vLLM
        from vllm import LLM

        return LLM(**options, disable_log_stats=False)


@contextmanager
def _hidden_launcher(hide: bool) -> Iterator[None]:
    """Without the variables by which torch's launcher tells a process its place in the world."""
    hidden = {
        name: value
        for name, value in os.environ.items()
        if hide and (name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES))
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def _own_process(on_cpu: bool, starting: bool = False) -> Iterator[None]:
    """Around every call of an engine that shares our process: what it changes for itself is not changed for us.

    It seeds and draws from the global random generators, forbids `torch.set_num_threads`, and on CPUs compiles a helper
    for a quarter of a minute at its first call.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    devices = [] if on_cpu else [torch.cuda.current_device()]
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_num_threads = set_threads
        if starting:
            torch.set_num_threads(threads)
