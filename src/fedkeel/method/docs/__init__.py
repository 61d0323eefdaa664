"""A method in words: its docstring, its page, its citation."""
