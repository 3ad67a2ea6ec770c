"""The PCME++ model: `pcmepp` is the model and `towers` its computation, `cached` what it takes of frozen towers, `state_dict` is what it loads from a file,
`export` the folder that it is exported to, and `convert` the command that reduces it to a plain CLIP."""
