"""`pcmepp demo`: the whole way, small. Scenes are drawn, a model is trained on them, and a report says what its
uncertainty means. In the order of a run: `scenes`, `pictures`, `dataset`, `command`, `measure`, `pages`."""
