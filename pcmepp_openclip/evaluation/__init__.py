"""`pcmepp eval`: what a model finds, and what its uncertainty means. One evaluator per file, each yields `Metric`s.

In the order of a run: `command`; `loading` (the model) with `recorded` (what the flags of a run changed in it);
`datasets`, `hierarchies`, `noisy_pairs` and `samples` (what is in a folder); `encode` (images and texts to Gaussians)
with `image_loader` (their pixels) and `chunks` (the Gaussians on disk); `columns` (what they are ranked by); `tasks`
(which evaluators run on what); the evaluators `retrieval` with `coco` and `conformal`, `zeroshot` with `bprw`,
`uncertainty` with `levels` and `failure`, `neighbours`, `vagueness`, `pairs` and `correspondence`, which take Gaussians
and know no files; `metric` (their result); `pages` and `questions` (tables and the report); `pictures` with `examples`
and `tsne` (the samples in it).
"""
