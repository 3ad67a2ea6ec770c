"""What ranks do in tests of the network between them. Run by `ranks.py`, or as a script in a network namespace:

python network_rank.py NAME FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment
"""

import json
import logging
import os
import resource
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pcmepp_openclip.data import gathering
from pcmepp_openclip.data.tally import Tally
from pcmepp_openclip.system import network
from pcmepp_openclip.training.coordination import RankCoordinator


def start(timeout: float = 30.0) -> tuple[int, int]:
    network.choose_interface()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def coordinator(folder: Path, rank: int, world: int) -> RankCoordinator:
    return RankCoordinator(folder, rank, world, True, save_every_minutes=0, timeout_minutes=1)


def tally_of(rank: int) -> Tally:
    """What a rank has met: each has another number of everything, and its own first place of each cause."""
    causes = {(rank % 2, "broken image"): 3 + rank, (1, f"cause {rank}"): 1}
    return Tally(
        met=100 + rank,
        used=Counter({0: 90, rank: 5}),
        lost=Counter(causes),
        retries=Counter({rank: 2}),
        filled=rank,
        stood_in=2 * rank,
        first=dict.fromkeys(causes, f"shard {rank}"),
    )


def gather(folder: Path) -> None:
    """Two epochs' summaries, the first one with all ranks, the second with one that is late; then training goes on."""
    rank, world = start()
    time.sleep(3 if rank == world - 1 else 0)  # longer than a summary may take: creating it must not be bound by that
    gathering.TIMEOUT_S = 60.0
    reduce = gathering.TallyReducer()
    mates = coordinator(folder, rank, world)
    found = [reduce(tally_of(rank))]
    gathering.TIMEOUT_S = 0.5 if rank == 0 else 20.0
    time.sleep(2 if rank == world - 1 else 0)
    found.append(reduce(tally_of(rank)))
    assert mates.gather(rank) == list(range(world))  # collectives are as before
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world
    answer = [[tally.to_plain(), ranks] for tally, ranks in found]
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    mates.gather(None)  # rank 0, which holds the store, ends last


def connect(folder: Path) -> None:
    """The ranks of several nodes gather something by both groups, the last one late."""
    if os.environ.get("AS_IT_WAS"):
        network.choose_interface = lambda: None
    rank, world = start()
    late = float(os.environ.get("LATE", "0"))
    time.sleep(late if rank == world - 1 else 0)
    mates = coordinator(folder, rank, world)
    answer = {"ranks": mates.gather(rank), "interface": os.environ.get(network.INTERFACE)}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    mates.gather(None)


def buckets(folder: Path) -> None:
    """The gradients of the same batch in three passes, and whether the first leaves random numbers alone."""
    import open_clip

    from pcmepp_openclip.host.parallel import DDP

    rank, _ = start()
    torch.manual_seed(0)
    model = open_clip.create_model("PCMEpp-tiny", output_dict=True)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: model.calls.add_(torch.rand(()).ceil()) and None)
    wrapped = DDP(model)
    mine = torch.Generator().manual_seed(rank)
    images, texts = torch.randn(1, 3, 32, 32, generator=mine), torch.randint(1, 49406, (1, 32), generator=mine)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        wrapped.zero_grad()
        sum(value.square().sum() for value in wrapped(images, texts).values()).backward()
        expected = torch.rand(2, generator=torch.Generator().manual_seed(step))[1]
        assert torch.rand(()) == expected and model.calls == step + 1  # as if there was one pass
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()


def open_files(folder: Path) -> None:
    """The limits after asking for 1,000 and for 5,000 ranks, with a low soft limit and a hard limit of 4,096."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
    said = [network.raise_open_files(ranks) for ranks in (1000, 5000)]
    (folder / "files.json").write_text(json.dumps([said, resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))


def refused(folder: Path) -> None:
    """An interface that does not exist."""
    os.environ[network.INTERFACE] = "nowhere0"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    coordinator(folder, 0, 2)


def train(argv: list[str]) -> int:
    """`pcmepp train`, with the number of groups that it creates beside the default one in a file."""
    from pcmepp_openclip.training import command

    made, stock = [], dist.new_group

    def new_group(*args, **kwargs):
        made.append(kwargs.get("backend"))
        Path(argv[0]).write_text(json.dumps(made))
        return stock(*args, **kwargs)

    dist.new_group = new_group
    return command.main(argv[1:])


def main(argv: list[str]) -> int:
    name, *rest = argv
    if name == "train":
        return train(rest)
    logging.disable(logging.WARNING)
    globals()[name](Path(rest[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
