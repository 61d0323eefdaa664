"""The scripts here are no tests, and pytest collects none of them."""

collect_ignore_glob = ["*.py"]
