"""How a terminal and a notebook show the progress of runs."""
