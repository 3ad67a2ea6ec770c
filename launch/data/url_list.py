"""Published annotations to the list of URLs and captions that img2dataset reads (Parquet). Runs in its environment.

python url_list.py cc3m    Train_GCC-training.tsv   cc3m.parquet
python url_list.py cc12m   cc12m.tsv                cc12m.parquet
python url_list.py redcaps annotations/             redcaps.parquet     # a folder of {subreddit}_{year}.json
"""

import argparse
import html
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pandas as pd

TSV_COLUMNS = {"cc3m": ["caption", "url"], "cc12m": ["url", "caption"]}


def read_tsv(path: Path, columns: list[str]) -> pd.DataFrame:
    """A file of two columns without a header. Captions hold quotes that mean nothing; other rows are left out."""
    rows, others = [], 0
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            row = line.rstrip("\r\n").split("\t")
            if len(row) == len(columns):
                rows.append(row)
            else:
                others += 1
    if others:
        print(f"{path}: {others} rows have not {len(columns)} columns and are left out", file=sys.stderr)
    if not rows:
        sys.exit(f"{path} has no rows of {' and '.join(columns)} with a tab between: is it the right file?")
    return pd.DataFrame(rows, columns=columns, dtype=str)


def read_redcaps(folder: Path) -> pd.DataFrame:
    """URL, cleaned caption and subreddit of every post."""
    files = sorted(folder.glob("*.json"))
    if not files:
        sys.exit(f"There is no *.json in {folder}: unpack RedCaps' annotations there.")
    rows = []
    for file in files:
        try:
            posts = json.loads(file.read_text(encoding="utf-8"))["annotations"]
            for post in posts:
                name = post.get("subreddit")
                subreddit = name if isinstance(name, str) else re.sub(r"_\d{4}$", "", file.stem)
                caption = clean(post.get("caption") or post.get("raw_caption") or "")
                rows.append((image_url(post.get("url") or ""), caption, subreddit))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            sys.exit(f"{file} does not hold RedCaps' annotations ({type(error).__name__}): unpack them anew.")
    return pd.DataFrame(rows, columns=["url", "caption", "subreddit"])


def clean(caption: str) -> str:
    """What RedCaps does to its raw captions, for posts that come without the cleaned one; else it changes nothing."""
    caption = html.unescape(caption)
    caption = re.sub(r"\[[^\]]*\]|\([^)]*\)", " ", caption)  # [OC], (1920x1080)
    caption = re.sub(r"https?://\S+", " ", caption)
    caption = re.sub(r"(?<!\w)(?:/?u/|@)[\w-]+", "<usr>", caption)
    return " ".join(caption.split())


def image_url(url: str) -> str:
    """Of a page on Imgur, the address of its image."""
    parts = urlsplit(url)
    if parts.netloc in ("imgur.com", "www.imgur.com", "m.imgur.com") and re.fullmatch(r"/\w+", parts.path):
        return f"https://i.imgur.com{parts.path}.jpg"
    return url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=[*TSV_COLUMNS, "redcaps"])
    parser.add_argument("annotations", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    if not args.annotations.exists():
        sys.exit(f"There is no {args.annotations}: download the annotations of {args.dataset} first.")
    if args.dataset == "redcaps":
        table = read_redcaps(args.annotations)
    else:
        table = read_tsv(args.annotations, TSV_COLUMNS[args.dataset])
    found = len(table)
    table["caption"] = table["caption"].str.strip()
    table = table[(table["caption"] != "") & table["url"].str.match(r"https?://")].drop_duplicates()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.output.with_suffix(".part")
    table.to_parquet(temporary, index=False)
    os.replace(temporary, args.output)
    print(f"{args.output}: {len(table)} URLs of {found} annotations")


if __name__ == "__main__":
    main()
