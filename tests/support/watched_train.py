"""`pcmepp train` that also writes down the captions that it has trained on: a line a step, in the folder `watched`."""

import json
import os
from pathlib import Path


def main(argv):
    from pcmepp_openclip.training import command as train

    watch(Path(argv[argv.index("--logs") + 1]) / "watched")
    return train.main(argv)


def watch(folder):
    """From now on, training in this process writes to the folder."""
    from pcmepp_openclip.training.steps import EpochSteps

    steps = EpochSteps.steps
    folder.mkdir(exist_ok=True)

    def watched(self, *args):
        with (folder / str(os.getpid())).open("a") as file:
            for i, batch in steps(self, *args):
                yield i, batch
                print(json.dumps([row.tolist() for row in batch[1]]), file=file, flush=True)

    EpochSteps.steps = watched
