"""The cost of pushing to a slow Hub for a training step: steps during a push and while the push is paused, in turns.

python -m benchmarks hub
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch

from pcmepp_openclip import PCMEppLoss
from pcmepp_openclip.hub.upload import HubTarget
from pcmepp_openclip.models import export
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training.push import Pusher

from .measure import Row, one_thread, row

STEPS = 3  # so many steps are timed at once
REPEATS = 60
BATCH = 128
RATE = 10e6  # the bytes per second that the Hub takes
SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hub_server import Hub
os.nice(19)  # the Hub is another machine
hub = Hub(sys.argv[2], token="hf_benchmark")
hub.fail("/_lfs/", upload_rate=float(sys.argv[3]))
hub.fail("/api/", delay=0.2)
print(hub.url, flush=True)
hub.serve_forever()
"""


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place, hub(Path(place)), one_thread():
        with_push, without = measure(Path(place))
    title = f"training step on one of the cores, with a push to a Hub at {RATE / 1e6:.0f} MB/s against without"
    yield row(title, with_push, without, "s", 1.02)


@contextlib.contextmanager
def hub(place: Path) -> Iterator[None]:
    """Run a server of the tests as the Hub of this process and its children."""
    tests = Path(__file__).parent.parent / "tests/support"
    command = [sys.executable, "-c", SERVER, str(tests), f"{place}/hub", str(RATE)]
    environment = dict(os.environ)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.environ |= {"HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": "hf_benchmark"}
        os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": f"{place}/home"}
        yield
    finally:
        server.terminate()
        server.wait()
        os.environ.clear()
        os.environ.update(environment)


def measure(place: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of steps with and without a push; each push goes through all of its stages."""
    step, checkpoint = training()
    (place / "run").mkdir()
    pusher = Pusher(HubTarget("me/benchmark"), place / "run")
    saved = place / "run" / "epoch_1.pt"

    def offer(number: int) -> None:
        checkpoints.save(checkpoint(number), saved)
        pusher.offer(saved, number)

    def seconds(pushing: bool) -> float:
        if pusher.process is not None:  # which does nothing to one that has ended
            pusher.process.send_signal(signal.SIGCONT if pushing else signal.SIGSTOP)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - start) / STEPS

    offer(0)
    while pusher.pushed != 0:  # the Hub makes the repo
        step()
    with_push: list[float] = []
    without: list[float] = []
    for number in range(1, REPEATS + 1):
        if pusher.pushed == pusher.offered:
            offer(number)
        for pushing in (True, False) if number % 2 else (False, True):
            (with_push if pushing else without).append(seconds(pushing))
    seconds(True)
    pusher.finish(60)
    return with_push, without


def training() -> tuple[Callable[[], None], Callable[[int], dict[str, Any]]]:
    """Return a training step of the small model, and a function for the content of its checkpoint."""
    model = open_clip.create_model("PCMEpp-tiny", output_dict=True)
    loss = PCMEppLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    image = torch.randn(BATCH, 3, 32, 32)
    text = open_clip.tokenize([f"a picture of {i}" for i in range(BATCH)], context_length=32)
    metadata: dict[str, Any] = {"config": export.model_config_of(model, "PCMEpp-tiny")}
    metadata |= {"hyperparameters": {}, "data": [], "versions": {}}

    def step() -> None:
        optimizer.zero_grad()
        terms = loss(**model(image, text), output_dict=True)
        sum(terms.values()).backward()
        optimizer.step()

    def checkpoint(number: int) -> dict[str, Any]:
        state = {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 1,
            "about": metadata,
        }
        return {**state, "training": {"step": number, "samples_seen": number}}

    return step, checkpoint
