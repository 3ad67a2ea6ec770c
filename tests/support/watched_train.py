"""`pcmepp train` that also writes down the captions that it has trained on: a line a step, in the folder `watched`."""

import collections
import json
import os
from pathlib import Path


def main(argv):
    from pcmepp_openclip.training import command as train

    watch(Path(argv[argv.index("--logs") + 1]) / "watched")
    return train.main(argv)


def watch(folder):
    """From now on, training in this process writes to the folder."""
    from pcmepp_openclip.training.loop import Training

    batches = Training._batches
    folder.mkdir(exist_ok=True)

    def watched(*args):
        with (folder / str(os.getpid())).open("a") as file:
            for i, batch in batches(*args):
                print(json.dumps([row.tolist() for row in batch[1]]), file=file, flush=True)
                yield i, batch

    Training._batches = watched


def captions_of(folder):
    """How often each caption was trained on, by its tokens, in all files of the folder."""
    return collections.Counter(
        tuple(token for token in row if token)
        for path in folder.iterdir()
        for line in path.read_text().splitlines()
        for row in json.loads(line)
    )
