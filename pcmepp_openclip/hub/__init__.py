"""Models on the Hugging Face Hub.

`command` is `pcmepp push`. `staging` prepares the folder to push, with its `card`; `upload` sends it and explains the
Hub's answers. `background` is `pcmepp push` in a process of its own, for a training run.
"""
