"""The only room that touches open_clip's internals: all that may break with a new open_clip is here.

`seams` lists every name of open_clip that is replaced or relied on. `registration` is how the plugin gets in, `towers`
are the pieces of open_clip's towers that the model is built of, `repos` is how open_clip finds models, with
`config_check` for the configs of others, and `weights` reads files of weights. `training` runs the `main` of `trainer`,
`calls` are the calls of its loop, `loss` is the loss that it gets, `parallel` is its DDP, `flags` is what is read of its
command line, `published` is which flags may be told, and `data` is what it expects of a dataset.

Public, documented names of open_clip may be used anywhere, by `import open_clip`; its modules, names with an
underscore, and names replaced in its modules only here. Importing this room fails at once where open_clip is not one
that the plugin was written for.
"""

from . import seams

seams.check_version()
seams.check_names(*seams.LIBRARY, *seams.USED)

from .repos import never_ask  # noqa: E402  after the check

__all__ = ["never_ask"]
