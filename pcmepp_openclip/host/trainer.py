"""The functions of open_clip_train that a run uses. Importing raises ImportError with the cure if one is missing."""

from . import seams

seams.check_names(*seams.USED_IN_TRAINING)

from open_clip_train import params  # noqa: E402
from open_clip_train.data import get_data  # noqa: E402
from open_clip_train.distributed import (  # noqa: E402
    broadcast_object,
    init_distributed_device,
    world_info_from_env,
)
from open_clip_train.logger import setup_logging  # noqa: E402
from open_clip_train.precision import get_autocast  # noqa: E402
from open_clip_train.scheduler import const_lr, const_lr_cooldown, cosine_lr  # noqa: E402
from open_clip_train.zero_shot import zero_shot_eval  # noqa: E402

try:  # only open_clip 4 has these
    from open_clip_train.optim import OptimizerCfg, create_optimizer
except ImportError:
    OptimizerCfg = create_optimizer = None

# The keys are values of --lr-scheduler.
schedules = {"cosine": cosine_lr, "const": const_lr, "const-cooldown": const_lr_cooldown}

__all__ = [
    "OptimizerCfg",
    "broadcast_object",
    "create_optimizer",
    "get_autocast",
    "get_data",
    "init_distributed_device",
    "params",
    "schedules",
    "setup_logging",
    "world_info_from_env",
    "zero_shot_eval",
]
