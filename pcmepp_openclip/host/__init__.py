"""The only folder that touches open_clip's internals: everything that may break with a new open_clip is here.

- `seams`: every name of open_clip that is replaced or relied on. `registration`: replaces them, and makes the task of a
  run in open_clip 4's own loop. `names`: names of PCME++ models.
- `towers`: the towers of open_clip's models, one kind per file. `loss`: the losses that `create_loss` builds.
- `repos`: finds models in repos and folders. `config_check`: validates their configs. `weights`: reads weight files.
  `tokenizers`: checks their files, and gives their ids.
- `training`: the parts of a run, by `trainer`, the modules of open_clip_train. `parallel`: DDP. `data`: the datasets
  that open_clip expects. `flags`: the flags that are read. `published`: the flags that may be published.

Public, documented names of open_clip may be used anywhere, by `import open_clip`; its submodules, names
with an underscore, and names replaced in its modules only here. Importing this folder fails at once if the installed
open_clip is not supported.
"""

from . import seams

seams.check_version()
seams.check_names([*seams.REPLACED, *seams.USED])

from .tokenizers import disable_prompts  # noqa: E402  after the check

__all__ = ["disable_prompts"]
