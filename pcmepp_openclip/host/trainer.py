"""open_clip_train, once it is known to have every name that is needed: ImportError with the cure if it does not."""

from . import seams

seams.check_names(*seams.TRAINING, *seams.USED_IN_TRAINING)

from open_clip_train import logger, main, params, train  # noqa: E402
from open_clip_train.distributed import world_info_from_env  # noqa: E402
from open_clip_train.precision import get_autocast  # noqa: E402

__all__ = ["get_autocast", "logger", "main", "params", "train", "world_info_from_env"]
