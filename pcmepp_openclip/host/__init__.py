"""The only room that touches open_clip's internals: all that may break with a new open_clip is here.

- `seams`: every name of open_clip that is replaced or relied on. `registration`: how the plugin gets in.
- `towers`: the pieces of open_clip's towers that the model is built of. `loss`: what `create_loss` builds.
- `repos`: how open_clip finds models, with `config_check` for the configs of others. `weights`: reads their files.
- `training`: runs the `main` of `trainer`. `calls`: the calls of its loop. `parallel`: its DDP. `data`: what it expects
  of a dataset. `flags`: what is read of its command line. `published`: the flags that may be told.

Public, documented names of open_clip may be used anywhere, by `import open_clip`; its modules, names with an
underscore, and names replaced in its modules only here. Importing this room fails at once where open_clip is not one
that the plugin was written for.
"""

from . import seams

seams.check_version()
seams.check_names(*seams.LIBRARY, *seams.USED)

from .repos import never_ask  # noqa: E402  after the check

__all__ = ["never_ask"]
