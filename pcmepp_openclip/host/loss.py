"""The loss that open_clip's `create_loss` builds for a PCME++ model, and the one of --chunked-clip-loss."""

from typing import Any

from ..config import PCMEppCfg
from ..losses import ChunkedClipLoss, PCMEppLoss


def create_loss(args: Any, pcmepp_cfg: dict) -> PCMEppLoss:
    """Return the loss for the arguments of open_clip_train and a model's `pcmepp_cfg`, with the weights of its terms.

    --local-loss and --gather-with-grad change nothing, since the loss always covers the whole batch.
    """
    if getattr(args, "distill", False) or getattr(args, "siglip", False):
        raise ValueError("A PCME++ model has a loss of its own: drop --distill-model and --siglip.")
    if getattr(args, "horovod", False):
        raise ValueError("PCMEppLoss works with torch.distributed: drop --horovod and start by torchrun or srun.")
    return pcmepp_loss(PCMEppCfg.parse(pcmepp_cfg), args.rank, args.world_size, getattr(args, "seed", 0))


def pcmepp_loss(cfg: PCMEppCfg, rank: int = 0, world_size: int = 1, seed: int = 0) -> PCMEppLoss:
    """Return the loss that the config of a model asks for."""
    return PCMEppLoss(
        rank,
        world_size,
        cfg.distance,
        cfg.reduction,
        cfg.train_means_by,
        settings=cfg.term_settings,
        seed=seed,
        **cfg.weights,
    )


def create_chunked_clip_loss(args: Any) -> ChunkedClipLoss:
    """Return the loss of --chunked-clip-loss, for a plain model and the arguments of open_clip_train."""
    return ChunkedClipLoss(args.local_loss, args.gather_with_grad, args.rank, args.world_size)
