"""Models on the Hugging Face Hub.

`command` is `pcmepp push`. `staging` prepares the folder to push, from the `facts` about a model, with its `card` and
`figures`; `upload` sends it and `errors` explains what the Hub answers. `worker` is the process that pushes for a
training run, whose checkpoints wait in the `queue`.
"""
