"""The files of a run: `checkpoints` with the state of all generators (`rng`), the `record` of its settings and
results, and the `lock` of its folder."""
