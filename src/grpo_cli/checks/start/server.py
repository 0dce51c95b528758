"""A vLLM server that runs already: that it answers, serves the model, and has what the run will ask of it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from grpo_cli.checks.start.report import Report
from grpo_cli.errors import ConfigError
from grpo_cli.model.builtin import locate
from grpo_cli.schema import Config, VllmServerRollout

KEY_VARIABLE = "GRPO_SERVER_KEY"
"""Environment variable that holds the server's key, where it wants one."""

TIMEOUT_S = 10.0

GENERATE = "/inference/v1/generate"
NEEDED = (GENERATE, "/reset_prefix_cache")
NEEDED_BY_SYNC = {
    "disk": ("/collective_rpc",),
    "nccl": ("/init_weight_transfer_engine", "/update_weights"),
    "ipc": ("/init_weight_transfer_engine", "/update_weights"),
}
NEEDED_AHEAD = ("/pause", "/resume")
"""Endpoints of asynchronous runs: completions in flight are held while weights change."""

PROBE = 2
"""A token id that every vocabulary has."""
SAME = 1e-4
"""Logprobs at two temperatures that differ by less do not depend on it."""


def check(cfg: Config, report: Report) -> None:
    """The rules on the server of rollout.server_url; asks it a few small things, changes nothing."""
    rollout = cfg.rollout
    if not isinstance(rollout, VllmServerRollout) or rollout.server_url is None:
        return
    server = Server(rollout.server_url)
    try:
        server.get("/health")
        _check_model(cfg, server, report)
        _check_endpoints(cfg, server, report)
        if cfg.loss.correction.mode != "none" or cfg.loss.seq_logprob_error_threshold is not None:
            _check_logprobs(cfg, server, report)
    except ServerError as error:
        _blame(cfg, report, f"{error}")


class ServerError(RuntimeError):
    """The server did not give a usable answer."""


class Server:
    """Small requests to one server, without a proxy between."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(f"{self._url}{path}"))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers))

    def _ask(self, request: urllib.request.Request) -> Any:
        if key := os.environ.get(KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with self._open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", errors="replace").strip()
            hint = f" (it wants the key of {KEY_VARIABLE})" if error.code == 401 else f": {said}" if said else ""
            raise ServerError(f"{request.selector} answers with status {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{request.selector} does not answer: {reason}") from error
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return None

    def logprob(self, temperature: float) -> float | None:
        """Logprob of a fixed token after a fixed one; None where the server returns none."""
        # It shows as many logprobs as `logprobs` says, the sampled token's first: a second id makes room for ours.
        params: dict[str, Any] = {"max_tokens": 1, "temperature": temperature, "seed": 0, "logprobs": 2}
        params["logprob_token_ids"] = [PROBE, PROBE - 1]
        answer = self.post(GENERATE, {"token_ids": [PROBE], "sampling_params": params})
        try:
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return next(float(entry["logprob"]) for entry in entries if entry["token_id"] == PROBE)
        except (KeyError, IndexError, TypeError, ValueError, StopIteration):
            return None


def _check_model(cfg: Config, server: Server, report: Report) -> None:
    listed = server.get("/v1/models")
    entries = listed.get("data", []) if isinstance(listed, dict) else []
    served = [str(entry[name]) for entry in entries for name in ("root", "id") if entry.get(name)]
    if not any(_same_model(cfg.model.path, name) for name in served):
        _blame(cfg, report, f"it serves {', '.join(dict.fromkeys(served)) or 'no model'}, not {cfg.model.path}")


def _same_model(path: str, served: str) -> bool:
    """Whether a server's model is that of the config; of directories the last name tells, since hosts differ."""
    try:
        names = {path, str(locate(path))}
    except ConfigError:
        names = {path}
    return served in names or Path(served).name.lower() in {Path(name).name.lower() for name in names}


def _check_endpoints(cfg: Config, server: Server, report: Report) -> None:
    try:
        offered = server.get("/openapi.json")
    except ServerError:  # switched off by whoever runs it
        return
    paths = offered.get("paths") if isinstance(offered, dict) else None
    if not paths:
        return
    needed = (*NEEDED, *NEEDED_BY_SYNC[cfg.rollout.weight_sync], *NEEDED_AHEAD * (cfg.rollout.max_staleness > 0))
    missing = [path for path in needed if path not in paths]
    if missing:
        _blame(cfg, report, f"it has no {', '.join(missing)} (rollout.weight_sync={cfg.rollout.weight_sync})")


def _check_logprobs(cfg: Config, server: Server, report: Report) -> None:
    cold, hot = server.logprob(0.5), server.logprob(2.0)  # vLLM takes no more than 2
    off = {"loss.correction.mode": "none", "loss.correction.low": None, "loss.correction.high": None}
    if cold is None or hot is None:
        report.add(
            "correction_needs_sampler_logprobs",
            f"rollout.server_url={_url(cfg)} returns no logprobs; loss.correction.mode={cfg.loss.correction.mode} "
            f"and loss.seq_logprob_error_threshold={cfg.loss.seq_logprob_error_threshold} compare with them.",
            off | {"loss.seq_logprob_error_threshold": None},
            f"start the server with logprobs: {command(cfg)}",
        )
    elif cfg.rollout.temperature != 1 and abs(cold - hot) < SAME:
        report.add(
            "server_returns_processed_logprobs",
            f"rollout.server_url={_url(cfg)} returns raw logprobs, which ignore "
            f"rollout.temperature={cfg.rollout.temperature}: every weight is biased.",
            f"start the server with --logprobs-mode=processed_logprobs: {command(cfg)}",
        )


def _blame(cfg: Config, report: Report, reason: str) -> None:
    report.add("server_answers", f"rollout.server_url={_url(cfg)}: {reason}.", f"start the server: {command(cfg)}")


def _url(cfg: Config) -> str:
    assert isinstance(cfg.rollout, VllmServerRollout)
    return str(cfg.rollout.server_url)


def command(cfg: Config) -> str:
    """How a server is started by hand so that it has all that this run asks of it."""
    from urllib.parse import urlsplit

    from grpo_cli.rollout.vllm_worker_extension import CLASS_PATH

    parts = urlsplit(_url(cfg))
    words = ["VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server", f"--model={cfg.model.path}"]
    words += [f"--host={parts.hostname}", f"--port={parts.port or 8000}", f"--dtype={cfg.rollout_dtype}"]
    words += ["--enable-scale-out --logprobs-mode=processed_logprobs --generation-config=vllm"]
    words += [f"--worker-extension-cls={CLASS_PATH}"]
    if cfg.rollout.weight_sync in ("nccl", "ipc"):
        words.append(f'--weight-transfer-config=\'{{"backend": "{cfg.rollout.weight_sync}"}}\'')
    return " ".join(words)
