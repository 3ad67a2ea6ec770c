"""The PCME++ model: `pcmepp` is the model and `towers` its computation, `cached` is what a model of frozen towers takes
in place of images and texts, `state_dict` is what it loads from a file, `export` the folder that it is exported to, and
`convert` the command that reduces it to a plain CLIP."""
