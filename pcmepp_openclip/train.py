"""`torchrun ... -m -- pcmepp_openclip.train FLAGS`: the same as `pcmepp train FLAGS`, on many ranks."""

import sys

if __name__ == "__main__":
    from .cli import main

    sys.argv.insert(1, "train")
    sys.exit(main())
