"""Ports that no other process of this machine uses."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Free loopback ports, all different. Another process may bind one before the caller's server starts."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def free_port() -> int:
    """A free loopback port, see `free_ports`."""
    return free_ports(1)[0]
