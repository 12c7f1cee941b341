"""`python -m lmhead`: the same as the `lmhead` command."""

from lmhead.cli import main

if __name__ == "__main__":
    main()
