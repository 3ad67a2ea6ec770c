"""Small exported models with a bank and a calibration, for what runs models."""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import make_model, plain_config, plain_twin

from pcmepp_openclip.ambiguity import Bank, Calibration
from pcmepp_openclip.ambiguity.store import (
    BANK_FILE,
    CALIBRATION_FILE,
    load_bank,
    save_bank,
    save_calibration,
    source_of,
)
from pcmepp_openclip.encode.load import load_model
from pcmepp_openclip.models.export import export_model


def export_tiny(folder: Path, probabilistic: bool = True) -> Path:
    """PCMEpp-tiny with random weights, or a plain CLIP with the weights of its means, as a folder of open_clip's."""
    model = make_model("PCMEpp-tiny")
    if probabilistic:
        return export_model(model, folder, "PCMEpp-tiny")
    plain = plain_twin(model, "PCMEpp-tiny")
    return export_model(plain, folder, plain_config("PCMEpp-tiny"))


def random_bank(model, size: int = 12, seed: int = 0) -> Bank:
    """Random references, which differ more than a random model's: mistakes show."""
    dims = model.embed_dim if hasattr(model, "embed_dim") else model.text_projection.shape[1]
    draw = torch.randn(2, size, dims, generator=torch.Generator().manual_seed(seed))
    images_BD = F.normalize(draw[0], dim=-1).half().float()  # as they are stored
    texts_BD = F.normalize(draw[0] + 0.7 * draw[1], dim=-1).half().float()
    return Bank(F.normalize(images_BD, dim=-1), F.normalize(texts_BD, dim=-1), model.logit_scale.detach().exp().item())


def add_bank(folder: Path, calibration: str | None = None) -> Bank:
    """Gives an exported model a bank and, by the name of its estimator, a calibration."""
    loaded = load_model(f"local-dir:{folder}")
    bank = random_bank(loaded.model)
    save_bank(bank, folder / BANK_FILE, loaded.bank_fingerprint)
    if calibration:
        add_calibration(folder, Calibration(calibration, 1.3, 0.4, 0.7, -2.5, 100, 0.02))
    return bank


def add_calibration(folder: Path, calibration: Calibration) -> None:
    """Gives an exported model a calibration, as one that was fitted with it and with its bank."""
    bank = load_bank(folder) if calibration.estimator == "bank" else None
    source = source_of(load_model(f"local-dir:{folder}"), bank)
    save_calibration(dataclasses.replace(calibration, source=source), folder / CALIBRATION_FILE)
