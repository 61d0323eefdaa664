"""Virtual time: how fast clients are, when they are there, and who replies when."""
