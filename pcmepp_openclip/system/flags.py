"""The flags of a command: each with its default, its help and its checks in one place, all mistakes listed at once.

parser = CommandParser("pcmepp calibrate", __doc__)
parser.add_argument("--size", type=number(int, 4), default=1000, help="images that are drawn (default: 1000)")
parser.add_argument("--bank", metavar="FILE", help="the model's bank")
parser.refuse(lambda args: args.bank and args.estimator == "variance", "--estimator variance needs no --bank.")
args = parser.parse_args(argv)

A run of `pcmepp train` has a table of them, whose rows are `Flag`.
"""

import argparse
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from .text import did_you_mean

PRIVATE, PUBLISHED, FIXED = "private", "published", "fixed"  # what becomes of a flag in the record of a run


def number(
    kind: type[int] | type[float], least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf
) -> Callable[[str], float]:
    """Return a `type` for argparse that reads a finite number and refuses one that is too small or too large."""
    lowest = f"above {above:g}" if above > -math.inf else f"at least {least}" if least > -math.inf else ""
    highest = f"at most {most}" if most < math.inf else ""
    bounds = " and ".join(filter(None, (lowest, highest))) or "finite"
    if lowest == f"at least {least}" and highest:
        bounds = f"between {least} and {most}"

    def read(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and value > above and abs(value) < math.inf):
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    read.__name__ = kind.__name__  # argparse names it in its message for a text that is no number
    return read


class Flag:
    """A flag of a run, with all that is known of it: the parser, --help, the checks and the record come from here.

    Arguments:
        name: the name on the command line, such as "--layer-decay"; the value is kept as `layer_decay`.
        kind: `bool` for a flag without a value, else a function from a text to a value, such as `number(int, 1)`.
        check: a function of all flags that is called if this one has another value than its default. A sentence that
            it returns or raises as a ValueError is a mistake; it may set what follows from the flag.
        record: whether the value may be published (`PUBLISHED`), and also is the same in a resumed run (`FIXED`). By
            default text is `PRIVATE`, since it may name a place, a machine or a person; numbers and choices are not.
        options: further arguments of argparse's `add_argument`.
    """

    def __init__(
        self,
        name: str,
        kind: Any,
        help: str,
        *,
        check: Callable[[Any], Any] | None = None,
        record: str = "",
        **options: Any,
    ):
        self.name, self.check = name, check
        self.record = record or (PRIVATE if kind is None and not {"choices", "const"} & {*options} else PUBLISHED)
        self.dest = options.get("dest") or name.removeprefix("--").replace("-", "_")
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {}
        if kind is not bool and kind is not None:
            how = {"type": kind, "metavar": {"int": "N", "float": "X"}.get(kind.__name__)}
        self.options = {**how, "help": help, **options}


class Mistakes(list[str]):
    """The mistakes of a user so far, each a sentence."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Take a ValueError as a mistake, and go on."""
        try:
            yield
        except ValueError as error:
            self.append(str(error))

    def raise_all(self) -> None:
        """Raise one ValueError with all mistakes, if there are any."""
        if self:
            raise ValueError("\n  ".join([f"{len(self)} mistakes:", *self]) if len(self) > 1 else self[0])


class CommandParser(argparse.ArgumentParser):
    """A parser that raises one ValueError with all mistakes of a command line.

    A check that reads a flag whose value was refused, or what could not be made from it, is skipped.
    """

    def __init__(self, prog: str, description: str | None = None, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=inspect.cleandoc(description or ""), formatter_class=raw, **options)
        self._checks: list[Callable[[argparse.Namespace], Any]] = []
        self.mistakes = Mistakes()
        self._refused: set[str] = set()  # the names of the values that their type refused
        self.explicit: set[str] = set()  # the names of the values that are on the command line

    def add_flags(self, title: str, flags: Iterable[Flag]) -> None:
        """Add rows of a table as a group."""
        group = self.add_argument_group(title)
        for flag in flags:
            default = group.add_argument(flag.name, **flag.options).default
            if flag.check is not None:
                self.check(functools.partial(_checked, flag, default))

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
            return getattr(args, name) != self.get_default(name)

        self.refuse(
            lambda args: is_set(args, flag) and not any(is_set(args, other) for other in others),
            f"{flag} needs {' or '.join(others)}{why}.",
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse and check all flags. Unlike argparse's method, it leaves none unparsed."""
        parsed = self.read(args or [], namespace)
        self.judge(parsed)
        return parsed, []

    def read(self, args: Sequence[str], namespace: Any = None) -> Any:
        """Parse all flags, and leave their mistakes to `judge`."""
        self.mistakes, self._refused = Mistakes(), set()
        self.explicit.clear()
        required = [] if {"-h", "--help"} & {*args} else [action for action in self._actions if action.required]
        for action in required:  # argparse would stop at a missing one
            action.required = False
        parsed, rest = super().parse_known_args(args, namespace)
        missing = [_name(action) for action in required if getattr(parsed, action.dest) is None]
        if missing:
            self.mistakes.append(f"the following arguments are required: {', '.join(missing)}.")
        unknown = [word.split("=")[0] for word in rest if word.startswith("-")]
        for word in unknown or rest[:1]:
            hint = did_you_mean(word, self._option_string_actions, f"see {self.prog} --help.")
            self.mistakes.append(f"there is no {'flag' if unknown else 'place for'} {word}; {hint}")
        return parsed

    def judge(self, parsed: argparse.Namespace) -> None:
        """Check the flags, and raise one ValueError with all mistakes, those of `read` among them."""
        for name in self._refused:
            delattr(parsed, name)
        for check in self._checks:
            try:
                with self.mistakes.noted():
                    mistake = check(parsed)
                    self.mistakes += [mistake] if isinstance(mistake, str) else []
            except AttributeError as error:
                if error.obj is not parsed or not self.mistakes:
                    raise
        self.mistakes.raise_all()

    def error(self, message: str) -> NoReturn:
        """Raise ValueError for the mistakes so far and this one, at which argparse may have had to stop."""
        self.mistakes.append(message)
        self.mistakes.raise_all()
        raise AssertionError

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self.explicit.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self.mistakes.append(f"{_name(action)} {error.message}.")
            self._refused.add(action.dest)
            return arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if not action.option_strings:
                raise
            self.mistakes.append(f"{_name(action)}: {error.message}.")
            self._refused.add(action.dest)


def _checked(flag: Flag, default: Any, args: argparse.Namespace) -> Any:
    """Call the check of a flag if it has another value than its default."""
    assert flag.check is not None
    return flag.check(args) if getattr(args, flag.dest) != default else None


def _name(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)
