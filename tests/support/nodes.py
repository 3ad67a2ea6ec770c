"""Nodes of a cluster on one machine: each has its network and host name, and they are joined by a bridge. Needs root
and iproute2. Nothing is reachable from outside, and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers import REPO, split

ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
SUPPORT = Path(__file__).parent


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Nodes:
    """node1, node2, ... at 10.78.0.1, 10.78.0.2, ...

    Arguments:
        loopback: each node takes its own name for loopback, as many systems are set up.
    """

    def __init__(self, count: int, folder: Path, loopback: bool = False):
        self.folder, self.tag, self.processes = folder, str(os.getpid()), []
        self.namespaces = [f"pc{i}-{self.tag}" for i in range(count + 1)]  # the first one has the bridge
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        switch = self.namespaces[0]
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for i, namespace in enumerate(self.namespaces[1:], start=1):
            ip("-n", switch, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", switch, "link", "set", f"v{i}", "master", "br0", "up")
            ip("-n", namespace, "addr", "add", f"10.78.0.{i}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            others = {f"node{j}": f"10.78.0.{j}" for j in range(1, count + 1)}
            known = {"localhost": "127.0.0.1", **others, **({f"node{i}": "127.0.1.1"} if loopback else {})}
            (folder / f"hosts{i}").write_text("".join(f"{address} {name}\n" for name, address in known.items()))

    def start(self, node: int, *command: str, output: Path, **environment: str) -> subprocess.Popen:
        """Start a command on a node, counted from 1, in a session of its own."""
        # Dozens of ranks leave the processor to what else is tested at the same time.
        enter = [*split("nice -n 10 nsenter"), f"--net=/var/run/netns/{self.namespaces[node]}"]
        enter += [*split("unshare -u -m bash -c"), ENTER]
        enter += [f"node{node}", str(self.folder / f"hosts{node}"), *map(str, command)]
        env = {**os.environ, "PYTHONPATH": f"{REPO}:{SUPPORT}", "OMP_NUM_THREADS": "1", **environment}
        env.pop("GLOO_SOCKET_IFNAME", None)
        with open(output, "a") as file:
            process = subprocess.Popen(enter, cwd=REPO, env=env, stdout=file, stderr=file, start_new_session=True)
        self.processes.append(process)
        return process

    def python(self, node: int, *words: str, **more) -> subprocess.Popen:
        return self.start(node, sys.executable, *words, **more)

    def kill(self, process: subprocess.Popen) -> None:
        """Kill what was started, and all that this has started."""
        for pid in session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)
        for namespace in self.namespaces:
            ip("netns", "del", namespace)


def session(leader: int) -> list[int]:
    """The processes of a session that are no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return found
