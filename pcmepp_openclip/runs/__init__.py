"""What a run leaves on disk: checkpoints, the record of its results, the lock of its folder."""
