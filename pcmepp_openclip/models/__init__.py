"""The PCME++ model and its parts.

`pcmepp` is the model, `branch` the interface of a log-variance branch, `split` and `top` its two places, and `batches`
what a model takes in place of pixels or token ids. `lora` trains low-rank changes of towers. `gpo` pools tokens and
leaves some out in training, and `pooled` are the branches that use it. `state_dict` fits the tensors of a file to the
model, `fingerprint` names its weights, `export` writes it to a folder, and `convert` is the command that reduces it to
a plain open_clip model.
"""
