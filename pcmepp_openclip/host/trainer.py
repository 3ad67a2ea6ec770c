"""The modules of open_clip_train that a run uses. Importing raises ImportError with the cure if a name is missing."""

from . import seams

seams.check_names(seams.USED_IN_TRAINING)

from open_clip_train import data, distributed, logger, params, precision, scheduler, zero_shot  # noqa: E402

try:
    from open_clip_train import optim  # open_clip 4 has it
except ImportError:
    optim = None

# The keys are values of --lr-scheduler.
SCHEDULES = {"cosine": scheduler.cosine_lr, "const": scheduler.const_lr, "const-cooldown": scheduler.const_lr_cooldown}

__all__ = ["SCHEDULES", "data", "distributed", "logger", "optim", "params", "precision", "zero_shot"]
