"""NCR, DECL, DAA and P2RM: `losses` has the maths, `pairs` the data, `training` the loop, `__main__` the commands."""
