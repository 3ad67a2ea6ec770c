"""`python -m research.toy`: the 2-D toy of the PCME++ paper, points of three classes of which some are of two.

`points` draws the dataset, `training` has the losses and trains, `figure` draws the picture and the animation."""
