"""`pcmepp paper TABLE`: the tables of the PCME++ paper, each one command.

In the order of a run: `command`; `tables` (the registry: a row is a line of flags with the paper's numbers) with
`rows` (what a table is) and `columns` (which metric of `pcmepp eval` is a column); `scales` (drawn scenes, or COCO);
`runner` (trains and evaluates); `baselines`, `agreement` (does the paper's order hold?) and `pages` (what is printed
and written)."""
