"""`pcmepp train --push-to-hub ORG/NAME`: each finished checkpoint is pushed to the Hub while training continues.

All that takes time, conversion, hashing and network, happens in one child process of low priority (`worker.py`). The
training process links a checkpoint to a place where the run does not delete it, writes one line to a pipe, and logs
what comes back. Neither a slow Hub nor a dead child is ever waited for, but for a bounded time at the run's end.
"""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..hub import queue, upload
from ..hub.errors import PermanentHubError, TransientHubError
from ..system.processes import signals_blocked

END_TIMEOUT_S = 3600.0  # seconds that the last push may take when a run is through
STOP_TIMEOUT_S = 45.0  # seconds that it may take if the run was asked to stop, and may be killed soon
CHECK_TIMEOUT_S = 15.0  # seconds that the Hub has to answer the check before the first step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Hugging Face Hub (the token comes from HF_TOKEN or `hf auth login`)")
    group.add_argument("--push-to-hub", metavar="ORG/NAME", help="push every finished checkpoint to this repo")
    group.add_argument("--hub-private", action="store_true", help="create the repo as private, if it does not exist")
    group.add_argument("--hub-branch", metavar="NAME", help="push to this branch; it is created if it does not exist")
    group.add_argument("--hub-tag", action="store_true", help="tag every pushed checkpoint, as in step-2000")
    group.add_argument("--hub-license", metavar="ID", default="mit", help="licence on the model card (default: mit)")


def target_of(flags: argparse.Namespace, logs: str) -> upload.HubTarget | None:
    """Return the repo that the flags of `add_arguments` name, or None; ValueError without a run folder."""
    if flags.push_to_hub is None:
        return None
    if not logs or logs.lower() == "none":
        raise ValueError("--push-to-hub pushes the checkpoints of the run: set their folder with --logs.")
    return upload.HubTarget(flags.push_to_hub, private=flags.hub_private, branch=flags.hub_branch)


def check_access(target: upload.HubTarget | None) -> None:
    """Raise ValueError if this token may not write to the target. A Hub that cannot be reached is only reported."""
    if target is None:
        return
    try:
        upload.check_access(target, silence=CHECK_TIMEOUT_S)
    except PermanentHubError as error:
        raise ValueError(f"--push-to-hub: {error}") from None
    except TransientHubError as passing:
        print(
            f"pcmepp train: --push-to-hub {target.repo_id}: {passing}. Training starts anyway; every checkpoint "
            "tries again.",
            file=sys.stderr,
        )


class Pusher:
    """The training process's side of pushing. It does nothing without a target, as on ranks other than 0.

    Arguments:
        run: the run folder.
        license: the licence on the model card.
        tag: whether every pushed checkpoint is tagged.
    """

    def __init__(self, target: upload.HubTarget | None, run: Path, license: str = "mit", tag: bool = False):
        self.target, self.run, self.license, self.tag = target, run, license, tag
        self.process: subprocess.Popen | None = None
        self.held: tuple[Path, int] | None = None
        self.offered: int | None = None  # the step of the last checkpoint that was handed over
        self.pushed: int | None = None  # the step of the last checkpoint that arrived
        self.said = ""
        self.finishing = False

    @property
    def by_hand(self) -> str:
        assert self.target is not None
        return f"`pcmepp push {self.run} {' '.join(self.target.words)}`"

    def start(self) -> None:
        """Start the process that pushes, unless it was started before."""
        if self.target is None or self.process is not None:
            return
        queue.clear(self.run)  # a run that was killed may have left files
        command = [sys.executable, "-m", "pcmepp_openclip.hub.worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with signals_blocked():
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C ends the run, which then ends it
            )
        target = {"repo_id": self.target.repo_id, "private": self.target.private, "branch": self.target.branch}
        self._tell(target=target, run=str(self.run), license=self.license, tag=self.tag)
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def offer(self, checkpoint: Path, step: int, hold: bool = False) -> None:
        """Hand over a finished checkpoint, at once or, with `hold`, when its validation is done."""
        if self.target is None:
            return
        self.start()
        self.held = queue.add(self.run, checkpoint, step), step
        self.offered = step
        if not hold:
            self.release()

    def release(self) -> None:
        """Hand over the checkpoint that was held back, if there is one."""
        if self.held is not None:
            (staged, step), self.held = self.held, None
            self._tell(checkpoint=str(staged), step=step)
            logging.info("Hub: step %d is ready to be pushed.", step)

    def finish(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait at most `seconds` for the last push, less once `hurry` is true, and log what has arrived."""
        if self.target is None or self.process is None:
            return
        self.release()
        self.finishing = True
        self._tell(finish=True)
        if self.pushed != self.offered and self.process.poll() is None:
            logging.info("Hub: pushing the last checkpoint to %s, for %d s at most.", self.target.repo_id, seconds)
        end, hurried = time.monotonic() + seconds, False
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if not hurried and hurry():
                end, hurried = min(end, time.monotonic() + STOP_TIMEOUT_S), True
        self.process.kill()
        self.process.wait()
        if self.offered is None:
            logging.info("Hub: there was no new checkpoint to push to %s.", self.target.repo_id)
        elif self._arrived():
            logging.info("Hub: %s holds the last checkpoint, step %d.", self.target.repo_id, self.offered)
        else:
            logging.warning("Hub: the last checkpoint is not on the Hub yet: run %s.", self.by_hand)
        queue.clear(self.run)

    def _arrived(self) -> bool:
        for _ in range(20):  # the thread may not have processed the message yet
            if self.pushed == self.offered:
                return True
            time.sleep(0.05)
        return False

    def _tell(self, **message: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead, which `_listen` has said
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _listen(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word = json.loads(line)
            if "pushed" in word:
                self.pushed, self.said = word["pushed"], ""
                logging.info("Hub: pushed step %d: %s", word["pushed"], word["url"])
            elif word["said"] != self.said:  # once is enough
                self.said = word["said"]
                logging.warning("Hub: %s Training continues.", self.said)
        if not self.finishing:
            process.wait()
            logging.warning(
                "Hub: the process that pushes has ended (code %s). Training continues; afterwards run %s.",
                process.returncode,
                self.by_hand,
            )
