"""open_clip's own training program, on ranks that have no GPU: its call of DDP takes these alone."""

import torch


def main(argv):
    from open_clip_train.main import main as stock_main

    import pcmepp_openclip  # noqa: F401  registers the models and their loss

    stock = torch.nn.parallel.DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = lambda model, device_ids, **more: stock(model, **more)
    return stock_main(argv) or 0
