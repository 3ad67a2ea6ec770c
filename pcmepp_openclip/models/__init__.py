"""The PCME++ model: `pcmepp` is the model, `branch` what a log-variance branch is, `split` and `top` its two places,
`cached` a batch that frozen towers have been through, `labelled` a batch of images
with what their labels depend on, and `lora` the low-rank training of towers. `gpo` pools tokens and leaves some out in
training, and `pooled` are the branches that use it. `state_dict` is what the model loads from a file,
`fingerprint` a name for its weights, `export` the folder that it is exported to, and `convert` the command that reduces
it to a plain open_clip model."""
