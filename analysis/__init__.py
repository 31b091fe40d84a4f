"""Reading what a run left behind: curves, tables, comparisons."""
