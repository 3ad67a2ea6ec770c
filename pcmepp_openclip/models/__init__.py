"""The PCME++ model: `pcmepp` is the model and `towers` its computation, `state_dict` is what it loads from a file,
`export` the folder that it is exported to, and `convert` the command that reduces it to a plain CLIP."""
