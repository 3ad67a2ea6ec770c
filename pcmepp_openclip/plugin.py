"""Register the `PCMEpp-*` models with open_clip, and hold the public names of the package that need torch.

`import pcmepp_openclip` imports this module. Only the `pcmepp` command puts it off, since it takes seconds.
"""

from pathlib import Path

from .config import PCMEppCfg as PCMEppCfg
from .distances import DISTANCES as DISTANCES
from .distances import Distance as Distance
from .distances import csd as csd
from .gaussian import Gaussian as Gaussian
from .host.loss import create_loss
from .host.registration import register
from .losses import LOSSES as LOSSES
from .losses import ChunkedClipLoss as ChunkedClipLoss
from .losses import LossTerm as LossTerm
from .losses import PCMEppLoss as PCMEppLoss
from .losses import matching_logits as matching_logits
from .losses import matching_loss as matching_loss
from .losses import pseudo_positive_targets as pseudo_positive_targets
from .losses import vib as vib
from .models.pcmepp import PCMEppCLIP as PCMEppCLIP
from .models.pcmepp import PCMEppCustomTextCLIP as PCMEppCustomTextCLIP
from .models.pcmepp import ProbabilisticModel as ProbabilisticModel
from .models.state_dict import reconcile_state_dict

_installed = Path(__file__).parent / "model_configs"
MODEL_CONFIGS = _installed if _installed.is_dir() else Path(__file__).parent.parent / "model_configs"
register({"CLIP": PCMEppCLIP, "CustomTextCLIP": PCMEppCustomTextCLIP}, create_loss, reconcile_state_dict, MODEL_CONFIGS)
