"""`pcmepp demo`: scenes are drawn, a small model is trained on them, and a report says what its uncertainty means.

In the order of a run: `scenes`, `drawing`, `dataset`, `command`, `measure`, `figure`, `pages`."""
