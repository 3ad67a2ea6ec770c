"""The `pcmepp` command: it answers --help, --version and mistakes in a fraction of a second.

Python imports a package before its modules, and `import pcmepp_openclip` registers the models, which imports torch for
seconds. So this module lies beside the package, and while it is loaded the package leaves that to the command.
"""


def main() -> int:
    """Run the command of this process, and return its exit code."""
    from pcmepp_openclip import cli

    return cli.main()
