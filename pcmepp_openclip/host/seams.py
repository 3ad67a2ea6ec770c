"""Every name of open_clip that the plugin replaces or relies on, in one list that is checked.

A seam is a name that the plugin replaces by its own. The code that replaces them takes them from here, so that the list
cannot drift from what is replaced. Where a name is missing, importing the plugin fails, and the message names the
installed version and the cure.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any

import open_clip

from ..system.errors import RunFailed

SUPPORTED = ">=3.3,<5"
TESTED = "3.3.0"  # messages name this version as the cure


@dataclass(frozen=True)
class Name:
    """A name that must exist.

    Arguments:
        holder: the module or class that holds it.
        why: the purpose of the name, as the words after "needs to".
    """

    holder: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.holder}.{self.name}"

    def find(self) -> Any:
        """Return the object of this name. Raise ImportError with the cure if there is none."""
        try:
            return getattr(pkgutil.resolve_name(self.holder), self.name)
        except (ImportError, AttributeError):
            raise ImportError(lacking(str(self), self.why)) from None


@dataclass(frozen=True)
class Seam(Name):
    """A name that is replaced."""

    def replace(self, value: Any) -> None:
        """Replace the object of this name by `value` for good."""
        self.find()
        setattr(pkgutil.resolve_name(self.holder), self.name, value)


_FACTORY = "open_clip.factory"

LIBRARY = (  # these names are replaced for good when the plugin is imported
    Seam(_FACTORY, "CLIP", "build PCME++ models"),
    Seam(_FACTORY, "CustomTextCLIP", "build PCME++ models"),
    Seam(_FACTORY, "CoCa", "refuse PCME++ configs that are no CLIP"),
    Seam(_FACTORY, "get_model_config", "find the configs of PCME++ models"),
    Seam(_FACTORY, "get_pretrained_cfg", "find the weights for PCME++ models"),
    Seam(_FACTORY, "list_pretrained_tags_by_model", "list the weights for PCME++ models"),
    Seam(_FACTORY, "parse_model_name", "check the config of a local folder"),
    Seam(_FACTORY, "_get_hf_config", "check the config of a Hub repo"),
    Seam(_FACTORY, "download_pretrained_from_hf", "take only safetensors from a Hub repo"),
    Seam(_FACTORY, "_find_checkpoint_in_dir", "refuse a local folder without weights"),
    Seam(_FACTORY, "load_checkpoint", "explain a file of weights that cannot be loaded"),
    Seam(_FACTORY, "load_state_dict", "verify the digest of a checkpoint"),
    Seam(_FACTORY, "convert_state_dict", "load weights into a PCME++ model"),
    Seam(_FACTORY, "HFTokenizer", "never run the code of a tokenizer's repo"),
    Seam(_FACTORY, "get_tokenizer", "find the tokenizer of a PCME++ model"),
    Seam(_FACTORY, "create_loss", "create the loss of a PCME++ model"),
    Seam("open_clip", "get_model_config", "find the configs of PCME++ models"),
    Seam("open_clip", "get_pretrained_cfg", "find the weights for PCME++ models"),
    Seam("open_clip", "is_pretrained_cfg", "find the weights for PCME++ models"),
    Seam("open_clip", "list_pretrained_tags_by_model", "list the weights for PCME++ models"),
    Seam("open_clip", "get_tokenizer", "find the tokenizer of a PCME++ model"),
    Seam("open_clip", "create_loss", "create the loss of a PCME++ model"),
    Seam("open_clip", "load_checkpoint", "load weights into a PCME++ model"),
)

ONLY_4 = tuple(
    Seam(holder, "create_task", "train a PCME++ model") for holder in (_FACTORY, "open_clip")
)  # version 4 has these names

USED = (  # these names are used as they are
    *(Name("open_clip", name, "know the models") for name in ("CLIP", "CustomTextCLIP")),
    *(Name("open_clip", name, "know the models") for name in ("add_model_config", "list_models")),
    *(Name("open_clip", name, "create models") for name in ("create_model", "create_model_and_transforms")),
    *(Name("open_clip.model", name, "build the towers") for name in ("_build_vision_tower", "_build_text_tower")),
    *(Name("open_clip.model", name, "check configs") for name in ("CLIPVisionCfg", "CLIPTextCfg")),
    *(Name("open_clip.CLIP", name, "lock towers") for name in ("lock_image_tower", "lock_text_tower")),
    *(Name("open_clip.CLIP", name, "encode") for name in ("forward_intermediates", "set_grad_checkpointing")),
    *(Name("open_clip.transformer.VisionTransformer", name, "encode images") for name in ("_embeds", "_pool")),
    Name("open_clip", "get_input_dtype", "compute in the precision of a run"),
    *(Name("open_clip.transformer.TextTransformer", x, "encode texts") for x in ("_embeds", "_build_additive_mask")),
    Name("open_clip.timm_model", "TimmModel", "encode images"),
    Name("open_clip.modified_resnet", "ModifiedResNet", "encode images"),
    Name("open_clip.hf_model", "HFTextEncoder", "encode texts"),
    Name("open_clip.hf_configs", "arch_dict", "find the blocks of a text tower"),
    Name("open_clip.model", "convert_to_custom_text_state_dict", "load weights"),
    Name("open_clip.transform", "PreprocessCfg", "check configs"),
    Name("open_clip.pretrained", "_PRETRAINED", "know the pretrained tags"),
    Name("open_clip.tokenizer", "HFTokenizer", "load a tokenizer"),
)
USED_IN_TRAINING = tuple(
    Name(f"open_clip_train.{module}", name, why)
    for module, name, why in (
        ("params", "parse_args", "read the flags"),
        ("logger", "setup_logging", "log"),
        ("distributed", "world_info_from_env", "know the rank"),
        ("distributed", "init_distributed_device", "set up the ranks"),
        ("distributed", "broadcast_object", "set up the ranks"),
        ("precision", "get_autocast", "compute in the precision of a run"),
        ("scheduler", "cosine_lr", "set learning rates"),
        ("scheduler", "const_lr", "set learning rates"),
        ("scheduler", "const_lr_cooldown", "set learning rates"),
        ("data", "get_data", "read the data"),
        ("zero_shot", "zero_shot_eval", "validate on ImageNet"),
    )
)
USED_BY_DATA = tuple(Name("open_clip_train.data", name, "hand over data") for name in ("DataInfo", "SharedEpoch"))


class HostChanged(RunFailed):
    """The installed open_clip lacks something that the plugin relies on."""


def version() -> str:
    """Return the version of the imported open_clip, which need not be the installed one."""
    return getattr(open_clip, "__version__", "of unknown version")


def cure(wanted: str = f"=={TESTED}") -> str:
    return f"pip install 'open_clip_torch[training]{wanted}'"


def lacking(what: str, why: str) -> str:
    return (
        f"open_clip_torch {version()} has no {what}, which pcmepp_openclip needs to {why}; it is tested with "
        f"{TESTED}: run {cure()}"
    )


def check_version() -> None:
    installed = version()
    try:
        numbers = tuple(int(part) for part in installed.split(".")[:2])
    except ValueError:
        numbers = (0, 0)
    if not (3, 3) <= numbers < (5, 0):
        raise ImportError(
            f"pcmepp_openclip needs open_clip_torch {SUPPORTED}, found {installed}: run {cure(SUPPORTED)}"
        )


def check_names(*names: Name) -> None:
    """Raise ImportError, in one sentence, for the first name that is missing."""
    for name in names:
        name.find()
