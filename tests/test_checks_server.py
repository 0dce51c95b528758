"""What a server that runs already is asked at run start, and what is said when the answers are wrong."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from check_helpers import config_of

from grpo_cli.checks import check
from grpo_cli.checks.start import server
from grpo_cli.checks.start.report import Report

PATHS = ["/inference/v1/generate", "/reset_prefix_cache", "/collective_rpc", "/pause", "/resume"]
TRUNCATE = ["loss.correction.mode=truncate", "loss.correction.high=2.0", "rollout.dtype=bfloat16"]


class Answers:
    """What the server says; tests change it."""

    model = "builtin:tiny"
    paths = PATHS
    key: str | None = None
    logprobs = "processed"


@pytest.fixture
def running():
    """(address, answers) of a small server that speaks vLLM's protocol."""
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, content, status=200):
            body = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if answers.key and self.headers.get("Authorization") != f"Bearer {answers.key}":
                return self.reply(None, 401)
            pages = {
                "/health": None,
                "/v1/models": {"data": [{"id": answers.model, "root": answers.model}]},
                "/openapi.json": {"paths": {path: {} for path in answers.paths}},
            }
            return self.reply(pages[self.path])

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["sampling_params"]
            value = -1.0 if answers.logprobs == "raw" else -1.0 / asked["temperature"]
            entries = [{"top_logprobs": [{"token_id": asked["logprob_token_ids"][0], "logprob": value}]}]
            self.reply({"choices": [{"logprobs": None if answers.logprobs == "none" else {"content": entries}}]})

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", answers
    http.shutdown()
    thread.join()
    http.server_close()


def found(url, *overrides):
    config = config_of(["model=tiny", "rollout=vllm_server", f"rollout.server_url={url}", *overrides])
    typed, findings = check(config)
    assert typed is not None, findings
    report = Report(typed)
    server.check(typed, report)
    return report.findings


def test_a_server_that_has_everything_has_no_finding(running):
    url, _ = running
    assert found(url) == []
    assert found(url, *TRUNCATE, "rollout.temperature=0.8", "rollout.max_staleness=1") == []


def test_nobody_answers():
    [finding] = found("http://127.0.0.1:9")
    assert (finding.rule, finding.severity, finding.keys[0]) == ("server_answers", "error", "rollout.server_url")
    assert "/health does not answer" in finding.message
    assert "--host=127.0.0.1 --port=9 " in finding.fix


def test_the_key_is_asked_for_and_sent(running, monkeypatch):
    url, answers = running
    answers.key = "open sesame"
    [finding] = found(url)
    assert "401 (it wants the key of GRPO_SERVER_KEY)" in finding.message
    assert "sesame" not in finding.line()
    monkeypatch.setenv("GRPO_SERVER_KEY", "open sesame")
    assert found(url) == []


def test_another_model(running):
    url, answers = running
    answers.model = "Qwen/Qwen3-1.7B"
    [finding] = found(url)
    assert finding.rule == "server_answers"
    assert "it serves Qwen/Qwen3-1.7B, not builtin:tiny" in finding.message
    assert found(url, "model.path=/models/qwen3-1.7b") == []


def test_endpoints_of_the_weight_sync_are_missing(running):
    url, answers = running
    answers.paths = PATHS[:2]
    assert "it has no /collective_rpc (rollout.weight_sync=disk)" in found(url)[0].message
    [finding] = found(url, "rollout.weight_sync=nccl")
    assert "no /init_weight_transfer_engine, /update_weights" in finding.message
    assert "--weight-transfer-config" in finding.fix


def test_logprobs_are_missing_or_raw(running):
    url, answers = running
    answers.logprobs = "none"
    assert found(url) == []
    [finding] = found(url, *TRUNCATE)
    assert finding.rule == "correction_needs_sampler_logprobs"
    off = "loss.correction.mode=none loss.correction.low=null loss.correction.high=null"
    assert finding.fix.startswith(f"{off} loss.seq_logprob_error_threshold=null, or ")
    answers.logprobs = "raw"
    assert found(url, *TRUNCATE) == []
    assert [f.rule for f in found(url, *TRUNCATE, "rollout.temperature=0.8")] == ["server_returns_processed_logprobs"]
