"""Learning rates by layer: each group of parameters has --lr times a factor of its own.

    group                                          factor
    block i of the n blocks of a tower, i from 0   multiplier of the tower * decay^(n - i)
    log-variance block j of k, j from 0            multiplier of the tower * decay^(k - j)
    embeddings and norms of a tower                multiplier of the tower
    everything else                                1

"Everything else" is the pooling and projection of a tower, the bias of the log-variances, a, b and the logit scale and
bias, and a log-variance branch without blocks of its own, on top of a tower. A tower without a list of blocks has its
multiplier only.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..host.towers import image_tower, text_tower

HEADS = "heads"
SCALE, NAME = "lr_scale", "name"  # keys of a group of the optimizer; the first is timm's name for it


class Place(NamedTuple):
    """The place of a parameter in a model.

    Arguments:
        group: the name of its group, such as "image block 3".
        tower: "image" or "text"; "" for parameters that are trained with the full learning rate.
        depth: the exponent of the decay: the number of blocks up to the end of the tower, this one included; 0 for a
            parameter that is in no block.
        backbone: whether the parameter belongs to the tower itself, not to its log-variance branch or heads.
    """

    group: str
    tower: str = ""
    depth: int = 0
    backbone: bool = False


def places(model: Any) -> dict[str, Place]:
    """Return the place of every parameter of a model, by name. The model may be of any kind, PCME++ or not."""
    place_of: dict[int, Place] = {}
    for name, tower in (("image", image_tower(model)), ("text", text_tower(model))):
        branch = getattr(model, f"{name}_branch", None)
        for kind, blocks, backbone in (
            ("block", tower.blocks, True),
            ("log-variance block", branch.blocks if branch is not None else (), False),
        ):
            for i, block in enumerate(blocks):
                place = Place(f"{name} {kind} {i}", name, len(blocks) - i, backbone)
                place_of |= {id(parameter): place for parameter in block.parameters()}
        outside = Place(f"{name} embeddings and norms", name, 0, True)
        place_of |= {
            id(parameter): outside for parameter in tower.backbone_parameters() if id(parameter) not in place_of
        }
    return {name: place_of.get(id(parameter), Place(HEADS)) for name, parameter in model.named_parameters()}


def backbone_parameters(model: Any, tower: str) -> list[nn.Parameter]:
    """Return the parameters of a tower that belong neither to its heads nor to its log-variance branch."""
    place_of = places(model)
    return [
        parameter
        for name, parameter in model.named_parameters()
        if place_of[name].backbone and place_of[name].tower == tower
    ]


def factor(place: Place, config: Any) -> float:
    """Return the factor that --lr is multiplied by at a place."""
    multipliers = {"image": config.image_lr_multiplier, "text": config.text_lr_multiplier, "": 1.0}
    return (multipliers[place.tower] or 1.0) * (config.layer_decay or 1.0) ** place.depth


def check_blocks(model: Any, config: Any) -> Iterator[str]:
    """Yield a warning for a tower that --layer-decay does not affect; ValueError if it affects neither."""
    lacking = [name for name, tower in (("image", image_tower(model)), ("text", text_tower(model))) if not tower.blocks]
    if (config.layer_decay or 1) == 1 or not lacking:
        return
    if len(lacking) == 2:
        raise ValueError(
            "--layer-decay needs a tower with a list of blocks, and neither has one: use --image-lr-multiplier and "
            "--text-lr-multiplier."
        )
    yield (
        f"--layer-decay has no effect on the {lacking[0]} tower, which has no list of blocks: "
        f"--{lacking[0]}-lr-multiplier applies to all of it."
    )


def set_groups(optimizer: torch.optim.Optimizer, model: Any, config: Any) -> None:
    """Split the groups that an optimizer was built with by place, and keep all other settings of each group.

    The group of the full learning rate comes first: open_clip logs the rate of the first one.
    """
    place_of = places(model)
    by_id = {id(parameter): place_of[name] for name, parameter in model.named_parameters()}
    order = {place.group: i for i, place in enumerate(place_of.values())} | {HEADS: -1}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        split: dict[str, dict[str, Any]] = {}
        for parameter in group["params"]:
            place = by_id[id(parameter)]
            scale = factor(place, config)
            made = {**group, "params": [], SCALE: scale, NAME: place.group, "lr": group["lr"] * scale}
            split.setdefault(place.group, made)["params"].append(parameter)
        groups += split.values()
    optimizer.param_groups[:] = sorted(groups, key=lambda group: order[group[NAME]])


def table(model: Any, config: Any, lr: float) -> list[tuple[str, float, int]]:
    """Return (group, its learning rate at the full --lr, number of trained parameters), in the order of the model."""
    place_of = places(model)
    counts: dict[Place, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts[place_of[name]] = counts.get(place_of[name], 0) + parameter.numel()
    rows = [(place.group, lr * factor(place, config), count) for place, count in counts.items()]
    return sorted(rows, key=lambda row: row[0] != HEADS)
