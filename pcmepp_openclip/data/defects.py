"""The reasons why a sample or a shard is not used, as logs, reports and docs name them."""

from collections.abc import Callable

# These concern a whole shard. The number of lost samples is known if the shard was counted.
MISSING_SHARD = "missing shard"
LOST_SHARD = "connection lost"
TRUNCATED_SHARD = "truncated shard"
NOT_A_TAR = "not a tar file"
EXPANDS = "expands too far"
FEWER_THAN_COUNTED = "fewer samples than counted"
MORE_THAN_COUNTED = "more samples than counted"

# These concern a sample, and show in its tar members alone.
NO_IMAGE = "no image"
NO_CAPTION = "no caption"
EMPTY_CAPTION = "empty caption"
NOT_UTF8 = "caption not UTF-8"
BAD_CAPTIONS = "captions not a list of texts"
DUPLICATE_KEY = "duplicate key"
LINK = "link in place of a file"
HUGE_FILE = "file too large"

# These concern a sample, and show when its image is decoded.
BROKEN_IMAGE = "broken image"
UNKNOWN_FORMAT = "unknown image format"
HUGE_IMAGE = "too many pixels"
UNFIT_IMAGE = "transform failed"

Note = Callable[[str, int, str], None]
"""A function that takes (cause, samples lost, place of the first one)."""
