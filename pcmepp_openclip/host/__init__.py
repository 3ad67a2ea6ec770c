"""The only folder that touches open_clip's internals: everything that may break with a new open_clip is here.

- `seams`: every name of open_clip that is replaced or relied on. `registration`: how the plugin gets in. `names`: the
  names of PCME++ models.
- `towers`: the towers of open_clip's models, one kind per file. `loss`: what `create_loss` builds.
- `repos`: how open_clip finds models. `config_check`: validates configs from the Hub and local folders. `weights`:
  reads weight files. `tokenizers`: their files, and what their ids are for.
- `training`: the parts of a run, by `trainer`, which is what open_clip_train offers. `task`: a run in open_clip 4's own
  loop. `parallel`: DDP. `data`: what open_clip expects of a dataset. `flags`: what is read from its command line.
  `published`: the flags that may be published.

Public, documented names of open_clip may be used anywhere, by `import open_clip`; its submodules, names
with an underscore, and names replaced in its modules only here. Importing this folder fails at once if the installed
open_clip is not supported.
"""

from . import seams

seams.check_version()
seams.check_names(*seams.LIBRARY, *seams.USED)

from .tokenizers import never_ask  # noqa: E402  after the check

__all__ = ["never_ask"]
