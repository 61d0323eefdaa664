"""The command as ``python -m fedkeel``, where its script is not on the path."""

from fedkeel.cli import main

if __name__ == "__main__":
    main()
