"""`pcmepp convert`: convert a PCME++ checkpoint to a plain open_clip model, without the log-variance branch.

pcmepp convert logs/run/checkpoints/epoch_32.pt clip.safetensors
python -c "import open_clip; open_clip.create_model('ViT-B-16', pretrained='clip.safetensors')"   # of PCMEpp-ViT-B-16
"""

import argparse
from pathlib import Path

from ..system import files
from ..system.flags import CommandParser


def parser() -> CommandParser:
    """Return the parser of the flags."""
    parser = CommandParser("pcmepp convert", __doc__)
    parser.add_argument("source", type=Path, help="a PCME++ checkpoint: .pt of a training run, or .safetensors")
    parser.add_argument("target", type=Path, help="the file to write: .safetensors or .pt")
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    parser.check(_check_source)
    parser.check(_check_target)
    return parser


def _check_source(args: argparse.Namespace) -> None:
    if args.source and not args.source.is_file():
        raise ValueError(f"{args.source}: there is no such file.")


def _check_target(args: argparse.Namespace) -> None:
    target = args.target
    if target is None:
        return
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{target}: the target must end in .safetensors or .pt.")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}.")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name the file to write.")
    if target.exists() and not args.overwrite:
        raise ValueError(f"{target} exists: name another file or add --overwrite.")


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    kept, dropped = to_clip(args.source, args.target)
    print(
        f"{args.target}: {len(kept)} tensors of a plain open_clip model, without {len(dropped)} tensors that only "
        "PCME++ has."
    )


def to_clip(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Write the plain model within `source` to `target`; return the names of the tensors that it kept and dropped."""
    from ..host import weights  # imports torch, which the flags do without
    from .pcmepp import is_gpo_mean, is_pcmepp_parameter

    files.check_folder(target.parent, "The folder")
    state_dict = weights.read_state_dict(source)
    dropped = [name for name in state_dict if is_pcmepp_parameter(name)]
    if not dropped:
        raise ValueError(f"{source} has no log-variance branch: it is not a PCME++ checkpoint.")
    if any(map(is_gpo_mean, state_dict)):
        raise ValueError(f"{source} pools its means by GPO, which no plain open_clip model does: keep it as it is.")
    kept = {name: tensor.contiguous() for name, tensor in state_dict.items() if not is_pcmepp_parameter(name)}
    files.save_tensors(kept, target)
    return list(kept), dropped
