"""Models from disk or the Hub, and their encoded samples on disk.

`load` loads a model by its name. `encode` encodes images and texts to Gaussians.
`store` keeps encoded samples in files.

Three modules keep the output of frozen towers for `pcmepp train --head-only --cache-tokens DIR`: `tokens` is the way in
and checks all that it depends on, `token_pass` computes it, and `token_loader` makes the batches of an epoch.
"""
