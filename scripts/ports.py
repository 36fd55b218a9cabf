"""Ports that no other process of this machine has."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback, all different. Another process may take one before its server starts."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]
