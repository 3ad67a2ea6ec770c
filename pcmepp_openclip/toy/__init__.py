"""`pcmepp toy`: the 2-D toy of the PCME++ paper, points of three classes of which some are of two.

In the order of a run: `command`; `points` (the dataset), `methods` (the four losses) and `training` (points to trained
points), which know no files; `outcomes` (the ratio of variances beside the paper's); `figure` (the picture and the
animation).
"""
