"""The loader against webdataset's own and Hugging Face datasets: the same shards, as many workers.

python -m benchmarks peers

Each of them is installed in its newest version in an environment of its own, which is deleted afterwards. It has the
torch, open_clip and Pillow of this one, so that all crop and tokenize by the same code. Needs a package index.
"""

import contextlib
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from . import data
from .measure import Row, row

PEERS = {"webdataset": "webdataset's WebLoader", "datasets": "streaming of Hugging Face datasets"}
REPEATS = 3


def make_environment(folder: Path, package: str) -> str:
    """Return a Python with the newest version of a package, and for all else the packages of this one."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (own / "shared.pth").write_text(sysconfig.get_path("purelib"))  # searched after its own
    return python


class Peer:
    """A loader in a process of its own, which reads an epoch when it is told to."""

    def __init__(self, python: str, name: str, shards: Path):
        command = [python, "-m", "benchmarks.peer_loaders", name, str(shards), str(data.BATCH), str(data.WORKERS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ask = [python, "-c", f"from importlib.metadata import version; print(version('{name}'))"]
        self.version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def rate(self) -> float:
        """Return the samples per second of an epoch."""
        self._send("epoch\n")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().split()
        assert answer and int(answer[0]) == data.SHARDS * data.SAMPLES, "its error is above"
        return float(answer[1])

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the peer has failed, which was noticed before
            self._send("end\n")  # our own workers hold its input open, too
        self._process.wait()


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        shards = Path(place) / "shards"
        shards.mkdir()
        ours = data.load(data.write_shards(shards), data.our_get_data)
        peers = {}
        for name in PEERS:
            peers[name] = Peer(make_environment(Path(place) / name, name), name, shards)
            stack.callback(peers[name].close)
        rates: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
        for epoch in range(REPEATS + 1):
            rates["ours"].append(data.rate(ours, epoch)[0])
            for name, peer in peers.items():
                rates[name].append(peer.rate())
        title_of_data = (
            f"data, {data.SHARDS * data.SAMPLES} JPEGs of {data.SIDE} pixels per epoch, {data.WORKERS} workers"
        )
        for name, title in PEERS.items():
            values = rates["ours"][1:], rates[name][1:]  # the first epoch starts the workers
            yield row(f"{title_of_data}, {title}", *values, "samples/s", note=f"{name} {peers[name].version}")
