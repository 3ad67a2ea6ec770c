"""The flags of the commands that run in folders whose import needs torch, so that their --help does without it.

`evaluation` has those of `pcmepp eval`, and `bank` those of `pcmepp bank` and `pcmepp calibrate`. The other commands
have their flags in their own module.
"""
