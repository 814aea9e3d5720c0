"""Ports for servers, and for the meeting of a weight update."""

from __future__ import annotations

import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports that are free now at the address `host` (empty: at all of this machine's)."""
    probes = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
