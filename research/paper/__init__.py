"""`python -m research.paper TABLE`: the tables of the PCME++ paper, each one command.

`tables.csv` has the rows: the paper's numbers, and the flags of `pcmepp train` that make them. `tables` reads it,
`columns` finds a column's metric among those of `pcmepp eval`, `runs` trains and evaluates, `pages` shows the result
and whether the paper's order holds, beside the `baselines`."""
