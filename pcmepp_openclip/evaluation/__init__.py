"""`pcmepp eval`: what a model finds, and what its uncertainty means. One evaluator a file, each yields (name, value).

The way through: `command`, `datasets` and `samples` (what is in a folder), `encode` (images and texts to Gaussians),
`retrieval`, `coco`, `zeroshot` with `bprw`, and `uncertainty` (Gaussians to numbers; they know no files), `tasks`
(which of them for what), `pages` (numbers to a report).
"""
