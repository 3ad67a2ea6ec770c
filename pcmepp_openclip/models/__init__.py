"""The PCME++ model and its parts.

`pcmepp` is the model, `branch` the interface of a log-variance branch, `split` and `top` its two places, `cached` a
batch that frozen towers have encoded, `labelled` a batch of images with the ids and shares of its labels, and `lora`
the low-rank training of towers. `gpo` pools tokens and leaves some out in training, and `pooled` are the branches that
use it. `state_dict` fits the tensors of a file to the model, `fingerprint` names its weights, `export` writes it to a
folder, and `convert` is the command that reduces it to a plain open_clip model.
"""
