"""Training.

`command` is `pcmepp train`, with its `dry_run`, and `loop` is the run: read that first. `waits` waits for batches,
`checkpoint` saves and restores the run, `validation` computes the metrics on the images and captions of
`validation_data`. `caching` fills a cache of tokens before the first epoch, and `augment` changes batches before a
step. `memory` tries the memory of the longest texts before the first step, and says what to do where it is not enough.
`monitor` watches and logs the loss, `health` warns of an uncertainty that loses its meaning, `coordination` lets all
ranks save or stop at the same step, `failures` ends all of them when one fails, and `push` hands checkpoints to the
Hub.

`config` joins all flags: their tables stand in `finetuning`, `augment`, `model_flags`, `data.arguments` and itself,
each flag with its checks, and a run hands on the one `RunConfig`. `global_batch` divides the samples of a step over
the ranks. `recipe` does what the flags for fine-tuning ask for: `param_groups` and `schedule` set learning rates, and
`weights` keeps the best and the averaged ones.
"""
