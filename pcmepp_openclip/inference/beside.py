"""The bank and the calibration of a model: beside its weights, or where the user says that they are."""

from pathlib import Path

from ..ambiguity import Bank, Calibration
from ..ambiguity.store import BANK_FILE, CALIBRATION_FILE, load_calibration
from ..evaluation.loading import LoadedModel
from ..host.repos import file_beside


def find_bank(loaded: LoadedModel, name: str, place: str | Path | None = None) -> Bank | None:
    """The bank of a model, or None. ValueError for a file that is no bank, and for the bank of another model.

    Arguments:
        name: what the model was loaded by; for local-dir: and hf-hub:, its bank lies beside the weights.
        place: the file of a bank, or the folder of one, to be used in its place.
    """
    path = file_beside(name, BANK_FILE) if place is None else Path(place)
    return None if path is None else loaded.load_bank(path)


def find_calibration(name: str, place: str | Path | None = None) -> Calibration | None:
    """The calibration beside the bank that `place` names, else that beside the weights; None if there is none."""
    if place is None:
        path = file_beside(name, CALIBRATION_FILE)
    else:
        folder = Path(place) if Path(place).is_dir() else Path(place).parent
        path = folder / CALIBRATION_FILE  # it is fitted to that bank
    return load_calibration(path) if path is not None and path.is_file() else None
