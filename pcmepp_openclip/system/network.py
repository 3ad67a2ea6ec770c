"""Connections between the ranks of a run: the network interface, the limit of open files, their group on the CPUs and
the store that all of them can read.

Gloo, torch's backend for CPUs, listens on the address that the host name resolves to, or else on loopback, where no
other node can connect. GLOO_SOCKET_IFNAME names the interface instead. Each gloo group holds a connection, which is an
open file, to every other rank.
"""

import contextlib
import fcntl
import functools
import ipaddress
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .errors import RunFailed

INTERFACE = "GLOO_SOCKET_IFNAME"
OWN_FILES = 1024  # a rank's open files besides its connections: libraries, data workers, shards and NCCL
FILES_PER_RANK = 2  # on CPUs torch's default group and that of the run both use gloo; with NCCL one would do
ELSEWHERE = "192.0.2.1"  # no host has this address, which is for documentation, so that its route is the default route
_SIOCGIFADDR = 0x8915
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0


def several_nodes() -> bool:
    """Return whether the launcher, torchrun or srun, has started this run on more than one node."""
    ranks, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if ranks is not None and here is not None:
        return ranks != here
    return int(os.environ.get("SLURM_NNODES", "1")) > 1


def choose_interface(head: str | None = None) -> None:
    """Set GLOO_SOCKET_IFNAME, if it is unset, to the interface that leads to the head node. If that is unknown, gloo
    takes its default. Call it before the first process group is created.

    Arguments:
        head: host name or address of the head node; by default MASTER_ADDR.
    """
    head = head or os.environ.get("MASTER_ADDR")
    if head and not os.environ.get(INTERFACE):
        name = interface_towards(head, several_nodes())
        if name is not None:
            os.environ[INTERFACE] = name


def interface_towards(head: str, several_nodes: bool) -> str | None:
    """Return the interface of the route to `head`. On the head node itself, it is the one that has the address of
    `head`; if the name resolves to loopback there and there are other nodes, it is that of the default route, or the
    only one there is."""
    names, sources = _interfaces(), _sources(head)
    if not sources:
        return None
    loopback = {name for address, name in names.items() if ipaddress.ip_address(address).is_loopback}
    routes = [names[address] for address in sources if address in names]
    outward = [name for name in routes if name not in loopback]
    if routes and not several_nodes:
        return (outward or routes)[0]
    outward += [names[address] for address in _sources(ELSEWHERE) if address in names]
    others = set(names.values()) - loopback
    return outward[0] if outward else others.pop() if len(others) == 1 else None


def _sources(host: str) -> list[str]:
    """Return the addresses of this machine from which `host` is reached. Nothing is sent."""
    addresses = []
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    for family, kind, protocol, _, target in targets:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                addresses.append(probe.getsockname()[0].partition("%")[0])
        except OSError:  # there is no route
            continue
    return addresses


def _interfaces() -> dict[str, str]:
    """Return the names of the network interfaces by address, on Linux alone."""
    if sys.platform != "linux":
        return {}
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                names[socket.inet_ntoa(answer[20:24])] = name
            except OSError:  # it has no IPv4 address
                continue
    six = Path("/proc/net/if_inet6")
    for line in six.read_text().splitlines() if six.exists() else ():
        digits, *_, name = line.split()
        names[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return names


def raise_open_files(ranks: int) -> str | None:
    """Raise the limit of open files of this process, and of those that it starts, to the need of one of `ranks` ranks.

    Returns:
        A warning if the hard limit, which only an administrator can raise, is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + FILES_PER_RANK * ranks
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return None
    return (
        f"A process may have {hard} open files here, and with {ranks} ranks it may need {needed}, since every rank is "
        "connected to every other: raise the hard limit on every node (`ulimit -Hn`; LimitNOFILE= in systemd, "
        "--ulimit nofile= in Docker)."
    )


def cpu_group(timeout: timedelta) -> Any:
    """Create a gloo group of all ranks, which must call this together. Raise RunFailed if they cannot connect.

    Arguments:
        timeout: how long its collectives, and the wait for the last rank, may take.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise RunFailed(_not_connected(error)) from None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise RunFailed with an explanation where gloo cannot create torch's default group, or where a rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise RunFailed(
                f"Rank {dist.get_rank()} has lost another rank, which was killed, perhaps for lack of memory, or did "
                "not respond for --rank-timeout-minutes: look at the log of its node, and start again with --resume "
                f"latest. The cause was: {' '.join(str(error).split())}"
            ) from None
        if type(error) is RuntimeError and "gloo" in str(error).lower() and not dist.is_initialized():
            raise RunFailed(_not_connected(error)) from None
        raise


def _not_connected(error: Exception) -> str:
    """Return the message for ranks that could not create a gloo group."""
    name = os.environ.get(INTERFACE)
    where = f"the network interface {name} ({INTERFACE})" if name else f"gloo's own choice, as {INTERFACE} is unset"
    cause = " ".join(str(error).split())
    return (
        f"The ranks could not connect to each other by {where}: set {INTERFACE} on every node to the interface that "
        f"leads to the other nodes (`ip -brief address` lists them), and start again. The cause was: {cause}"
    )


def run_store() -> Any:
    """Return the key-value store of the process group, which all ranks can reach; None without a group.

    The connection is a second one, since no other thread can use torch's own while torch waits on it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return _second_connection(dist.distributed_c10d._get_default_store())


@functools.lru_cache(maxsize=1)
def _second_connection(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store  # older versions of torch cannot clone it


def wait_for_keys(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Return whether all keys are in the store, after that many seconds at most. Signals are handled meanwhile."""
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE_S
    while not store.check(list(keys)):
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_PAUSE_S)
    return True
