"""The only room that touches open_clip's internals: all that may break with a new open_clip is here.

`towers` are the pieces of its towers that the model is built of, `registration` is how the plugin gets in, `repos` is
how open_clip finds models, with `config_check` for the configs of others, `weights` reads files of weights, `training`
runs its training loop, and `data` is what that loop expects of a dataset.

Public, documented names of open_clip may be used anywhere, by `import open_clip`; its modules, names with an
underscore, and names replaced in its modules only here. Importing this room fails at once where open_clip is not one
that the plugin was written for.
"""

import operator

import open_clip

SUPPORTED = ">=3.3,<4"
_CURE = f"pip install 'open_clip_torch[training]{SUPPORTED}'"
_NEEDED = (
    *("add_model_config", "list_models", "load_checkpoint"),
    *("factory.CLIP", "factory.CustomTextCLIP", "factory.CoCa", "factory.get_model_config"),
    *("factory.convert_state_dict", "factory.load_checkpoint", "factory.load_state_dict"),
    *("factory.parse_model_name", "factory._get_hf_config", "factory.download_pretrained_from_hf"),
    *("factory._find_checkpoint_in_dir", "factory.get_tokenizer", "factory.create_loss", "pretrained._PRETRAINED"),
    *("factory.HFTokenizer",),
    *("model._build_vision_tower", "model._build_text_tower", "model.CLIPVisionCfg", "model.CLIPTextCfg"),
    *("transformer.VisionTransformer._embeds", "transformer.VisionTransformer._pool"),
)


def _check_host() -> None:
    """Fail at once, in one sentence, where open_clip is not one that this plugin was written for."""
    found = getattr(open_clip, "__version__", "one of unknown version")  # of what is imported, not what is installed
    try:
        number = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        number = (0, 0)
    if not (3, 3) <= number < (4, 0):
        raise ImportError(f"pcmepp_openclip needs open_clip_torch {SUPPORTED}, found {found}: run {_CURE}")
    for name in _NEEDED:
        try:
            operator.attrgetter(name)(open_clip)
        except AttributeError:
            raise ImportError(
                f"open_clip_torch {found} has no open_clip.{name}, which pcmepp_openclip needs; "
                f"supported are {SUPPORTED}: run {_CURE}"
            ) from None


_check_host()

from .repos import never_ask  # noqa: E402  after the check

__all__ = ["SUPPORTED", "never_ask"]
