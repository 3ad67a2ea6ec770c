"""Models from disk or the Hub, and what they encode, on disk.

`load`: a model by its name. `encode`: images and texts to Gaussians, with `images` (their pixels). `store`: the files
of encoded samples.

The output of frozen towers, for `pcmepp train --head-only --cache-tokens DIR`: `tokens` is the way in and says what
they depend on, `token_pass` computes them, and `token_loader` has the batches of an epoch.
"""
