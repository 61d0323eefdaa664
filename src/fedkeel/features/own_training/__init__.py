"""Local training by a function of the user's, in place of fedkeel's own steps."""
