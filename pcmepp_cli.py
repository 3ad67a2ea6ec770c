"""The `pcmepp` command: it answers --help, --version and mistakes in a fraction of a second.

Python imports a package before its modules, and `import pcmepp_openclip` registers the models, which imports torch for
seconds. So this module lies beside the package, and while it is loaded the package leaves that to the command.
"""

import os


def main() -> int:
    """Run the command of this process, and return its exit code."""
    # Torch's threads spin while they wait for each other, which costs a multiple of the work on cores that others use.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch is imported
    from pcmepp_openclip import cli

    return cli.main()
