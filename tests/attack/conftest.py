"""The scripts here are not tests, and pytest collects none of them."""

collect_ignore_glob = ["*.py"]
