"""What a run leaves on disk: `checkpoints` with the state of all generators (`rng`), the `record` of its settings and
results, and the `lock` of its folder."""
