"""`pcmepp eval`: what a model finds, and what its uncertainty means. One evaluator a file, each yields (name, value).

The way through: `datasets` (what is in a folder), `encode` (images and texts to Gaussians), `retrieval`, `coco`,
`zeroshot` and `uncertainty` (Gaussians to numbers; they know no files), `pages` (numbers to a report), `command`.
"""
