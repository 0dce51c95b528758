"""Safetensors files, written and read in pieces: neither side ever holds more than one piece besides the tensors
themselves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_cli.files.jsonio import write_failed

PIECE = 2**24
"""Elements that are copied, hashed and written at a time."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorWriter:
    """One safetensors file whose tensors come one after the other, in the order of `shapes`.

    `shapes` says name -> (dtype, shape) of all of them beforehand, because the format wants its table first. Every
    byte goes into a SHA-256 on its way. Raises RunError where the disk is full.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self._path = path
        self._left = dict(shapes)
        self._hash = hashlib.sha256()
        self.size = 0
        try:
            self._file = open(path, "wb")  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise write_failed(path, error) from error
        table: dict[str, object] = {"__metadata__": dict(metadata or {})}
        offset = 0
        for name, (dtype, shape) in shapes.items():
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor; any device, any strides."""
        expected, (dtype, shape) = next(iter(self._left.items()))
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), (name, expected)
        del self._left[name]
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            piece = flat[start : start + PIECE].contiguous().cpu()
            self._put(piece.view(torch.uint8).numpy().data)

    def close(self) -> str:
        """Make the file durable; its SHA-256."""
        assert not self._left, f"never written: {list(self._left)}"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise write_failed(self._path, error) from error
        return self._hash.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise write_failed(self._path, error) from error
        self._hash.update(data)
        self.size += len(data)
