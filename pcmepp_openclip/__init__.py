"""PCME++ for open_clip: importing this package makes open_clip know the `PCMEpp-*` models.

>>> import open_clip, pcmepp_openclip
>>> model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-ViT-B-16")
>>> tokenizer = open_clip.get_tokenizer("PCMEpp-ViT-B-16")
>>> texts = model.encode_text_gaussian(tokenizer(["a dog", "a small black dog on a red sofa"]))
>>> texts.uncertainty, pcmepp_openclip.csd(images, texts)
"""

from .system import launcher

__version__ = "0.1.0"

launcher.expect_ctrl_c()

if not launcher.starting():  # `python -m pcmepp_openclip` hands over to another Python: spare it the imports
    from pathlib import Path

    from .config import PCMEppCfg
    from .distances.csd import csd
    from .gaussian import Gaussian
    from .host.registration import register
    from .losses.matching import matching_logits, matching_loss
    from .losses.pcmepp import PCMEppLoss, create_loss
    from .losses.pseudo_positives import pseudo_positive_targets
    from .losses.vib import vib
    from .models.pcmepp import PCMEppCLIP
    from .models.state_dict import reconcile_state_dict

    _installed = Path(__file__).parent / "model_configs"
    MODEL_CONFIGS = _installed if _installed.is_dir() else Path(__file__).parent.parent / "model_configs"
    register(PCMEppCLIP, create_loss, reconcile_state_dict, MODEL_CONFIGS)

    __all__ = [
        "MODEL_CONFIGS",
        "Gaussian",
        "PCMEppCLIP",
        "PCMEppCfg",
        "PCMEppLoss",
        "csd",
        "matching_logits",
        "matching_loss",
        "pseudo_positive_targets",
        "vib",
    ]
