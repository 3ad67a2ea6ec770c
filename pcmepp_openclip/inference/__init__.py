"""Models in use: `model` has `ImageTextModel`, which encodes images and texts and answers three questions about them.

`scores` is the maths that it shares with the commands, and `beside` finds the bank and the calibration that lie beside
the weights. `bank_command` is `pcmepp bank`, `calibrate_command` is `pcmepp calibrate`, and `pairs` draws and encodes
the pairs that both need.
"""
