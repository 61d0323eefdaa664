"""What a run leaves behind.

This package is a leaf: a run writes these records and the report reads them. It imports neither
torch nor another package of fedkeel, so that a report needs no more than the files.
"""
