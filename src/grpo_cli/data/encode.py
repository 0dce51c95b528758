"""From a prompt to the token ids that are sampled from and trained on: templated and tokenised here, nowhere else."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.data.rows import Chat
from grpo_cli.errors import ConfigError, Finding

PROBES = ("Zq7 \"<&'\n é", "x" * 40)
"""Texts that show what a template does with a prompt; the first is changed by escaping of any kind."""


class Encoder:
    """Turns prompts into text and token ids, with exactly one BOS where the tokenizer or the template wants one.

    * A prompt becomes a user message (a chat list its own messages) behind `system_prompt`, and goes through the chat
      template once; the template's text is tokenised without further special tokens.
    * Without any template the prompt is tokenised as it is.
    * Where the tokenizer by itself puts a BOS in front, and the text has none yet, one is added.

    Raises ConfigError (`chat_template_available`) for a template that is missing or broken.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None, chat_template: str | None):
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template = read_template(chat_template)
        self.templated = bool(self.template or getattr(tokenizer, "chat_template", None))
        if system_prompt is not None and not self.templated:
            raise ConfigError(template_missing("data.system_prompt is set"))
        self.bos = _own_bos(tokenizer)
        self.needles: set[str] = set()
        self.overhead = self._overhead()

    def text(self, prompt: str | Chat) -> str:
        """What the model reads, as text. ValueError with the template's reason when it refuses the messages."""
        if not self.templated:
            if not isinstance(prompt, str):
                raise ConfigError(template_missing("prompts are chat lists"))
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        prefill = messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=not prefill,
                continue_final_message=prefill,
            )
        except Exception as error:  # Jinja's own errors, and whatever a template raises about its messages
            raise ValueError(f"the chat template refuses it: {error}") from error
        return str(text)

    def encode(self, prompt: str | Chat) -> tuple[str, list[int]]:
        """Text and token ids of one prompt. Lengths: any; see `count` for many at once."""
        text = self.text(prompt)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
            text = self.tokenizer.convert_ids_to_tokens(self.bos) + text
        return text, ids

    def counts(self, prompts: Sequence[str | Chat]) -> list[tuple[int, int]]:
        """(tokens of a prompt's own text, tokens as `encode` makes them) of each; ValueError when one is refused.

        The first number is without template and BOS: where it is 0 the model would read nothing.
        """
        contents = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
        whole = self._batch([self.text(prompt) for prompt in prompts])
        return [
            (len(own), len(ids) + (self.bos is not None and ids[:1] != [self.bos]))
            for own, ids in zip(self._batch(contents), whole, strict=True)
        ]

    def at_most(self, prompt: str | Chat) -> int | None:
        """An upper bound of `count` that costs no tokenising, or None where none is known.

        For ASCII text and a BPE or Unigram tokenizer that knows every ASCII character: at least one token, and at most
        one a character. It makes checking a million short prompts cheap.
        """
        if self.overhead is None or not isinstance(prompt, str) or not prompt.isascii():
            return None
        if any(needle in prompt for needle in self.needles):
            return None
        return len(prompt) + self.overhead

    def _batch(self, texts: list[str]) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        try:
            if backend is not None:
                return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
            return [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        except Exception as error:  # the tokenizers library raises bare Exceptions, for example for an unknown word
            raise ValueError(f"the tokenizer refuses it: {error}") from error

    def _overhead(self) -> int | None:
        """Tokens that template and BOS add to a text prompt at most; None where `at_most` knows no bound."""
        if not _covers_ascii(self.tokenizer):
            return None
        if not self.templated:
            return 3  # BOS, and a word boundary mark at either end
        around = self._around()
        if around is None:
            return None
        before, after = around
        # Text is cut at special tokens before anything else: what lies beyond the nearest ones is counted exactly.
        specials = "|".join(re.escape(token) for token in sorted(_specials(self.tokenizer), key=len, reverse=True))
        cuts = [match.end() for match in re.finditer(specials, before)] if specials else []
        start = cuts[-1] if cuts else 0
        found = re.search(specials, after) if specials else None
        end = found.start() if found else len(after)
        exact = sum(len(ids) for ids in self._batch([before[:start], after[end:]]))
        return exact + len(before[start:].encode()) + len(after[:end].encode()) + 3

    def _around(self) -> tuple[str, str] | None:
        """(before, after) when the template only puts fixed text around prompts without needles, else None."""
        found = set()
        for probe in PROBES:
            watched = _Watched(probe)
            try:
                text = self.text(watched)
            except ValueError as error:
                raise ConfigError(template_broken(str(error))) from error
            if any(needle in probe for needle in watched.needles) or text.count(probe) != 1:
                return None
            self.needles |= watched.needles
            before, _, after = text.partition(probe)
            found.add((before, after))
        return found.pop() if len(found) == 1 else None


class _Watched(str):
    """A text that notices what a template does with it.

    Printing, joining and stripping keep it a closed box. Asking whether it holds a fixed text makes that text a needle,
    also when asked of what stripping leaves: prompts without any needle are treated alike. Everything else opens the
    box: the empty text, which is in every prompt, becomes a needle.
    """

    def __init__(self, _: str):
        self.needles: set[str] = set()

    def strip(self, chars: Any = None) -> _Watched:
        return self._rest(str.strip(self, chars))

    def lstrip(self, chars: Any = None) -> _Watched:
        return self._rest(str.lstrip(self, chars))

    def rstrip(self, chars: Any = None) -> _Watched:
        return self._rest(str.rstrip(self, chars))

    def _rest(self, text: str) -> _Watched:
        rest = _Watched(text)
        rest.needles = self.needles
        return rest

    def __contains__(self, part: Any) -> bool:
        self.needles.add(part)
        return str.__contains__(self, part)

    def startswith(self, prefix: Any, *_: Any) -> bool:
        self.needles.update([prefix] if isinstance(prefix, str) else prefix)
        return str.startswith(self, prefix)

    def endswith(self, suffix: Any, *_: Any) -> bool:
        self.needles.update([suffix] if isinstance(suffix, str) else suffix)
        return str.endswith(self, suffix)

    def __len__(self) -> int:
        self.needles.add("")
        return str.__len__(self)

    def __getitem__(self, key: Any) -> str:
        self.needles.add("")
        return str.__getitem__(self, key)

    def __iter__(self) -> Any:
        self.needles.add("")
        return str.__iter__(self)

    def __eq__(self, other: object) -> bool:
        self.needles.add("")
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in CLOSED:
            self.needles.add("")
        return object.__getattribute__(self, name)


CLOSED = frozenset({"needles", "strip", "lstrip", "rstrip", "startswith", "endswith"})


def _covers_ascii(tokenizer: Any) -> bool:
    """Whether every ASCII text has at least one and at most as many tokens as characters, a mark or two apart."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ not in ("BPE", "Unigram"):
        return False
    counts = [len(encoding.ids) for encoding in backend.encode_batch(list(string.printable), add_special_tokens=False)]
    visible = counts[: len(string.printable) - len(string.whitespace)]
    return min(visible) >= 1 and max(counts) <= 2


def _specials(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]


def _own_bos(tokenizer: Any) -> int | None:
    """The BOS id when the tokenizer by itself puts one before a text, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else None


def read_template(chat_template: str | None) -> str | None:
    """The Jinja text of `data.chat_template`: itself, or the content of the file that it names."""
    if chat_template is None or "{{" in chat_template or "{%" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(template_broken(f"it is neither Jinja text nor a readable file ({error})")) from error


def template_broken(reason: str) -> Finding:
    message = f"data.chat_template cannot be used: {reason}."
    return Finding("chat_template_available", ("data.chat_template",), message, "data.chat_template=PATH.jinja or null")


def template_missing(reason: str) -> Finding:
    message = f"{reason}, data.chat_template=null and the tokenizer has no chat template."
    keys = ("data.chat_template", "data.system_prompt", "model.path")
    fix = "data.chat_template=PATH.jinja, or data.system_prompt=null and prompts that are plain text"
    return Finding("chat_template_available", keys, message, fix)
