"""Four methods that the PCME++ paper compares with and the package does not have: NCR, DECL, DAA and P2RM.

`losses` has the maths, `pairs` reads shards, `training` is the loop, and `__main__` trains and evaluates a model. The
rows of `python -m research.paper` whose flags have --rival are run by it."""
