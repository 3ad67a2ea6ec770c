"""torchrun with ranks that are forked from its own process, which has imported everything, so that eight ranks start as
quickly as one.

python forked_torchrun.py NODES RANKS_PER_NODE HEAD:PORT FLAGS...      on every node, with the flags of `pcmepp train`
"""

import os
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def train(*argv: str) -> None:
    from pcmepp_openclip.cli import run

    code = run(["train", *argv])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    import open_clip_train.main  # noqa: F401  before the fork

    import pcmepp_openclip.training.command  # noqa: F401

    nodes, ranks, head, *flags = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=int(nodes),
        max_nodes=int(nodes),
        nproc_per_node=int(ranks),
        run_id="many",
        rdzv_backend="c10d",
        rdzv_endpoint=head,
        max_restarts=0,
        start_method="fork",
        signals_to_handle="SIGTERM",
    )
    elastic_launch(config, train)(*flags)
