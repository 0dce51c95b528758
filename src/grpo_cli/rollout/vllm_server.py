"""Rollout `vllm_server`: engines in processes of their own, started by the run or running already."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.process.ranks import share_of_cores
from grpo_cli.rollout import fingerprint
from grpo_cli.rollout.sampling import Sampling, completion_seed, eos_token_ids
from grpo_cli.rollout.server_auth import KEY_VARIABLE
from grpo_cli.rollout.server_client import Client
from grpo_cli.rollout.server_process import ServerProcess, start_all
from grpo_cli.rollout.sync import check_sync, logprob_gap
from grpo_cli.rollout.vllm_requests import engine_options, make_completion, sampling_params, scoring_requests
from grpo_cli.rollout.weight_sync import make_sender
from grpo_cli.schema import Config, VllmRollout, VllmServerRollout
from grpo_cli.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks

_SHARED_DEVICE_MEMORY = 0.4
_OWN_DEVICE_MEMORY = 0.9
_WAKE_TIMEOUT_S = 30.0
_URGENT = -1
"""Priority of the sync check: it must not wait behind a queue of prompts."""


def make(cfg: Config, policy: Any, ranks: Ranks) -> ServerRollout:
    """Rank 0 starts the servers that are the run's own; all ranks learn where they are."""
    return ServerRollout(cfg, policy, ranks)


class ServerRollout:
    """Every rank asks the servers for its own prompts; rank 0 alone changes their state."""

    def __init__(self, cfg: Config, policy: Any, ranks: Ranks):
        self._cfg, self._policy, self._ranks = cfg, policy, ranks
        self._training = Sampling.of_rollout(cfg)
        self._eos_ids = eos_token_ids(getattr(policy.module, "generation_config", None), policy.tokenizer)
        self._ahead = cfg.rollout.max_staleness > 0
        self._processes: list[ServerProcess] = []
        self._client: Client | None = None
        self._sender: Any = None
        try:
            urls, key, self._owned = self._servers()
            self._client = Client(urls, key, self._processes)
            if not self._owned and ranks.first:
                self._wake()
            if self._owned and self._ahead and ranks.device.type == "cpu":
                pin_beside_server()
            directory = Path(cfg.run.dir).expanduser().absolute() / "weight_sync"
            self._sender = make_sender(cfg.rollout.weight_sync, policy, ranks, self.client, directory)
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    def _servers(self) -> tuple[list[str], str | None, bool]:
        """(addresses, key, whether they are the run's own)."""
        given = self._cfg.rollout.server_url if isinstance(self._cfg.rollout, VllmServerRollout) else None
        if given is not None:
            return [given.rstrip("/")], os.environ.get(KEY_VARIABLE), False
        error = None
        if self._ranks.first:
            try:
                self._processes = own_servers(self._cfg, self._ranks)
            except RunError as failure:
                error = str(failure)
        here = ([process.url for process in self._processes], self._processes[0].key if self._processes else None)
        told = self._ranks.gather((here, error))
        (urls, key), error = told[0]
        if error:
            raise RunError(error)
        return urls, key, True

    def generate(
        self, prompts: list[tuple[str, Prompt]], step: int, version: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """See `Rollout.generate`."""
        sampling = sampling or self._training
        requests = [request for group_id, _prompt in prompts for request in self._requests(group_id, _prompt, sampling)]
        answers = iter(self.client.wait(self.client.generate(requests), leave=True))
        return [
            Group(
                group_id, prompt, [self._completion(next(answers), sampling) for _ in range(sampling.n)], step, version
            )
            for group_id, prompt in prompts
        ]

    async def generate_one(self, group_id: str, prompt: Prompt, step: int, version: int) -> Group:
        """One group, for whoever runs on the client's loop."""
        answers = await self.client.generate(self._requests(group_id, prompt, self._training))
        completions = [self._completion(answer, self._training) for answer in answers]
        return Group(group_id, prompt, completions, step, version)

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """See `Rollout.sync`. Completions in flight are held, keep their tokens, and go on under the new weights."""
        start = time.perf_counter()
        with self._held():
            self._sender.send(policy, version)
            if self._ranks.first:
                self._reset_caches()
        shown: dict[str, list[float]] = {}

        def weight_gap(name: str, tensor: Tensor) -> float | None:
            return fingerprint.gap(tensor, shown[name]) if name in shown else None

        def read() -> None:
            if self._ranks.first:
                # A server that was started by hand may lack the method; its weights then stay unread.
                with contextlib.suppress(RunError):
                    shown.update(self.client.wait(self.client.call("grpo_fingerprints"))[0])

        tolerance = self._cfg.rollout.sync_tolerance
        assert tolerance is not None, "rule sync_tolerance_positive refuses null"
        low = "bfloat16" in (self._cfg.model.dtype, self._cfg.rollout_dtype)
        score, gap_of = (self._score, weight_gap) if self._ranks.first else (None, None)
        metrics = check_sync(policy, self._ranks, score, gap_of, tolerance, read, low)
        return {**metrics, "time/weight_sync": time.perf_counter() - start}

    def metrics(self) -> dict[str, float]:
        """What the servers say of themselves, on rank 0; the others return nothing."""
        if not self._ranks.first:
            return {}
        pages = self.client.wait(self.client.everywhere("GET", "/metrics", timeout=10.0))
        return engine_metrics(pages)

    def close(self) -> None:
        """End the servers that are the run's own, whatever else fails."""
        with contextlib.ExitStack() as ending:  # the last one named ends first
            for process in self._processes:
                ending.callback(process.close)
            if self._client is not None:
                ending.callback(self._client.close)
            if self._sender is not None:
                ending.enter_context(contextlib.suppress(Exception))
                ending.callback(self._sender.close)

    # ------------------------------------------------------------------------------------------------ requests

    def _requests(self, group_id: str, prompt: Prompt, sampling: Sampling) -> list[dict[str, Any]]:
        seeds = [completion_seed(self._cfg.run.seed, group_id, index) for index in range(sampling.n)]
        return [
            {"token_ids": prompt.token_ids, "sampling_params": sampling_params(sampling, seed, self._eos_ids)}
            for seed in seeds
        ]

    def _completion(self, answer: dict[str, Any], sampling: Sampling) -> Completion:
        choice = answer["choices"][0]
        token_ids = choice["token_ids"] or []
        logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
        reason = choice["finish_reason"]
        return make_completion(self._policy.tokenizer, self._eos_ids, sampling.stop, token_ids, logprobs, reason)

    def _score(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """Every server is asked; the answer counts that is farthest from what they say on average."""
        temperature = self._training.temperature or 1.0  # greedy in an evaluation alone
        requests = scoring_requests(prompt_ids, completion_ids, temperature)
        if self._owned:
            requests = [{**request, "priority": _URGENT} for request in requests]
        said = []
        for url in self.client.urls:
            answers = self.client.wait(self.client.ask(url, requests))
            said.append(scores_of(answers, len(prompt_ids), completion_ids))
        means = [sum(at) / len(said) for at in zip(*said, strict=True)]
        return max(said, key=lambda scores: logprob_gap(scores, means))

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Completions in flight wait meanwhile, and go on whatever happens: the server may outlive the run."""
        if not (self._ahead and self._ranks.first):
            yield
            return
        self.client.wait(self.client.everywhere("POST", "/pause", params={"mode": "keep"}))
        try:
            yield
        except BaseException:
            self._wake()
            raise
        self.client.wait(self.client.everywhere("POST", "/resume"))

    def _wake(self) -> None:
        """Let a server go on that a run, this one or one that was killed in its sync, has left paused."""
        with contextlib.suppress(RunError):  # one without the route was never paused
            self.client.wait(self.client.everywhere("POST", "/resume", timeout=_WAKE_TIMEOUT_S))

    def _reset_caches(self) -> None:
        """Forget what older weights computed; sequences in flight are computed again from their tokens."""
        params = {"reset_running_requests": "true"} if self._ahead else {}
        answers = self.client.wait(self.client.everywhere("POST", "/reset_prefix_cache", params=params))
        if not all(answer["success"] for answer in answers):
            raise RunError("vLLM did not reset its prefix cache: it would sample from what older weights computed.")


def scores_of(answers: list[Any], prompt_length: int, completion_ids: list[int]) -> list[float]:
    """The logprobs of the completion's tokens in the answers to `scoring_requests`."""
    if len(answers) == 1 and len(completion_ids) > 1:
        entries = answers[0]["prompt_logprobs"][prompt_length:]
        shown = [{int(token): entry["logprob"] for token, entry in at.items()} for at in entries]
    else:
        tops = [answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for answer in answers]
        shown = [{entry["token_id"]: entry["logprob"] for entry in top} for top in tops]
    return [logprobs[token] for logprobs, token in zip(shown, completion_ids, strict=True)]


def own_servers(cfg: Config, ranks: Ranks) -> list[ServerProcess]:
    """The run's own servers, started and answering: one on the CPU, or one on each (group) of their devices."""
    on_cpu = ranks.device.type == "cpu"
    options = {
        **engine_options(cfg, on_cpu, engines_here=1),
        "enable_scale_out": True,  # the endpoint that takes and returns token ids
        "scheduling_policy": "priority",
        "disable_uvicorn_access_log": True,
    }
    if cfg.rollout.weight_sync in ("nccl", "ipc"):
        options["weight_transfer_config"] = {"backend": cfg.rollout.weight_sync}
    if on_cpu:
        placed: list[tuple[list[int] | None, dict[str, Any]]] = [(None, {})]
    else:
        placed = [*device_teams(cfg, torch.cuda.device_count())]
    directory = Path(cfg.run.dir).expanduser().absolute()
    key = secrets.token_urlsafe(32)
    processes = [
        ServerProcess(
            {**options, **more},
            cores=server_cores(cfg) if on_cpu else None,
            devices=devices,
            log=directory / (f"vllm_server_{number}.log" if len(placed) > 1 else "vllm_server.log"),
            trusted=cfg.rollout.weight_sync == "ipc",
            key=key,
        )
        for number, (devices, more) in enumerate(placed)
    ]
    try:
        start_all(processes)
    except BaseException:
        for process in processes:
            process.close()
        raise
    return processes


def device_teams(cfg: Config, visible: int) -> list[tuple[list[int] | None, dict[str, Any]]]:
    """(devices of one server, its arguments): those of `rollout.devices`, or those that the trainer leaves free.

    With nothing left, or with `ipc`, which needs the same device on both sides, the servers share the trainer's; with
    `nccl`, which needs another one, nothing left is a RunError.
    """
    if isinstance(cfg.rollout, VllmRollout):
        assert cfg.rollout.devices is not None
        size, devices = cfg.rollout.tensor_parallel_size, cfg.rollout.devices
        more = {"tensor_parallel_size": size, "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization}
        return [(devices[start : start + size], more) for start in range(0, len(devices), size)]
    trainers = cfg.trainer.nproc_per_node
    free = [] if cfg.rollout.weight_sync == "ipc" else list(range(trainers, visible))
    if cfg.rollout.weight_sync == "nccl" and not free:
        raise RunError(
            f"rollout.weight_sync=nccl needs a device for the server beside the trainer's {trainers}; {visible} are "
            "visible. Use rollout.weight_sync=disk or ipc, or a lower trainer.nproc_per_node."
        )
    memory = _OWN_DEVICE_MEMORY if free else _SHARED_DEVICE_MEMORY
    return [([device], {"gpu_memory_utilization": memory}) for device in free or range(min(trainers, visible))]


def server_cores(cfg: Config) -> list[int]:
    """Cores of the CPU server: all that the run may use while they take turns, else the second half."""
    cores = run_cores()
    return cores[len(cores) // 2 :] if cfg.rollout.max_staleness > 0 and len(cores) > 1 else cores


def pin_beside_server() -> None:
    """Leave the server's cores to it: this rank takes its share of the others."""
    cores = run_cores()
    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = share_of_cores(cores[: max(1, len(cores) // 2)], rank, world)
    os.sched_setaffinity(0, share)
    torch.set_num_threads(len(share))


def run_cores() -> list[int]:
    """The cores that the run was given: those of the launcher, as a rank among several has only its share of them."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(os.getppid()).cpu_affinity())
    return sorted(os.sched_getaffinity(0))


_GAUGES = {
    "vllm:num_requests_running": "rollout/vllm_running_requests",
    "vllm:num_requests_waiting": "rollout/vllm_queued_requests",
    "vllm:num_preemptions_total": "rollout/vllm_preemptions_total",
}


def engine_metrics(pages: list[str]) -> dict[str, float]:
    """The sums over all servers of what their Prometheus pages say.

    >>> engine_metrics(['vllm:num_requests_running{engine="0"} 3.0', 'vllm:num_requests_running{engine="0"} 1.0'])
    {'rollout/vllm_running_requests': 4.0}
    """
    found: dict[str, float] = {}
    for line in "\n".join(pages).splitlines():
        key = _GAUGES.get(line.partition("{")[0].partition(" ")[0])
        if key is not None:
            found[key] = found.get(key, 0.0) + float(line.rpartition(" ")[2])
    return found
