"""The flags of a command: each with its default, its help and its checks in one place, all mistakes listed at once.

parser = CommandParser("pcmepp calibrate", __doc__)
parser.add_argument("--size", type=number(int, 4), default=1000, help="images that are drawn (default: 1000)")
parser.add_argument("--bank", metavar="FILE", help="the model's bank")
parser.refuse(lambda args: args.bank and args.estimator == "variance", "--estimator variance needs no --bank.")
args = parser.parse_args(argv)
"""

import argparse
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .text import did_you_mean


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a `type` for argparse that reads a number and refuses one that is too small or too large."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    read.__name__ = kind.__name__  # argparse names it in its message for a text that is no number
    return read


class CommandParser(argparse.ArgumentParser):
    """A parser that raises one ValueError with all mistakes of a command line.

    A value that its type refuses is kept as text, so a check should only ask whether such a flag was given.
    """

    def __init__(self, prog: str, description: str | None = None, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=inspect.cleandoc(description or ""), formatter_class=raw, **options)
        self._checks: list[Callable[[argparse.Namespace], Any]] = []
        self._mistakes: list[str] = []

    def check(self, check: Callable[[argparse.Namespace], Any]) -> None:
        """Call `check` with the parsed flags; a ValueError that it raises is a mistake."""
        self._checks.append(check)

    def refuse(self, when: Callable[[argparse.Namespace], Any], mistake: str) -> None:
        """Add `mistake` if `when` is true of the parsed flags."""
        self.check(lambda args: mistake if when(args) else None)

    def needs(self, flag: str, *others: str, why: str = "") -> None:
        """Add a mistake if `flag` is given without any of the `others`."""

        def is_set(args: argparse.Namespace, flag: str) -> bool:
            name = flag.removeprefix("--").replace("-", "_")
            return vars(args)[name] != self.get_default(name)

        self.refuse(
            lambda args: is_set(args, flag) and not any(is_set(args, other) for other in others),
            f"{flag} needs {' or '.join(others)}{why}.",
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse all flags. Unlike argparse's method, it leaves none unparsed."""
        args, self._mistakes = args or [], []
        required = [] if {"-h", "--help"} & {*args} else [action for action in self._actions if action.required]
        for action in required:  # argparse would stop at a missing one
            action.required = False
        parsed, rest = super().parse_known_args(args, namespace)
        missing = [_name(action) for action in required if getattr(parsed, action.dest) is None]
        if missing:
            self._mistakes.append(f"the following arguments are required: {', '.join(missing)}.")
        unknown = [word.split("=")[0] for word in rest if word.startswith("-")]
        for word in unknown or rest[:1]:
            hint = did_you_mean(word, self._option_string_actions, f"see {self.prog} --help.")
            self._mistakes.append(f"there is no {'flag' if unknown else 'place for'} {word}; {hint}")
        for check in self._checks:
            try:
                mistake = check(parsed)
            except ValueError as error:
                mistake = str(error)
            self._mistakes += [mistake] if isinstance(mistake, str) else []
        if self._mistakes:
            self.error(self._mistakes.pop())
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Raise ValueError for the mistakes so far and this one, at which argparse may have had to stop."""
        *before, last = *self._mistakes, message
        raise ValueError("\n  ".join([f"{len(before) + 1} mistakes:", *before, last]) if before else last)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._mistakes.append(f"{_name(action)} {error.message}.")
            return arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if not action.option_strings:
                raise
            self._mistakes.append(f"{_name(action)}: {error.message}.")


def _name(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)
