"""The loop that trains a model by NCR, DECL, DAA or P2RM, and what each of them does with a batch.

A run is a warm-up and rounds. NCR and DECL begin a round by asking of every pair whether it matches. Both networks of
NCR start from the same weights. With --steps the optimizer and schedule are those of the other rows on the scenes, and
else the paper's recipe on COCO, but captions and tokens are not augmented, and weights are not averaged.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from sklearn.metrics import roc_auc_score
from timm.optim import AdamP
from torch import Tensor
from torch.utils.data import default_collate

from pcmepp_openclip.training.param_groups import places

from . import losses
from .pairs import BATCH, Pairs, Semantics

EPOCHS = 25  # on COCO


class Network:
    """A model with its optimizer and schedule, on the scenes (`short`) or on COCO."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.short, self.lr, self.device, self.step, self.steps = bool(args.steps), args.lr, device, 0, 1
        self.model, self.preprocess, self.eval_preprocess = open_clip.create_model_and_transforms(
            args.model, pretrained=args.pretrained, force_quick_gelu=not self.short, device=device, output_dict=True
        )
        groups = parameter_groups(self.model, self.short)
        self.optimizer: torch.optim.Optimizer = AdamP(groups, args.lr, weight_decay=1e-4)
        if self.short:
            self.optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.98), 1e-6, weight_decay=0.2)

    def cosines(self, batch: Any) -> Tensor:
        """Return S_ij of a batch, [N, N]; the means alone are computed."""
        images = self.model.encode_image(batch[0].to(self.device), normalize=True)
        return images @ self.model.encode_text(batch[1].to(self.device), normalize=True).T

    def update(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss."""
        factor, weight, freeze = schedule(self.step, self.steps, self.short)
        self.optimizer.zero_grad()
        (loss * weight).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group["share"] * factor
            for parameter in group["params"] if freeze and group["freezes"] else ():
                parameter.grad = None
        if not self.short:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()


def schedule(step: int, steps: int, short: bool) -> tuple[float, float, bool]:
    """Return the factor of the learning rate, that of the loss, and whether the image tower is frozen."""
    if short:
        warm = max(1, steps // 10)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
        return ((step + 1) / warm if step < warm else cosine), 1.0, False
    epoch = EPOCHS * step / steps
    return 1.0 if epoch < 15 else 0.1, min(1.0, epoch - 2 + EPOCHS / steps) if epoch >= 2 else 1.0, epoch < 2


def parameter_groups(model: Any, short: bool) -> list[dict[str, Any]]:
    """Return the parameters in groups, with the share of the learning rate that each is trained with."""
    groups: dict[Any, dict[str, Any]] = {}
    for (name, parameter), place in zip(model.named_parameters(), places(model).values(), strict=True):
        share = 1.0 if short else {"image": 0.01, "text": 0.1, "": 1.0}[place.tower] * 0.7**place.depth
        freezes = place.backbone and place.tower == "image"
        plain = parameter.ndim < 2 or any(word in name for word in ("bn", "ln", "bias", "logit_scale"))
        new: dict[str, Any] = {"params": [], "freezes": freezes, "share": share}
        group = groups.setdefault((freezes, share, plain), new | ({"weight_decay": 0.0} if plain else {}))
        group["params"].append(parameter)
    return list(groups.values())


class Rival:
    """A method: what becomes of a batch, and of all pairs at the start of a round."""

    networks_needed, rounds, warm_up = 1, 2, 0.0  # the last is a share of the run; on COCO a round is an epoch

    def __init__(self, args: argparse.Namespace, networks: list[Network], pairs: Pairs) -> None:
        self.args, self.networks, self.pairs, self.all = args, networks, pairs, torch.arange(len(pairs))

    def part(self, first: int, last: int, warm: bool) -> None:
        """Take the steps from `first` to `last`, which are the warm-up, or a round."""
        for i, network in enumerate(self.networks):
            batches = self.pairs.batches(self.all, first, i)
            for network.step in range(first, last):
                network.update(self.loss(network, next(batches), warm))

    def loss(self, network: Network, batch: Any, warm: bool) -> Tensor:
        return losses.triplet(network.cosines(batch), hardest=not warm)

    @torch.no_grad()
    def over_all_pairs(self, network: Network, measure: Callable[[Tensor], Tensor], *seed: int) -> Tensor:
        """Return a function of the cosines of a batch for all pairs, [..., M], in shuffled batches."""
        parts = [(measure(network.cosines(x)).cpu(), x[2]) for x in self.pairs.batches(self.all, *seed, once=True)]
        values, numbers = (torch.cat(x, dim=-1) for x in zip(*parts, strict=True))
        return values[..., numbers.argsort()]

    def report(self, step: int, **scores: Tensor) -> None:
        """Print how often a wrong pair has the higher score than a right one."""
        if self.pairs.wrong.any():
            auroc = {name: round(float(roc_auc_score(self.pairs.wrong, x)), 4) for name, x in scores.items()}
            print(json.dumps({"step": step, "wrong_pair_AUROC": auroc}), flush=True)


class Regularised(Rival):
    """DAA and P2RM: the triplet loss, and a weight times the method's own term."""

    def __init__(self, args: argparse.Namespace, networks: list[Network], pairs: Pairs) -> None:
        super().__init__(args, networks, pairs)
        self.rounds, self.warm_up = 1, 0.0 if args.steps else 2 / EPOCHS  # as VSE-infinity
        self.semantics = Semantics(pairs) if args.rival == "daa" else None

    def loss(self, network: Network, batch: Any, warm: bool) -> Tensor:
        args, images = self.args, network.model.encode_image_gaussian(batch[0].to(network.device))
        texts = network.model.encode_text_gaussian(batch[1].to(network.device))
        cosine_NN = images.mean @ texts.mean.T
        if self.semantics is None:
            term = losses.p2rm(images, texts, args.inside, hardest=not warm)
        else:
            term = losses.daa(cosine_NN, self.semantics(batch[2]).to(cosine_NN), args.temperature)
        weight = losses.WEIGHTS[args.rival] if args.weight is None else args.weight
        return losses.triplet(cosine_NN, hardest=not warm) + weight * term


class DECL(Rival):
    """Evidential learning, and hinges with fewer and fewer negatives for the pairs whose evidence leads."""

    warm_up = 1 / 11  # the authors' 2 of 22 epochs

    def part(self, first: int, last: int, warm: bool) -> None:
        self.clean_M = torch.ones(len(self.pairs))
        if not warm:
            share_M, self.clean_M = self.over_all_pairs(self.networks[0], losses.share_of_evidence, first, 9)
            self.report(first, evidence=-share_M, kept=-self.clean_M)
        super().part(first, last, warm)

    def loss(self, network: Network, batch: Any, warm: bool) -> Tensor:
        negatives = max(int(BATCH - self.args.eta * (network.step + 1)), losses.DECL_FEWEST)
        return losses.decl(network.cosines(batch), self.clean_M[batch[2]].to(network.device), negatives)


class NCR(Rival):
    """Two networks that divide the pairs for each other, and the triplet loss with soft margins."""

    networks_needed, warm_up = 2, 1 / 3  # the authors' 10 of 30 epochs

    def part(self, first: int, last: int, warm: bool) -> None:
        if warm:
            return super().part(first, last, warm)
        loss_M = [self.over_all_pairs(x, losses.pair_losses, first, i, 9) for i, x in enumerate(self.networks)]
        clean_M = [losses.clean_probability(x) for x in loss_M]
        self.report(first, loss_A=loss_M[0], loss_B=loss_M[1], label_A=-clean_M[0], label_B=-clean_M[1])
        for i in (0, 1):
            self.train_one(i, clean_M[1 - i].float(), first, last)

    def train_one(self, index: int, clean_M: Tensor, first: int, last: int) -> None:
        """Train one network on the division of the other one."""
        own, other = self.networks[index], self.networks[1 - index]
        kept_M = clean_M > (0.5 if clean_M.min() <= 0.5 else clean_M.sort().values[len(clean_M) // 100])
        labelled = self.pairs.batches(self.all[kept_M], first, index, 1)
        unlabelled = self.pairs.batches(self.all[~kept_M], first, index, 2)
        middle = own.steps * (1 + self.warm_up) / 2  # of the rounds, as in the authors' code
        for own.step in range(first, last):
            batch = next(labelled)
            cosine_NN, clean_N = own.cosines(batch), clean_M[batch[2]].to(own.device)
            label_N = clean_N + (1 - clean_N) * losses.predicted_match(cosine_NN.detach())
            own.update(losses.triplet(cosine_NN, losses.soft_margin(label_N)))
            if own.step >= middle:
                batch = next(unlabelled)
                with torch.no_grad():
                    label_N = losses.predicted_match(other.cosines(batch)) / 2
                cosine_NN = own.cosines(batch)
                label_N = label_N + losses.predicted_match(cosine_NN.detach()) / 2
                own.update(losses.triplet(cosine_NN, losses.soft_margin(label_N)))


METHODS: dict[str, type[Rival]] = {"ncr": NCR, "decl": DECL, "daa": Regularised, "p2rm": Regularised}


def train(args: argparse.Namespace) -> None:
    """Train a model and write its checkpoint; an interrupted run continues after its last complete part."""
    device, folder = "cuda" if torch.cuda.is_available() else "cpu", Path(args.logs) / args.name
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    tokenizer, method = open_clip.get_tokenizer(args.model), METHODS[args.rival]
    networks = [Network(args, device) for _ in range(method.networks_needed)]
    (first, *_), short = networks, bool(args.steps)
    preprocess = first.eval_preprocess if short else first.preprocess
    pairs = Pairs(args.train_data, preprocess, tokenizer, args.noise_ratio, short, args.seed)
    validation = Pairs(args.val_data, first.eval_preprocess, tokenizer) if args.val_data else None
    rival, steps = method(args, networks, pairs), args.steps or EPOCHS * (len(pairs) // BATCH)
    print(f"{args.rival}: {len(pairs)} pairs, {int(pairs.wrong.sum())} of them wrong, {steps} steps.", flush=True)
    done, best, state = 0, -math.inf, folder / "state.pt"
    if state.exists():
        done, best, *kept = torch.load(state, map_location=device, weights_only=True)
        for network, (weights, moments) in zip(networks, kept, strict=True):
            network.model.load_state_dict(weights)
            network.optimizer.load_state_dict(moments)
    for network in networks:
        network.steps = steps
    warm, rounds = round(steps * rival.warm_up), rival.rounds if short else EPOCHS
    ends = sorted({0, *(warm + (steps - warm) * i // rounds for i in range(rounds + 1))})
    for i, (begin, end) in enumerate(itertools.pairwise(ends[done:]), done + 1):
        rival.part(begin, end, warm=end <= warm)
        if validation is not None:
            rsum = recall_sum(networks, validation)
            print(json.dumps({"step": end, "validation_RSUM": rsum}), flush=True)
            if rsum > best:
                best = rsum
                save(folder / "checkpoints" / "best.pt", checkpoint_of(networks))
        save(state, [i, best, *([x.model.state_dict(), x.optimizer.state_dict()] for x in networks)])
    save(folder / "checkpoints" / "epoch_1.pt", checkpoint_of(networks))
    state.unlink()
    (folder / "done").write_text(f"{steps} steps\n")


@torch.no_grad()
def recall_sum(networks: list[Network], pairs: Pairs) -> float:
    """Return the sum of R@1, R@5 and R@10 of both directions, in per cent, of images and their first captions."""
    batch = default_collate([pairs[pairs.image_of.index(image)] for image in range(len(pairs.places))])
    cosine = torch.stack([network.cosines(batch) for network in networks]).mean(dim=0)
    ranks = [(x > x.diagonal()[:, None]).sum(dim=1) for x in (cosine, cosine.T)]
    return sum(100 * (rank < k).float().mean().item() for rank in ranks for k in (1, 5, 10))


def checkpoint_of(networks: list[Network]) -> dict[str, Any]:
    """Return a checkpoint as `pcmepp train` writes it, with what `research.rivals eval` needs."""
    first, *others = (network.model.state_dict() for network in networks)
    return {"state_dict": first, "rival": {"force_quick_gelu": not networks[0].short, "others": others}}


def save(path: Path, content: Any) -> None:
    """Save a file that is whole, whenever this process ends."""
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
