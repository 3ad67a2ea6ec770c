"""clip_benchmark 1.6.2's command: it makes a float of an array with one element, which numpy refuses since 2.4."""

import builtins
import sys

from clip_benchmark import cli
from clip_benchmark.metrics import zeroshot_classification

zeroshot_classification.float = lambda x: builtins.float(x.item() if hasattr(x, "item") else x)

if __name__ == "__main__":
    sys.exit(cli.main())
