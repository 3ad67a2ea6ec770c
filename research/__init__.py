"""Studies that use the package and are no part of it: the paper's tables, its toy, sweeps and photographs."""
