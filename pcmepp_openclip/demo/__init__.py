"""`pcmepp demo`: scenes are drawn, small models are trained on them, and a report says what their uncertainty means.

In the order of a run: `scenes`, `drawing`, `dataset`, `command`, `measure`, `goals`, `figure`, `pages`."""
