"""What pushing to a slow Hub costs a training step: the same steps and saves, with and without the push behind them.

python -m benchmarks hub
"""

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .measure import Row, row

STEPS = 80  # in a window, which begins with a checkpoint
BATCH = 128
REPEATS = 5
RATE = 10e6  # bytes a second that the Hub takes
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
    with tempfile.TemporaryDirectory() as place:
        tests = Path(__file__).parent.parent / "tests"
        command = [sys.executable, "-c", SERVER, str(tests), f"{place}/hub", str(RATE)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            os.environ |= {"HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": "hf_benchmark"}
            os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": f"{place}/home"}
            yield measure(Path(place))
        finally:
            server.terminate()
            server.wait()


def measure(place: Path) -> Row:
    from pcmepp_openclip import checkpoints
    from pcmepp_openclip.hub.pusher import Pusher

    step, checkpoint = training()
    (place / "run").mkdir()
    args = Namespace(rank=0, logs=str(place), name="run", push_to_hub="me/benchmark", hub_private=False)
    args.hub_branch, args.hub_tag, args.hub_license = None, False, "mit"
    pusher = Pusher(args)
    saved = place / "run" / "epoch_1.pt"

    def window(number: int, pushing: bool) -> float:
        """Seconds a step."""
        checkpoints.save(checkpoint(number), saved)
        start = time.perf_counter()
        if pushing:
            pusher.offer(saved, number)
        for _ in range(STEPS):
            step()
        seconds = (time.perf_counter() - start) / STEPS
        while pusher.pushed != pusher.offered:
            time.sleep(0.05)
        return seconds

    window(0, True)  # the process starts, libraries are loaded
    pairs = []
    for number in range(1, REPEATS + 1):
        theirs = window(number, False)
        pairs.append((window(number, True), theirs))
    pusher.finish(60)
    what = f"training step while a checkpoint goes to a Hub that takes {RATE / 1e6:.0f} MB/s, against without"
    return row(what, pairs, "s", 1.02)


def training() -> tuple[Callable[[], None], Callable[[int], dict[str, Any]]]:
    """A training step of the small model, and what its checkpoint holds."""
    import open_clip
    import torch

    from pcmepp_openclip import PCMEppLoss
    from pcmepp_openclip.hub import folder

    model = open_clip.create_model("PCMEpp-tiny", output_dict=True)
    loss = PCMEppLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    image = torch.randn(BATCH, 3, 32, 32)
    text = open_clip.tokenize([f"a picture of {i}" for i in range(BATCH)], context_length=32)
    about: dict[str, Any] = {"config": folder.describe(model, "PCMEpp-tiny")}
    about |= {"hyperparameters": {}, "data": [], "versions": {}}

    def step() -> None:
        optimizer.zero_grad()
        terms = loss(**model(image, text), output_dict=True)
        sum(terms.values()).backward()
        optimizer.step()

    def checkpoint(number: int) -> dict[str, Any]:
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, "about": about}
        return {**state, "training": {"step": number, "samples_seen": number}}

    return step, checkpoint
