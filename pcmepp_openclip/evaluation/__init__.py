"""`pcmepp eval` measures what a model finds and what its uncertainty means; each evaluator is a file with `Metric`s.

The files in the order of a run are `command`; `datasets` (what is in a folder); `columns` (the model, and what its
results are ranked by); `tasks` (which evaluators run on what); the evaluators `retrieval` with `coco` and `conformal`,
`zeroshot` with `bprw`, `uncertainty` with `levels` and `failure`, `neighbours`, `vagueness`, `pairs` and
`correspondence`, which take Gaussians and know no files; `metric` (their result); `pages` and `questions` (tables and
the report); `pictures` (the samples in it).
"""
