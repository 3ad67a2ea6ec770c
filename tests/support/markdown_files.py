"""What the tests of the documentation read from Markdown: links, headings, code blocks and inline code."""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code; `line` is that of its fence."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(path, text[: found.start()].count("\n") + 1, found["language"], found["text"])
        for found in FENCE.finditer(text)
    ]


def prose(path: Path) -> str:
    """The file without its blocks of code."""
    return FENCE.sub("", path.read_text())


def links(path: Path) -> list[str]:
    return LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path)))


def inline_code(path: Path) -> list[str]:
    return re.findall(r"`([^`]+)`", prose(path))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a file."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", prose(path), flags=re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def commands(block: Block) -> list[str]:
    """The commands of a block of shell: continued lines joined, comments and empty lines dropped."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]
