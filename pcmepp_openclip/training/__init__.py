"""Training by open_clip's loop.

`command` is `pcmepp train`, with its `dry_run`. `hooks` is what happens between the steps of the loop: `monitor`
watches the loss, `coordination` lets all ranks save or stop at the same step, `waits` bounds waiting, `validation`
computes the metrics, and `push` hands checkpoints to the Hub.
"""
