"""The process that runs reward terms which must not run in the trainer. Started by `pool.py`, never by hand.

It reads pickled requests from a socket (they come from the trainer, which is trusted) and answers in JSON (it may have
been taken over by what it ran, so the trainer unpickles nothing from it).
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import struct
import sys
from importlib import import_module
from typing import Any

from grpo_cli.process.signals import die_with_parent

LENGTH = struct.Struct("!Q")


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """One message: its length, then its bytes."""
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket, limit: int | None = None) -> bytes:
    """The next message; EOFError when the other side is gone, ValueError beyond `limit` bytes."""
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    if limit is not None and length > limit:
        raise ValueError(f"a message of {length} bytes")
    return _receive(connection, length)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def main() -> None:
    """Arguments: file descriptor of the socket, process id of the trainer, bytes of memory (0: no limit)."""
    descriptor, parent, memory = map(int, sys.argv[-3:])
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    connection = socket.socket(fileno=descriptor)
    try:
        _serve(connection)
    except (EOFError, OSError):  # the trainer has closed: nothing is left to do
        os._exit(0)


def _serve(connection: socket.socket) -> None:
    from grpo_cli.reward.python import ContractError, describe

    kind, options = pickle.loads(receive_frame(connection))
    path = str(options.get("path", ""))
    try:
        score = import_module(f"grpo_cli.reward.{kind}").make(options)
    except BaseException as error:  # also SystemExit of a user's file: the trainer says why
        _answer(connection, error=describe(error, path))
        return
    _answer(connection, values=[])
    while True:
        request = pickle.loads(receive_frame(connection))
        try:
            values = score(request)
        except ContractError as error:
            _answer(connection, contract=str(error))
        except (Exception, SystemExit) as error:
            _answer(connection, error=describe(error, path))
        else:
            _answer(connection, values=values)


def _answer(connection: socket.socket, **reply: Any) -> None:
    send_frame(connection, json.dumps(reply).encode())
