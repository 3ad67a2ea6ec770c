"""The sources that `--train-data` names. No shard is opened here, but a folder or a repo may be listed.

cc3m=/data/cc3m/{00000..00331}.tar::cc12m=https://host/cc12m/{00000..01242}.tar::x=pipe:ssh host cat 0.tar
redcaps=hf://datasets/ORG/NAME@REVISION/{00000..01199}.tar::extra=s3://bucket/extra/{000..099}.tar::/data/x/*.tar
"""

import glob
import importlib.util
import itertools
import math
import os.path
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..system.redact import printable, redact

_NAMED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<pattern>.+)", re.DOTALL)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_HF = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<path>.+)")
MAX_SHARDS = 1_000_000
SCHEMES = ("http", "https", "hf", "s3", "gs", "az", "file")
OBJECT_STORES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure")}
"""Package and extra by kind of object store: the package reads it, the extra of this package installs the package."""


@dataclass(frozen=True)
class Source:
    """One component of `--train-data`. `shards` are local paths, URLs or `pipe:` commands, in the user's order.

    Pattern and shards may hold credentials, so that `repr` leaves them out; see `label`.
    """

    name: str
    pattern: str = field(repr=False)
    shards: tuple[str, ...] = field(repr=False)


def parse_sources(text: str, flag: str = "--train-data") -> list[Source]:
    """Return the sources of a pattern; ValueError for a pattern that cannot be parsed or that matches nothing."""
    sources: list[Source] = []
    parts = [part for part in text.split("::") if part]
    for index, part in enumerate(parts, 1):
        named = _NAMED.fullmatch(part)
        name, pattern = (named["name"], named["pattern"]) if named else (None, part)
        shards = expand(pattern, flag)
        taken = {source.name for source in sources}
        if name is None:
            folder = os.path.basename(os.path.dirname(shards[0])) if kind(shards[0]) == "local" else ""
            fits = re.fullmatch(r"[A-Za-z][\w.-]*", folder) and folder not in taken
            name = folder if fits else f"source{index}"
        if name in taken:
            raise ValueError(
                f"{flag} has two sources named '{name}': give each source its own name, as in cc3m=PATTERN."
            )
        sources.append(Source(name, pattern, shards))
    if not sources:
        raise ValueError(f"{flag} is empty: give shards, as in /data/cc3m/{{00000..00331}}.tar.")
    return sources


def _least(pattern: str) -> int:
    """Return a lower bound of the number of shards that a pattern expands to, without expanding it."""
    ranges = re.findall(r"\{(-?\d{1,20})\d*\.\.(-?\d{1,20})", pattern)
    lists = re.findall(r"\{([^{}]*,[^{}]*)\}", pattern)
    nested = "{" in re.sub(r"\{[^{}]*\}", "", pattern)
    choices = [abs(int(a) - int(b)) + 1 for a, b in ranges] + [text.count(",") + 1 for text in lists if not nested]
    return math.prod(choices)


def expand(pattern: str, flag: str = "--train-data") -> tuple[str, ...]:
    """Expand braces as the shell and open_clip do, and `*` in local paths and Hugging Face repos."""
    from braceexpand import braceexpand

    if "\0" in pattern:
        raise ValueError(f"{flag}: {shown(redact(pattern))} holds a null byte, which a file name cannot contain.")
    try:
        few = _least(pattern) <= MAX_SHARDS
        shards = list(itertools.islice(braceexpand(pattern), MAX_SHARDS + 1)) if few else []
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{flag}: the braces in {shown(redact(pattern))} cannot be expanded ({type(error).__name__})."
        ) from None
    if not few or len(shards) > MAX_SHARDS:
        raise ValueError(f"{flag}: {shown(redact(pattern))} expands to more than {MAX_SHARDS:,} shards.")
    matches: list[str] = []
    for shard in shards:
        if kind(shard) == "unknown":
            raise ValueError(
                f"{flag}: {shown(redact(shard))} is of an unknown kind: use a path, http(s)://, s3://, gs://, az://, "
                "hf://datasets/ORG/NAME/FILE, or a command, as in 'pipe:ssh host cat /data/{000..099}.tar'."
            )
        package, extra = OBJECT_STORES.get(kind(shard), (None, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{flag}: {kind(shard)}:// shards need the package {package}: run "
                f"`pip install 'pcmepp-openclip[{extra}]'`."
            )
        if kind(shard) == "local" and "*" in shard:
            # A file may be called like a command or a URL: "./" keeps it a file.
            matches += [name if kind(name) == "local" else f"./{name}" for name in sorted(glob.glob(local_path(shard)))]
        elif kind(shard) == "hf":
            matches += _expand_hf(shard, flag)
        else:
            matches.append(shard)
    if not matches:
        raise ValueError(f"{flag}: no shard matches {shown(redact(pattern))}.")
    if len(set(matches)) != len(matches):
        raise ValueError(f"{flag}: {shown(redact(pattern))} contains the same shard twice.")
    return tuple(matches)


def kind(shard: str) -> str:
    """Return 'pipe', 'http', 'hf', 's3', 'gs', 'az', 'local', or 'unknown' for a scheme that has no reader."""
    if shard.startswith("pipe:"):
        return "pipe"
    scheme = _SCHEME.match(shard)
    if scheme is None or scheme[1].lower() == "file":
        return "local"
    name = scheme[1].lower()
    if name not in SCHEMES or (name == "hf" and not _HF.fullmatch(shard)):
        return "unknown"
    return "http" if name == "https" else name


def local_path(shard: str) -> str:
    return re.sub(r"^file://(localhost)?", "", shard, flags=re.IGNORECASE)


def split_hf(shard: str) -> tuple[str, str | None, str]:
    """Return repo, revision and path of an `hf://datasets/...` shard."""
    match = _HF.fullmatch(shard)
    assert match
    return match["repo"], match["revision"], match["path"]


def _expand_hf(shard: str, flag: str) -> list[str]:
    repo, revision, path = split_hf(shard)
    if "*" not in path:
        return [shard]
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
    except Exception as error:
        raise ValueError(
            f"{flag}: the files of the Hugging Face dataset {repo} cannot be listed ({type(error).__name__}); "
            "is its name right, and does `hf auth login` have access?"
        ) from None
    prefix = shard[: -len(path)]
    return [prefix + name for name in sorted(files) if fnmatchcase(name, path)]


def shard_key(shard: str) -> str:
    """Return the name of a shard in a sizes.json: its basename, or that of the last .tar in a pipe's command."""
    if kind(shard) == "pipe":
        tars = re.findall(r"[\w.-]+\.(?:tar|tgz)\b(?:\.\w+)?", shard)
        return tars[-1] if tars else shard.split()[-1].rsplit("/", 1)[-1]
    return os.path.basename(shard.partition("?")[0] if kind(shard) == "http" else shard)


def sibling(shard: str, name: str) -> str | None:
    """Return the place of a file next to the shard, or None for a pipe, which has no folder."""
    if kind(shard) == "pipe":
        return None
    if kind(shard) == "http":
        place, mark, query = shard.partition("?")
        return place.rsplit("/", 1)[0] + "/" + name + mark + query
    if kind(shard) == "local":
        return os.path.join(os.path.dirname(local_path(shard)), name)
    return shard.rsplit("/", 1)[0] + "/" + name


def label(shard: str) -> str:
    """Return a shard as logs and errors may show it."""
    return printable(redact(shard))


def shown(name: str) -> str:
    """Return an untrusted name as messages may show it: on one line, and not too long."""
    name = printable(name).replace("\n", "\\n").replace("\t", "\\t")
    return name if len(name) < 200 else f"{name[:200]}..."
