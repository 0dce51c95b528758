"""Our own place in the network, as other machines see it. No name server is asked about us: many clusters have none."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

MEETING_PORT = 29400
"""Where torch's launcher meets if the endpoint names no port."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The parts of HOST:PORT, or of HOST alone. Raises ValueError where it is neither.

    >>> host_and_port("node0:29500"), host_and_port("[::1]")
    (('node0', 29500), ('::1', 29400))
    """
    parts = urlsplit(f"//{endpoint}")
    if not parts.hostname or parts.port == 0 or parts.netloc != endpoint or parts.username is not None:
        raise ValueError(f"{endpoint!r} is not HOST:PORT")
    return parts.hostname, parts.port or MEETING_PORT


def address_towards(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """Our own address on the way to `host`. Raises OSError where its name is unknown or no route leads there.

    >>> address_towards("127.0.0.1", 80)
    '127.0.0.1'
    """
    failed = OSError(f"no route to {host}")
    for kind, _, _, _, address in socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM):
        try:
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
                probe.connect(address)
                return probe.getsockname()[0]
        except OSError as error:
            failed = error
    raise failed


def interface_of(address: str) -> str | None:
    """The network interface that has `address`; None where none has."""
    import psutil

    held = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    return held.get(address)


def can_listen(host: str, port: int) -> bool:
    """Whether `host` is this machine and `port` is free: then it is ours to listen there."""
    for kind, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that has just ended is free
            probe.bind(address)
            return True
    return False
