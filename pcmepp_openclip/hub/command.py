"""`pcmepp push`: push a run, a checkpoint or an exported folder to a Hugging Face repo.

    pcmepp push logs/run org/name                             # its newest checkpoint
    pcmepp push logs/run/checkpoints/epoch_8.pt org/name --tag epoch-8
    pcmepp push exported/ org/name --private --dry-run        # what would be sent; no network

bank.safetensors and calibration.json of an exported folder are pushed along; --bank and --calibration add them to any
other. Files that the repo already has are not sent again. The token comes from HF_TOKEN or `hf auth login`; there is
no flag for it.
"""

import argparse
import tempfile
from pathlib import Path

from ..system.flags import CommandParser
from ..system.redact import printable
from . import upload


def parser() -> CommandParser:
    """Return the parser of the flags."""
    parser = CommandParser("pcmepp push", __doc__)
    parser.add_argument("what", type=Path, help="a run folder, a .pt or .safetensors file, or an exported model folder")
    parser.add_argument("repo", metavar="ORG/NAME", help="the repo; it is created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create the repo as private, if it does not exist")
    parser.add_argument("--branch", metavar="NAME", help="push to this branch; it is created if it does not exist")
    parser.add_argument("--pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--tag", metavar="NAME", help="tag the commit")
    parser.add_argument("--model", metavar="NAME", help="name of the model, for a file that does not record it")
    parser.add_argument("--bank", type=Path, metavar="FILE", help="the model's bank, by `pcmepp bank`")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="its calibration, by `pcmepp calibrate`")
    parser.add_argument("--license", metavar="ID", default="mit", help="licence on the model card (default: mit)")
    parser.add_argument("--message", metavar="TEXT", help="commit message (default: the step of the checkpoint)")
    parser.add_argument("--dry-run", action="store_true", help="list files and sizes, show the card, send nothing")
    parser.check(lambda args: args.repo is not None and _target(args))
    parser.refuse(
        lambda args: args.pr and args.tag,
        "--tag names a commit of the repo, and a pull request has none yet: drop --tag or --pr.",
    )
    return parser


def _target(args: argparse.Namespace) -> upload.HubTarget:
    return upload.HubTarget(args.repo, private=args.private, branch=args.branch, pull_request=args.pr)


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from . import staging  # imports torch

    with tempfile.TemporaryDirectory(prefix="pcmepp-push-") as place:
        staged = Path(place)
        options = {name: getattr(args, name) for name in ("license", "model", "bank", "calibration")}
        message = staging.stage(args.what, args.repo, staged, **options)
        message = args.message or message
        if args.dry_run:
            return show(staged, args.repo, message)
        url, changed = upload.push(staged, _target(args), message, args.tag)
    print(printable(f"{message}: {'pushed to' if changed else 'nothing has changed,'} {url}"))


def show(staged: Path, repo_id: str, message: str) -> None:
    """Print what a push would send."""
    from ..models import export

    files = sorted(path for path in staged.rglob("*") if path.is_file())
    print(printable(f"To {repo_id}, as '{message}':\n"))
    for path in files:
        print(f"  {printable(path.relative_to(staged).as_posix()):32} {path.stat().st_size:>15,} bytes")
    print(f"  {'total':32} {sum(path.stat().st_size for path in files):>15,} bytes\n")
    print(printable((staged / export.CARD).read_text(encoding="utf-8", errors="replace")))
