"""The names that open_clip must offer, which the plugin replaces or uses, and the attributes of its models.

Where one is missing, importing the plugin or building a model fails, and the message names the installed version and
the cure.
"""

import operator
import pkgutil
from typing import Any

import open_clip

from ..system.errors import RunFailed

SUPPORTED = ">=3.3,<5"
TESTED = "3.3.0"  # messages name this version as the cure


def _table(text: str) -> list[tuple[str, str]]:
    """Return the first word of each line with each of the others."""
    rows = map(str.split, text.strip().splitlines())
    return [(holder, name) for holder, *names in rows for name in names]


REPLACED = _table("""
open_clip.factory   CLIP CustomTextCLIP CoCa get_model_config parse_model_name _get_hf_config get_tokenizer HFTokenizer
open_clip.factory   download_pretrained_from_hf _find_checkpoint_in_dir load_checkpoint load_state_dict
open_clip.factory   convert_state_dict create_loss
""")
REPLACED_IN_4 = _table("open_clip.factory create_task")
USED = _table("""
open_clip                                CLIP CustomTextCLIP add_model_config list_models get_input_dtype
open_clip                                create_model create_model_and_transforms get_pretrained_cfg
open_clip.CLIP                           lock_image_tower lock_text_tower forward_intermediates set_grad_checkpointing
open_clip.model                          CLIPVisionCfg CLIPTextCfg _build_vision_tower _build_text_tower
open_clip.model                          convert_to_custom_text_state_dict
open_clip.transformer                    Attention ResidualAttentionBlock
open_clip.transformer.VisionTransformer  _embeds _pool
open_clip.transformer.TextTransformer    _embeds _build_additive_mask
open_clip.timm_model                     TimmModel
open_clip.modified_resnet                ModifiedResNet
open_clip.hf_model                       HFTextEncoder
open_clip.hf_configs                     arch_dict
open_clip.transform                      PreprocessCfg
open_clip.pretrained                     _PRETRAINED
open_clip.tokenizer                      HFTokenizer SimpleTokenizer
""")
USED_IN_TRAINING = _table("""
open_clip_train.params       parse_args
open_clip_train.logger       setup_logging
open_clip_train.distributed  world_info_from_env init_distributed_device broadcast_object
open_clip_train.precision    get_autocast
open_clip_train.scheduler    cosine_lr const_lr const_lr_cooldown
open_clip_train.data         get_data DataInfo SharedEpoch
open_clip_train.zero_shot    zero_shot_eval
""")
ATTRIBUTES = _table("""
ProbabilisticModel      logit_scale logit_bias output_dict context_length visual.image_size
CLIP                    token_embedding positional_embedding transformer ln_final text_projection attn_mask
CLIP                    text_pool_type text_eos_id
TextTransformer         token_embedding positional_embedding transformer ln_final text_projection attn_mask
TextTransformer         context_length pool_type eos_id pad_id cls_emb
VisionTransformer       conv1.weight class_embedding positional_embedding ln_pre transformer ln_post proj
VisionTransformer       pool_type attn_pool
Transformer             resblocks grad_checkpointing width get_cast_dtype
ResidualAttentionBlock  attn ln_1 ls_1 ln_2 ls_2 mlp
TimmModel               trunk.forward_features trunk.forward_head trunk.num_features head
ModifiedResNet          stem conv1.weight bn1 conv2 bn2 conv3 bn3 layer1 layer2 layer3 layer4
ModifiedResNet          attnpool.c_proj.in_features
HFTextEncoder           transformer pooler proj config.pad_token_id
""")  # by the class of a module or of a base
PACKAGES = ("open_clip", "pcmepp_openclip")


class HostChanged(RunFailed):
    """The installed open_clip lacks something that the plugin relies on."""


def version() -> str:
    """Return the version of the imported open_clip, which need not be the installed one."""
    return getattr(open_clip, "__version__", "of unknown version")


def lacking(what: str) -> str:
    return (
        f"open_clip_torch {version()} has no {what}, which pcmepp_openclip needs; it is tested with {TESTED}: run "
        f"pip install 'open_clip_torch[training]=={TESTED}'"
    )


def check_version() -> None:
    installed = version()
    try:
        numbers = tuple(int(part) for part in installed.split(".")[:2])
    except ValueError:
        numbers = (0, 0)
    if not (3, 3) <= numbers < (5, 0):
        raise ImportError(
            f"pcmepp_openclip needs open_clip_torch {SUPPORTED}, found {installed}: run "
            f"pip install 'open_clip_torch[training]{SUPPORTED}'"
        )


def check_names(names: list[tuple[str, str]]) -> None:
    """Raise ImportError, in one sentence, for the first name that is missing."""
    for holder, name in names:
        try:
            getattr(pkgutil.resolve_name(holder), name)
        except (ImportError, AttributeError):
            raise ImportError(lacking(f"{holder}.{name}")) from None


def check_attributes(model: Any) -> None:
    """Raise ImportError for the first attribute of `ATTRIBUTES` that a model or one of its modules lacks."""
    seen: set[type] = set()
    for module in model.modules():
        if type(module) in seen:  # a tower has many blocks of one class
            continue
        seen.add(type(module))
        # timm and transformers have classes of these names too.
        ours = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.partition(".")[0] in PACKAGES}
        for kind, path in ATTRIBUTES:
            try:
                if kind in ours:
                    operator.attrgetter(path)(module)
            except AttributeError:
                raise ImportError(lacking(f"attribute {path} of a {kind}")) from None
