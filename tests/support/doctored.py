"""An open_clip that does not call a name any more: the code of the caller is changed to call the stock function."""

import inspect
import pkgutil


def bypass(seam) -> None:
    """Make `seam.caller` call what stands for the seam in stock open_clip, past what the plugin puts there."""
    function = inspect.unwrap(pkgutil.resolve_name(seam.caller))
    other, found = f"stock_{seam.name}", seam.find()
    assert seam.name in function.__code__.co_names, f"{seam.caller} does not use {seam.name} in the first place"
    names = tuple(other if name == seam.name else name for name in function.__code__.co_names)
    function.__code__ = function.__code__.replace(co_names=names)
    is_dispatcher = isinstance(found, type) and type(found).__name__ == "Dispatch"
    stock = found.__mro__[1] if is_dispatcher else inspect.unwrap(found)
    if seam.name == "DistributedDataParallel":  # the stock one fails on a CPU; one that does not, as on a GPU
        from pcmepp_openclip.host.parallel import DDP as stock
    function.__globals__[other] = stock
    setattr(pkgutil.resolve_name(seam.holder), other, stock)
    if seam.name == "load_state_dict":  # which the caller calls on modules, too
        import torch

        torch.nn.Module.stock_load_state_dict = torch.nn.Module.load_state_dict
