"""The PCME++ model and its parts.

`pcmepp` is the model, `branches` its log-variance branches, and `batches` what a model takes in place of pixels or
token ids. `gpo` pools tokens and leaves some out in training, and `lora` trains low-rank changes of towers.
`state_dict` fits the tensors of a file to the model, `fingerprint` names its weights, `export` writes it to a folder,
and `convert` is the command that reduces it to a plain open_clip model.
"""
