"""What a user adds in a file of their own: a distance, a term of the loss, and one line to register each."""

import torch

from pcmepp_openclip import DISTANCES, LOSSES, Distance, LossTerm


class Manhattan(Distance):
    """sum |mu_a - mu_b| + sum sigma_a^2 + sum sigma_b^2, which is no matrix product."""

    def matrix(self, a, b):
        return torch.cdist(a.mean.float(), b.mean.float(), p=1) + a.uncertainty[:, None] + b.uncertainty

    def paired(self, a, b):
        return (a.mean.float() - b.mean.float()).abs().sum(dim=1) + a.uncertainty + b.uncertainty


def agreement(batch):
    """The mean squared difference of the log-uncertainties of an image and its text."""
    return (batch.images.uncertainty.log() - batch.texts.uncertainty.log()).square().mean()


DISTANCES["manhattan"] = Manhattan()
LOSSES["agreement"] = LossTerm(agreement, 0.0, "the agreement of uncertainties within a pair")
